"""``leadout doctor``: which checks run in which order, how they are printed, and the exit status."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cluster.config.settings import LeadoutConfig
from leadout.console import wide_console
from leadout.doctor import machine_checks
from leadout.doctor.accelerator_checks import check_gpus, check_rdma
from leadout.doctor.check import Check, CheckResult, run_check
from leadout.doctor.cluster_checks import check_cluster
from leadout.doctor.model_checks import check_model
from leadout.doctor.network_checks import check_router_port, check_worker_address
from leadout.doctor.nixl_checks import check_nixl
from leadout.doctor.registry_checks import check_embedded_registry, check_registry
from leadout.doctor.transfer_checks import check_memory_access, check_transfer
from leadout.serve import needs_own_registry

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
_STATUS_WIDTH = 7
_NAME_WIDTH = 18  # of the checks that always run


def run_doctor(config: LeadoutConfig, *, as_json: bool, strict: bool, url: str | None) -> int:
    """Run all checks and print what they found. ``url``: the router of a running cluster to look at, too.

    Returns 0, or 1 if a check failed; with ``strict`` also if one warned.
    """
    results: list[CheckResult] = []
    console = wide_console()
    for check in checks(config, url):
        with _progress(console, check.name, is_shown=not as_json):
            found = run_check(check)
        results.extend(found)
        if not as_json:
            for result in found:
                print_result(console, result)
    is_ok = exit_status(results, strict=strict) == 0
    if as_json:
        print(json.dumps({"ok": is_ok, "checks": [result.as_dict() for result in results]}, indent=1))
    else:
        console.print(_summary(results))
    return 0 if is_ok else 1


def checks(config: LeadoutConfig, url: str | None) -> list[Check]:
    """All checks in the order in which they run, what others depend on first."""
    is_single_machine = needs_own_registry(config)
    num_workers = config.local.prefill + config.local.decode if is_single_machine else 1
    selected = [
        Check("python", machine_checks.check_python),
        Check("torch", lambda: machine_checks.check_torch(config.model.dtype), timeout_s=60),
        Check("cores", lambda: machine_checks.check_cores(config)),
        Check("model", lambda: check_model(config, num_workers=num_workers), timeout_s=30),
        Check("shm", machine_checks.check_shm),
        Check("open-files", lambda: machine_checks.check_open_files(config)),
        Check("locked-memory", lambda: machine_checks.check_locked_memory(config)),
        Check("nixl", lambda: check_nixl(config.kv_transfer), timeout_s=60),
        Check("memory-access", check_memory_access),
        Check("transfer", lambda: check_transfer(config.kv_transfer), timeout_s=130),
        Check("gpu", check_gpus, timeout_s=50),
        Check("rdma", check_rdma),
        Check("router-port", lambda: check_router_port(config.router)),
        Check("worker-address", lambda: check_worker_address(config.worker, config.registry.url)),
        Check(
            "embedded-registry", lambda: check_embedded_registry(is_needed=is_single_machine), timeout_s=20
        ),
        Check(
            "registry", lambda: check_registry(config.registry, is_named=not is_single_machine), timeout_s=60
        ),
    ]
    if url is not None:
        selected.append(Check("cluster", lambda: check_cluster(url), timeout_s=60))
    return selected


def exit_status(results: Sequence[CheckResult], *, strict: bool) -> int:
    """1 if something failed, or, with ``strict``, if there is a warning; else 0."""
    bad = ("failed", "warning") if strict else ("failed",)
    return 1 if any(result.status in bad for result in results) else 0


def print_result(console: Console, result: CheckResult) -> None:
    """A line with status, name and what was seen; below it, indented, what to do."""
    if not console.is_terminal:  # one line each, for logs and grep
        console.print(
            Text(f"{result.status:{_STATUS_WIDTH}}  {result.name:{_NAME_WIDTH}}  {result.seen}"),
            soft_wrap=True,
        )
        if result.remedy:
            console.print(Text(f"{'':{_STATUS_WIDTH}}  → {result.remedy}"), soft_wrap=True)
        return
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=_STATUS_WIDTH)
    row.add_column(width=max(_NAME_WIDTH, len(result.name)))
    row.add_column(ratio=1, overflow="fold")
    # As Text: what was seen may hold brackets, which are no markup.
    row.add_row(Text(result.status, _STYLES[result.status]), Text(result.name), Text(result.seen))
    console.print(row)
    if result.remedy:
        indent = _STATUS_WIDTH + 2
        console.print(
            Padding(Text(f"→ {result.remedy}", _STYLES[result.status]), (0, 0, 0, indent), expand=False)
        )


def _summary(results: Sequence[CheckResult]) -> Text:
    counts = Counter[str](result.status for result in results)
    parts = [f"{counts[status]} {status}" for status in _STYLES if counts[status]]
    return Text(f"\n{', '.join(parts)}", "bold")


@contextlib.contextmanager
def _progress(console: Console, name: str, *, is_shown: bool) -> Iterator[None]:
    if is_shown and console.is_terminal:
        with console.status(f"checking {name}"):
            yield
    else:
        yield
