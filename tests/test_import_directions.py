"""The map of docs/architecture.md as a test: who may import whom, and what stays out of where."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED: dict[str, set[str]] = {
    "cluster": set(),
    "model_files": {"cluster"},
    "text_pipeline": set(),
    "engine": {"cluster", "model_files"},
    "kv_transfer": {"cluster"},
    "worker_runtime": {"cluster", "engine", "kv_transfer"},
    "prefill_worker": {"cluster", "engine", "kv_transfer", "worker_runtime"},
    "decode_worker": {"cluster", "engine", "kv_transfer", "worker_runtime"},
    "router": {"cluster", "model_files", "text_pipeline"},
    "leadout": {
        "cluster",
        "model_files",
        "text_pipeline",
        "engine",
        "kv_transfer",
        "worker_runtime",
        "prefill_worker",
        "decode_worker",
        "router",
    },
}
# The engine knows no network: of cluster/ only plain types and hashes.
ENGINE_MAY_USE = {
    "cluster.block_hash",
    "cluster.clock",
    "cluster.kv_layout",
    "cluster.load",
    "cluster.messages",
    "cluster.sampling_params",
    "cluster.sequence_spec",
}
WITHOUT_TORCH = (
    "cluster",
    "model_files",
    "text_pipeline",
    "router",
    "worker_runtime",
    "prefill_worker",
    "decode_worker",
    "engine/scheduler",
)
PURE = {  # take data, return data
    "engine/scheduler": {"torch", "time", "datetime", "asyncio", "threading", "socket", "random", "os"},
    "router/policy": {"torch", "time", "datetime", "asyncio", "threading", "socket", "random", "os"},
    "router/state": {"torch", "time", "datetime", "asyncio", "threading", "socket", "random", "os"},
    "kv_transfer/handoff.py": {"torch", "time", "datetime", "asyncio", "threading", "socket", "random", "os"},
    "kv_transfer/handoff_ledger.py": {"torch", "time", "datetime", "asyncio", "threading", "random", "os"},
}


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports_of(place: str) -> Iterator[Import]:
    path = ROOT / place
    for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                for name in node.names:
                    yield Import(file, node.lineno, name.name)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno}: relative import"
                yield Import(file, node.lineno, node.module or "")


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_is_below_them(package: str) -> None:
    allowed = ALLOWED[package] | {package}
    wrong = [
        str(one)
        for one in imports_of(package)
        if one.module.split(".")[0] in ALLOWED and one.module.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_is_on_the_map() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages == set(ALLOWED)


def test_the_engine_knows_no_network() -> None:
    wrong = [
        str(one)
        for one in imports_of("engine")
        if one.module.startswith("cluster") and one.module not in ENGINE_MAY_USE
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("place", ["router/services.py", "router/served_model.py"])
def test_the_router_s_parts_do_not_import_its_api(place: str) -> None:
    wrong = [str(one) for one in imports_of(place) if f"{one.module}.".startswith("router.api.")]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("place", WITHOUT_TORCH)
def test_torch_stays_out(place: str) -> None:
    wrong = [str(one) for one in imports_of(place) if one.module.split(".")[0] == "torch"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("place", PURE)
def test_schedulers_policies_and_ledgers_are_pure(place: str) -> None:
    wrong = [str(one) for one in imports_of(place) if one.module.split(".")[0] in PURE[place]]
    assert not wrong, "\n".join(wrong)


def test_the_router_process_loads_no_torch() -> None:
    """Not even through another import."""
    import subprocess
    import sys

    code = "import sys, router.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_architecture_page_names_files_that_exist() -> None:
    """A path is relative to the project, or to a package; a bare name is a file of any folder."""
    import re

    page = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    assert len(named) > 30
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts}
    wrong = {one for one in named if not any(f"/{path}".endswith(f"/{one}") for path in files)}
    assert not wrong, wrong
