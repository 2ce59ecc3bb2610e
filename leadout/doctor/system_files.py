"""Reads what the kernel says about itself under ``/proc`` and ``/sys``. ``root`` is ``/`` but in tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Bytes. ``limit`` and ``used`` are the control group's, None where it sets no limit."""

    total: int
    available: int  # what processes can still allocate, the control group's limit included
    limit: int | None
    used: int | None


def read_text(root: Path, path: str) -> str | None:
    """A small file without surrounding white space; None where it does not exist or may not be read."""
    try:
        return (root / path).read_text(errors="replace").strip()
    except OSError:
        return None


def has_capability(root: Path, number: int) -> bool:
    """Whether this process has the Linux capability with that number, effectively."""
    for line in (read_text(root, "proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def memory_state(root: Path) -> MemoryState:
    """Memory of the machine, or what the control group leaves of it. Raises ValueError without meminfo."""
    fields = {}
    for line in (read_text(root, "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    if "MemTotal" not in fields or "MemAvailable" not in fields:
        raise ValueError("/proc/meminfo has no MemTotal and MemAvailable")
    limits = [found for folder in _cgroup_folders(root, "memory") if (found := _memory_limit(folder))]
    if not limits:
        return MemoryState(fields["MemTotal"], fields["MemAvailable"], None, None)
    limit, used = min(limits, key=lambda one: one[0] - one[1])
    return MemoryState(fields["MemTotal"], max(0, min(fields["MemAvailable"], limit - used)), limit, used)


def cpu_quota(root: Path) -> float | None:
    """How many cores' worth of time the control group allows; None where it sets no limit."""
    quotas = [quota for folder in _cgroup_folders(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return min(quotas) if quotas else None


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """This process's group and those around it, of version 1 (a tree per controller) and 2."""
    folders = [root / "sys/fs/cgroup", root / "sys/fs/cgroup" / controller]
    for line in (read_text(root, "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = [part for part in path.split("/") if part]
        folders += [top.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]
    return folders


def _memory_limit(folder: Path) -> tuple[int, int] | None:
    """Limit and use in bytes. Files that the kernel can drop from its cache do not count as used."""
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = read_text(folder, limit_name), read_text(folder, used_name)
        if limit is None or used is None or not limit.isdigit() or int(limit) >= _UNLIMITED:
            continue
        stat = dict(
            line.split(" ", 1)
            for line in (read_text(folder, "memory.stat") or "").splitlines()
            if " " in line
        )
        return int(limit), max(0, int(used) - int(stat.get(cache_name, 0)))
    return None


def _cpu_quota(folder: Path) -> float | None:
    both = read_text(folder, "cpu.max")
    if both is not None:
        quota, _, period = both.partition(" ")
    else:
        quota = read_text(folder, "cpu.cfs_quota_us") or ""
        period = read_text(folder, "cpu.cfs_period_us") or ""
    if not quota.isdigit() or not period.isdigit():  # "max", "-1", or no such file
        return None
    return int(quota) / int(period)
