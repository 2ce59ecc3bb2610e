"""The machine: Python, processor, torch, cores, and the kernel's limits."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from pathlib import Path

from cluster.config.settings import LeadoutConfig
from leadout.cpu_plan import available_cores
from leadout.doctor.check import Finding
from leadout.doctor.child import ChildError, ask
from leadout.doctor.system_files import cpu_quota, has_capability

_MIN_PYTHON = (3, 11)
_NIXL_PROCESSORS = ("x86_64", "aarch64")
_TORCH_TIMEOUT_S = 50.0
# UCX's queues take about 2 MiB of it per worker; NCCL and other libraries of a GPU machine hundreds.
_LEAST_SHM = 1024**3
_LEAST_FILES = 256
_SPARE_FILES = 512  # sockets to workers and the registry, libraries, logs
_CAP_IPC_LOCK = 14
_DTYPE_FEATURES = ("avx2", "avx512_f", "avx512_bf16", "amx_tile", "amx_bf16", "bf16", "arm_bf16", "sve")


def check_python() -> Finding:
    """The interpreter and the platform."""
    return judge_platform(
        sys.version_info[:3], platform.python_implementation(), sys.platform, platform.machine()
    )


def judge_platform(version: tuple[int, ...], implementation: str, system: str, processor: str) -> Finding:
    """``system`` as in ``sys.platform``, ``processor`` as in ``platform.machine()``."""
    shown = ".".join(str(part) for part in version)
    seen = f"{implementation} {shown} on {system} {processor}"
    data = {"version": shown, "system": system, "processor": processor}
    if version < _MIN_PYTHON:
        return Finding("failed", seen, "Leadout needs Python 3.11 or newer", data)
    if system != "linux" or processor not in _NIXL_PROCESSORS:
        remedy = (
            "run workers on Linux x86_64 or aarch64: NIXL has wheels for these only. A router runs anywhere"
        )
        return Finding("failed", f"{seen}: no worker can run here", remedy, data)
    return Finding("ok", seen, data=data)


def check_torch(configured_dtype: str) -> list[Finding]:
    """Whether torch loads, the number formats of the processor, and the GPUs that torch sees."""
    try:
        probe = ask("torch_probe", {}, timeout_s=_TORCH_TIMEOUT_S)
    except ChildError as error:
        remedy = "pip install 'leadout[worker]'; a machine that runs only routers needs no torch"
        return [Finding("failed", str(error), remedy)]
    seen = f"torch {probe['version']}, kernels for {probe['cpu_capability']}"
    return [
        Finding("ok", seen, data={"version": probe["version"], "cuda_version": probe["cuda_version"]}),
        judge_dtype(
            configured_dtype,
            probe["cpu_features"],
            float16_linear=probe["float16_linear"],
            native_bfloat16=probe["native_bfloat16"],
        ),
        judge_cuda(probe),
    ]


def judge_dtype(
    configured: str, features: list[str], *, float16_linear: bool, native_bfloat16: bool
) -> Finding:
    """Which number format ``model.dtype`` comes to on a processor with these features."""
    chosen = ("float16" if float16_linear else "float32") if configured == "auto" else configured
    present = [name for name in _DTYPE_FEATURES if name in features]
    seen = f"model.dtype {configured} is {chosen}" if configured == "auto" else f"model.dtype is {chosen}"
    seen += f"; the processor has {', '.join(present) or 'no vector features that matter'}"
    data = {
        "dtype": chosen,
        "float16_linear": float16_linear,
        "native_bfloat16": native_bfloat16,
        "cpu_features": features,
    }
    if chosen == "float16" and not float16_linear:
        remedy = "set model.dtype to auto or float32: float16 needs an x86-64 processor with AVX2"
        return Finding("failed", seen, remedy, data, about="dtype")
    if chosen == "bfloat16":
        costs = "it rounds activations, which changes answers"
        if not native_bfloat16:
            costs += "; this processor emulates it, no faster than float32 and with as much memory"
        return Finding("warning", seen, f"set model.dtype to auto: {costs}", data, about="dtype")
    return Finding("ok", seen, data=data, about="dtype")


def judge_cuda(probe: dict[str, object]) -> Finding:
    """The GPUs that torch can use. Absent ones are no fault: the engine computes on the CPU."""
    devices = probe["devices"]
    assert isinstance(devices, list)
    data = {"devices": devices, "cuda_version": probe["cuda_version"]}
    if devices:
        shown = ", ".join(f"{one['name']} ({one['memory_bytes'] / 2**30:.0f} GiB)" for one in devices)
        return Finding("ok", f"CUDA {probe['cuda_version']}: {shown}", data=data, about="cuda")
    why = (
        "no GPU for torch, which is a CPU build"
        if probe["cuda_version"] is None
        else f"no GPU for torch, which is built for CUDA {probe['cuda_version']}"
    )
    return Finding("skipped", f"{why}; the engine computes on the CPU", data=data, about="cuda")


def check_cores(config: LeadoutConfig, root: Path = Path("/")) -> Finding:
    """Cores that are visible, against the time that the control group grants."""
    return judge_cores(available_cores(), cpu_quota(root), config.engine.num_threads)


def judge_cores(visible: int, quota: float | None, num_threads: int) -> Finding:
    """``quota`` is in cores, None for no limit. ``num_threads``: ``engine.num_threads``, 0 for automatic."""
    data = {"visible": visible, "quota": quota, "num_threads": num_threads}
    if quota is not None and quota < visible and (num_threads == 0 or num_threads > quota):
        threads = max(1, int(quota))
        seen = f"{visible} cores are visible, but this control group may use the time of {quota:g}"
        remedy = (
            f"set engine.num_threads so that all workers here together have {threads} "
            f"{'thread' if threads == 1 else 'threads'}: it is chosen by visible cores, and throttled "
            "threads hold each other up"
        )
        return Finding("warning", seen, remedy, data)
    if num_threads > visible:
        seen = f"{visible} cores, and engine.num_threads is {num_threads}"
        return Finding("warning", seen, f"set engine.num_threads to 0 (automatic) or at most {visible}", data)
    limit = "no limit on their time" if quota is None else f"time of {quota:g} of them"
    return Finding("ok", f"{visible} cores, {limit}", data=data)


def check_shm(path: Path = Path("/dev/shm")) -> Finding:
    """Size of the file system for shared memory."""
    if not path.is_dir():
        return Finding("failed", f"{path} does not exist", f"mount a tmpfs at {path}, of 1 GiB or more")
    usage = shutil.disk_usage(path)
    return judge_shm(usage.total, usage.free, str(path))


def judge_shm(total: int, free: int, path: str) -> Finding:
    """Sizes in bytes."""
    seen = f"{path} has {total / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB free"
    data = {"total_bytes": total, "free_bytes": free}
    if min(total, free) < _LEAST_SHM:
        remedy = (
            "give it 1 GiB: docker run --shm-size=1g (its default is 64 MiB); in Kubernetes mount an "
            f"emptyDir with medium: Memory at {path}; elsewhere mount -o remount,size=1g {path}"
        )
        if total >= _LEAST_SHM:
            remedy = f"remove what dead processes have left in {path}, or make it larger"
        return Finding("warning", seen, remedy, data)
    return Finding("ok", seen, data=data)


def check_open_files(config: LeadoutConfig) -> Finding:
    """The limit on open files against the connections of a router."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_open_files(soft, hard, config.router.max_connections)


def judge_open_files(soft: int, hard: int, max_connections: int) -> Finding:
    """Limits as ``getrlimit`` gives them; -1 is none."""
    needed = max_connections + _SPARE_FILES
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    seen = f"{shown} files may be open at once"
    data = {"soft": soft, "hard": hard, "needed": needed}
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Finding("ok", seen, data=data)
    remedy = (
        f"raise it to {max(needed, 65536)}: ulimit -n in a shell (hard limit: "
        f"{'none' if hard == resource.RLIM_INFINITY else hard}), LimitNOFILE= in a systemd unit, --ulimit "
        "nofile= in docker"
    )
    seen += f"; a router with router.max_connections={max_connections} needs {needed:,}"
    return Finding("failed" if soft < _LEAST_FILES else "warning", seen, remedy, data)


def check_locked_memory(config: LeadoutConfig, root: Path = Path("/")) -> Finding:
    """The limit on pinned memory, which matters where there is RDMA."""
    folder = root / "sys/class/infiniband"
    has_rdma = folder.is_dir() and any(folder.iterdir())
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return judge_locked_memory(
        soft,
        config.engine.kv_cache_memory,
        has_rdma=has_rdma,
        is_exempt=has_capability(root, _CAP_IPC_LOCK) or os.geteuid() == 0,
    )


def judge_locked_memory(soft: int, kv_cache_memory: int, *, has_rdma: bool, is_exempt: bool) -> Finding:
    """Bytes. An RDMA adapter pins the whole KV cache; a process with CAP_IPC_LOCK has no limit."""
    is_unlimited = soft == resource.RLIM_INFINITY
    seen = "any amount may be locked" if is_unlimited else f"{soft / 2**20:,.0f} MiB may be locked"
    data = {"soft": soft, "kv_cache_memory": kv_cache_memory, "has_rdma": has_rdma, "is_exempt": is_exempt}
    if not has_rdma:
        return Finding("ok", f"{seen}; only RDMA needs it, and there is none here", data=data)
    if is_unlimited or soft >= kv_cache_memory:
        return Finding("ok", seen, data=data)
    if is_exempt:
        return Finding("ok", f"{seen}, but this process has CAP_IPC_LOCK", data=data)
    remedy = (
        "set it to unlimited: memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, "
        "--ulimit memlock=-1 in docker"
    )
    return Finding(
        "failed", f"{seen}, and RDMA pins the KV cache of {kv_cache_memory / 2**20:,.0f} MiB", remedy, data
    )
