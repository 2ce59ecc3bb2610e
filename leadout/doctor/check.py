"""A check, and what it found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check saw. ``remedy`` says what to do, and is empty where nothing is to be done."""

    status: Status
    seen: str
    remedy: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    about: str = ""  # tells several findings of one check apart; becomes part of the name


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look at. ``look`` may take up to ``timeout_s`` seconds."""

    name: str
    look: Callable[[], Finding | Sequence[Finding]]
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A finding under the name that people and scripts know it by."""

    name: str
    status: Status
    seen: str
    remedy: str
    data: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Its entry in the JSON output."""
        return {
            "name": self.name,
            "status": self.status,
            "seen": self.seen,
            "remedy": self.remedy,
            "data": self.data,
        }


def run_check(check: Check) -> list[CheckResult]:
    """Run one check. One that raises or does not end in time has failed, and the others go on."""
    outcome: list[Finding] = []

    def look() -> None:
        try:
            found = check.look()
            outcome.extend([found] if isinstance(found, Finding) else found)
        except Exception as error:
            outcome[:] = [_crashed(error)]

    # A daemon: a check that hangs in a system call must not keep the process.
    thread = threading.Thread(target=look, name=f"check {check.name}", daemon=True)
    started = time.monotonic()
    thread.start()
    thread.join(check.timeout_s)
    if thread.is_alive():
        return [_result(check, _timed_out(time.monotonic() - started))]
    return [_result(check, finding) for finding in outcome]


def _result(check: Check, finding: Finding) -> CheckResult:
    name = f"{check.name}:{finding.about}" if finding.about else check.name
    return CheckResult(name, finding.status, finding.seen, finding.remedy, finding.data)


def _crashed(error: Exception) -> Finding:
    text = " ".join(str(error).split()) or "no further message"
    return Finding(
        "failed",
        f"the check itself failed: {type(error).__name__}: {text}",
        "if the message does not say what to mend, please report this as a bug of `leadout doctor`",
        {"error": type(error).__name__},
    )


def _timed_out(seconds: float) -> Finding:
    return Finding(
        "failed",
        f"no result after {seconds:.0f} s",
        "look for what hangs: a network file system, a driver, a name server, or an overloaded machine",
        {"timed_out": True},
    )
