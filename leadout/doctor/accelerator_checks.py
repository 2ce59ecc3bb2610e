"""GPUs with their links, and RDMA adapters: what the driver and the kernel report."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from leadout.doctor.check import Finding
from leadout.doctor.system_files import read_text

_SMI = "nvidia-smi"
_SMI_TIMEOUT_S = 20.0
_FIELDS = ("index", "name", "driver_version", "memory.total", "pci.bus_id")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_NVLINK = re.compile(r"NV\d+")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One line of ``nvidia-smi``."""

    index: int
    name: str
    driver: str
    memory_mib: int | None  # None where the device does not report it, as those with unified memory
    bus_id: str


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an adapter, as ``/sys/class/infiniband`` has it."""

    device: str
    port: int
    state: str  # "ACTIVE", "DOWN", "INIT", …
    rate: str  # as the kernel writes it: "400 Gb/sec (4X NDR)"
    link_layer: str  # "InfiniBand" | "Ethernet"

    @property
    def is_active(self) -> bool:
        """Whether data can go through it."""
        return self.state == "ACTIVE"


def check_gpus() -> list[Finding]:
    """GPUs and their links by ``nvidia-smi``; skipped where that does not exist."""
    binary = shutil.which(_SMI)
    if binary is None:
        return [Finding("skipped", f"no NVIDIA driver here ({_SMI} is not on the PATH)")]
    try:
        listing = _run([binary, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"])
        gpus = parse_gpus(listing)
    except (RuntimeError, ValueError) as error:
        remedy = "mend the driver first: dmesg names what is wrong; after an update of the driver, reboot"
        return [Finding("failed", str(error), remedy)]
    if not gpus:
        return [Finding("skipped", "the NVIDIA driver is loaded, and lists no GPU")]
    names = ", ".join(
        f"{gpu.name} ({gpu.memory_mib / 1024:.0f} GiB)" if gpu.memory_mib is not None else gpu.name
        for gpu in gpus
    )
    found = [
        Finding("ok", f"driver {gpus[0].driver}: {names}", data={"gpus": [_as_dict(gpu) for gpu in gpus]})
    ]
    if len(gpus) == 1:
        found.append(Finding("skipped", "one GPU: nothing to link", about="links"))
        return found
    try:
        found.append(judge_links(parse_topology(_run([binary, "topo", "-m"]))))
    except (RuntimeError, ValueError) as error:
        found.append(Finding("warning", str(error), "look at `nvidia-smi topo -m` yourself", about="links"))
    return found


def parse_gpus(listing: str) -> list[Gpu]:
    """The output of ``nvidia-smi --query-gpu=… --format=csv,noheader,nounits``. Raises ValueError."""
    gpus = []
    for line in listing.splitlines():
        if not line.strip() or line.startswith("No devices"):
            continue
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(_FIELDS) or not values[0].isdigit():
            raise ValueError(f"{_SMI} wrote a line that is not understood: {line!r}")
        index, name, driver, memory, bus_id = values
        gpus.append(Gpu(int(index), name, driver, int(memory) if memory.isdigit() else None, bus_id))
    return gpus


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """The links of ``nvidia-smi topo -m``: pairs of GPU numbers, the smaller one first, and how they connect.

    ``NV`` and a number is so many NVLinks; the others (PIX, PXB, PHB, NODE, SYS) are ways over PCIe. Raises
    ValueError where there is no such table.
    """
    header: list[str] = []
    links: dict[tuple[int, int], str] = {}
    for line in _ANSI.sub("", text).splitlines():
        words = line.split()
        if not header:
            if words and all(_GPU.fullmatch(word) for word in words[:1]):
                header = words
            continue
        if not words or not _GPU.fullmatch(words[0]):
            continue
        row = int(words[0].removeprefix("GPU"))
        # Columns after the GPUs (adapters, CPU affinity) have names of several words, and do not matter here.
        for column, link in zip(header, words[1:], strict=False):
            if not _GPU.fullmatch(column):
                break
            other = int(column.removeprefix("GPU"))
            if row < other:
                links[row, other] = link
    if not header:
        raise ValueError(f"{_SMI} topo -m wrote no table of GPUs")
    return links


def judge_links(links: Mapping[tuple[int, int], str]) -> Finding:
    """Whether each pair of GPUs has NVLink between them."""
    without = {pair: link for pair, link in links.items() if not _NVLINK.fullmatch(link)}
    data = {"links": [{"gpus": list(pair), "link": link} for pair, link in sorted(links.items())]}
    if not without:
        kinds = ", ".join(sorted(set(links.values())))
        return Finding("ok", f"NVLink between all {len(links)} pairs ({kinds})", data=data, about="links")
    kinds = ", ".join(sorted(set(without.values())))
    seen = f"{len(without)} of {len(links)} pairs of GPUs have no NVLink but PCIe ({kinds})"
    if len(without) == len(links):
        # Many machines are built so: nothing is broken.
        return Finding("ok", seen, data=data, about="links")
    pairs = " ".join(f"{one}-{other}" for one, other in sorted(without))
    remedy = f"place workers that hand over to each other on linked GPUs; not linked: {pairs}"
    return Finding("warning", seen, remedy, data, "links")


def check_rdma(root: Path = Path("/")) -> list[Finding]:
    """RDMA adapters with the state of their ports, and whether they reach GPU memory."""
    ports = rdma_ports(root)
    if not ports:
        return [Finding("skipped", "no RDMA adapter (/sys/class/infiniband is empty or missing)")]
    found = [judge_ports(ports)]
    if not _has_verbs_devices(root):
        found[0] = Finding(
            "warning",
            f"{found[0].seen}; but /dev/infiniband is missing: programs cannot use them",
            "give the container the devices: --device=/dev/infiniband; in Kubernetes, an RDMA device plugin",
            found[0].data,
        )
    if (root / "proc/driver/nvidia").is_dir():
        found.append(judge_gpudirect(has_peermem=(root / "sys/module/nvidia_peermem").is_dir()))
    return found


def rdma_ports(root: Path) -> list[RdmaPort]:
    """All ports of all adapters."""
    ports = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        if not folder.name.isdigit():
            continue
        state = read_text(folder, "state") or "unknown"
        ports.append(
            RdmaPort(
                device=folder.parent.parent.name,
                port=int(folder.name),
                state=state.partition(":")[2].strip() or state,  # "4: ACTIVE"
                rate=read_text(folder, "rate") or "unknown rate",
                link_layer=read_text(folder, "link_layer") or "unknown link layer",
            )
        )
    return ports


def judge_ports(ports: list[RdmaPort]) -> Finding:
    """At least one port must be up; those that are not are named."""
    shown = ", ".join(f"{one.device}:{one.port} {one.state}, {one.rate}, {one.link_layer}" for one in ports)
    data = {
        "ports": [
            {
                "device": one.device,
                "port": one.port,
                "state": one.state,
                "rate": one.rate,
                "link": one.link_layer,
            }
            for one in ports
        ]
    }
    down = [f"{one.device}:{one.port}" for one in ports if not one.is_active]
    if not down:
        return Finding("ok", shown, data=data)
    remedy = (
        f"not active: {' '.join(down)}. Check the cable and the switch's port; an InfiniBand port that stays "
        "in INIT needs a subnet manager (opensm). Ports that are not meant to be used: leave them out with "
        "UCX_NET_DEVICES"
    )
    return Finding("warning", shown, remedy, data)


def judge_gpudirect(*, has_peermem: bool) -> Finding:
    """Whether an adapter can read and write GPU memory itself."""
    data = {"nvidia_peermem": has_peermem}
    if has_peermem:
        return Finding("ok", "nvidia_peermem is loaded", data=data, about="gpudirect")
    remedy = (
        "modprobe nvidia_peermem on the host; not needed where UCX uses dma-buf (Linux 5.12 or newer with "
        "NVIDIA's open kernel modules)"
    )
    seen = "nvidia_peermem is not loaded: without it or dma-buf, KV in GPU memory goes through the host"
    return Finding("warning", seen, remedy, data, "gpudirect")


def _has_verbs_devices(root: Path) -> bool:
    folder = root / "dev/infiniband"
    return folder.is_dir() and any(folder.glob("uverbs*"))


def _run(command: list[str]) -> str:
    """The command's output. Raises RuntimeError where it fails or hangs."""
    shown = " ".join([_SMI, *command[1:]])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SMI_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"`{shown}` did not end within {_SMI_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise RuntimeError(f"`{shown}` cannot be run: {error}") from None
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        raise RuntimeError(f"`{shown}` ended with status {done.returncode}: {said}")
    return done.stdout


def _as_dict(gpu: Gpu) -> dict[str, object]:
    return {"index": gpu.index, "name": gpu.name, "memory_mib": gpu.memory_mib, "bus_id": gpu.bus_id}
