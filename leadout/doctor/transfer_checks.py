"""A real write between two processes of this machine: by which path it goes, and how fast."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from cluster.config.settings import KvTransferConfig
from leadout.doctor.check import Finding
from leadout.doctor.child import Child, ChildError
from leadout.doctor.system_files import has_capability, read_text
from leadout.doctor.ucx_log import LOGGING, UcxLog, parse_ucx_log

_ANSWER_TIMEOUT_S = 30.0
_NUM_BLOCKS = 64  # of 1 MiB
_CAP_SYS_PTRACE = 19
_FALLS_BACK = "workers on this machine fall back to TCP"
_PTRACE_SCOPE = "proc/sys/kernel/yama/ptrace_scope"
# A write through shared memory is one copy by the writer, and should cost about what a copy costs. Measured
# on a busy two-core machine it had 0.55 to 0.85 of a plain copy's speed, and TCP 0.3: a quarter is no noise.
_SLOW_SHARE = 0.25


def check_transfer(config: KvTransferConfig) -> list[Finding]:
    """Starts two processes with a transport each, as workers have it."""
    try:
        measured, is_intact, log = _measure(config)
    except ChildError as error:
        remedy = "see nixl:agent; if that is ok, look at the UCX_* variables set here and memory-access"
        return [Finding("failed", f"a write between two processes failed: {error}", remedy)]
    num_bytes = measured["num_bytes"]
    speed = judge_bandwidth(measured["write_gbps"], measured["copy_gbps"], num_bytes)
    return [judge_path(log), speed if is_intact else _damaged(num_bytes)]


def _measure(config: KvTransferConfig) -> tuple[dict[str, Any], bool, UcxLog]:
    """The source's answer, whether the right bytes arrived, and the source's log. Raises ChildError."""
    settings = {"backends": config.backends, "num_blocks": _NUM_BLOCKS}
    with (
        Child("transfer_peer", "target") as target,
        Child("transfer_peer", "source", environment=LOGGING) as source,
    ):
        target.tell(settings)
        record = target.answer(_ANSWER_TIMEOUT_S)
        source.tell({**settings, **record})
        measured = source.answer(_ANSWER_TIMEOUT_S)
        target.tell({})
        is_intact = bool(target.answer(_ANSWER_TIMEOUT_S)["intact"])
        return measured, is_intact, parse_ucx_log(source.log)


def judge_path(log: UcxLog) -> Finding:
    """By which transports one process of this machine writes to another."""
    data = {
        "ucx_version": log.version,
        "ucx_settings": log.settings,
        "lanes": list(log.write_lanes),
        "transports": list(log.transports),
    }
    version = f" (UCX {log.version}{f', {shown}' if (shown := _own_settings(log)) else ''})"
    if not log.write_lanes:
        return Finding(
            "skipped",
            "the write worked, but which path it took is not known: only UCX reports it, and it did not",
            data=data,
            about="path",
        )
    lanes = ", ".join(log.write_lanes)
    if log.is_tcp_only:
        return Finding(
            "warning",
            f"two processes of this machine write to each other over {lanes} only{version}: KV blocks take "
            "the slow way, silently",
            _tcp_remedy(log),
            data,
            about="path",
        )
    return Finding("ok", f"KV blocks go by {lanes}{version}", data=data, about="path")


def judge_bandwidth(write_gbps: float, copy_gbps: float, num_bytes: int) -> Finding:
    """Compares the write with a plain copy of as many bytes in the same run. Speeds in GB/s (10^9 bytes)."""
    share = write_gbps / copy_gbps
    seen = (
        f"{num_bytes // 1024**2} MiB to another process at {write_gbps:.1f} GB/s, which is {share:.2f} of a "
        f"plain memory copy ({copy_gbps:.1f} GB/s)"
    )
    data = {
        "write_gbps": round(write_gbps, 3),
        "copy_gbps": round(copy_gbps, 3),
        "share": round(share, 3),
        "num_bytes": num_bytes,
    }
    if share < _SLOW_SHARE:
        remedy = (
            f"below {_SLOW_SHARE:g} something is in the way: see transfer:path, and whether other programs "
            "keep the cores busy; then run it again"
        )
        return Finding("warning", seen, remedy, data, about="bandwidth")
    return Finding("ok", seen, data=data, about="bandwidth")


def check_memory_access(root: Path = Path("/")) -> Finding:
    """Whether the kernel lets one process write another's memory, which UCX's fast path on one host needs."""
    scope = read_text(root, _PTRACE_SCOPE)
    return judge_memory_access(
        None if scope is None else int(scope),
        may_trace=has_capability(root, _CAP_SYS_PTRACE),
        refusal=_refusal_to_write(),
    )


def judge_memory_access(scope: int | None, *, may_trace: bool, refusal: str | None) -> Finding:
    """``scope`` is Yama's, None without Yama. ``refusal``: what the kernel says to a try, None if it worked.

    The try writes to the own process, which Yama always allows: it finds system calls that a seccomp profile
    or a sandbox forbids.
    """
    data = {"ptrace_scope": scope, "cap_sys_ptrace": may_trace, "refusal": refusal}
    yama = "no Yama restrictions" if scope is None else f"kernel.yama.ptrace_scope is {scope}"
    seen = f"{yama}; {'CAP_SYS_PTRACE' if may_trace else 'no CAP_SYS_PTRACE'}"
    if refusal is not None:
        remedy = (
            "a seccomp profile or a sandbox forbids it: allow the call there, or give the container "
            "CAP_SYS_PTRACE (docker: --cap-add SYS_PTRACE)"
        )
        return Finding("warning", f"process_vm_writev fails ({refusal}): {_FALLS_BACK}", remedy, data)
    if scope == 3:  # as UCX judges; at 1 it allows its peers by itself
        remedy = "it holds until the next boot: set kernel.yama.ptrace_scope=1 in /etc/sysctl.d and reboot"
        return Finding("warning", f"{seen}: {_FALLS_BACK}", remedy, data)
    if scope == 2 and not may_trace:
        remedy = (
            "on the host, as root: sysctl -w kernel.yama.ptrace_scope=1; or give the workers CAP_SYS_PTRACE "
            "(docker: --cap-add SYS_PTRACE)"
        )
        return Finding("warning", f"{seen}: {_FALLS_BACK}", remedy, data)
    return Finding("ok", f"process_vm_writev works; {seen}", data=data)


def _refusal_to_write() -> str | None:
    """Writes a byte of this process by the system call; what the kernel says to it, None if it worked."""

    class Span(ctypes.Structure):  # struct iovec
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)
    ours, theirs = Span(ctypes.addressof(source), 1), Span(ctypes.addressof(target), 1)
    try:
        write = ctypes.CDLL(None, use_errno=True).process_vm_writev
    except AttributeError:
        return "this system has no such call"
    write.restype = ctypes.c_ssize_t
    one, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if write(os.getpid(), ctypes.byref(ours), one, ctypes.byref(theirs), one, flags) == 1:
        return None
    return os.strerror(ctypes.get_errno())


def _tcp_remedy(log: UcxLog) -> str:
    if "UCX_TLS=" in log.settings:
        return "this environment sets UCX_TLS: unset it, or add sm (shared memory) to it"
    return (
        "let the workers' processes write each other's memory: see memory-access; in containers, one pid and "
        "ipc namespace for workers of a host, and --cap-add SYS_PTRACE"
    )


def _own_settings(log: UcxLog) -> str:
    """The settings the environment made, without this check's own and those about logs."""
    settings = log.settings.split()
    return " ".join(
        one for one in settings if not one.startswith(("UCX_LOG_", "UCX_PROTO_INFO=", "UCX_WARN_"))
    )


def _damaged(num_bytes: int) -> Finding:
    return Finding(
        "failed",
        f"{num_bytes // 1024**2} MiB were written to another process, and other bytes arrived",
        "do not deploy: try UCX_TLS=tcp,self; look for another version of UCX or NIXL, and test the memory",
        about="bandwidth",
    )
