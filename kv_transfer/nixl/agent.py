"""Loads NIXL and creates one agent with one registered KV cache."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.members import TransportEndpoint
from kv_transfer.layout_planner import Int64s
from kv_transfer.transport import TransferError, TransportUnavailableError

logger = logging.getLogger(__name__)

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")  # the first two are the same library for two CUDA versions
_ENVIRONMENT_DEFAULTS: Mapping[str, str] = {
    "NIXL_LOG_LEVEL": "WARN",
    "UCX_LOG_LEVEL": "warn",
    "UCX_WARN_UNUSED_ENV_VARS": "n",  # UCX reports variables of other programs on stdout
}


def load_nixl(packages: Sequence[str] = _PACKAGES) -> ModuleType:
    """Import NIXL's Python interface from the first of ``packages`` that has it.

    Logging variables that the environment does not set get quiet defaults first, because UCX reads them when
    its library is loaded. Raises ``TransportUnavailableError`` if no package can be imported.
    """
    for variable, value in _ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(variable, value)
    failures: list[str] = []
    for package in packages:
        raise_exceptions = logging.raiseExceptions
        try:
            module = importlib.import_module(f"{package}._api")
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            failures.append(f"{package}: {error}")
            continue
        finally:
            logging.raiseExceptions = raise_exceptions  # importing NIXL turns it off for the whole process
        _adopt_nixl_logger()
        return module
    raise TransportUnavailableError(
        f"NIXL cannot be loaded on {sys.platform} {platform.machine()}, Python {platform.python_version()} "
        f"({'; '.join(failures)}). It has wheels for Linux on x86_64 and aarch64: "
        "pip install nixl-cu12, or nixl-cu13 with CUDA 13"
    )


def _adopt_nixl_logger() -> None:
    """Send NIXL's Python log records through this process's handlers instead of straight to stdout."""
    nixl_logger = logging.getLogger("nixl")
    nixl_logger.handlers.clear()
    nixl_logger.propagate = True


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """One agent and the KV cache that peers write into."""

    agent_name: str
    base_address: int
    num_bytes: int
    memory: str  # "DRAM" | "VRAM"
    device_id: int
    backends: tuple[str, ...]


def create_agent(settings: AgentSettings) -> tuple[Any, Any]:
    """Create an agent without a progress thread and register the KV cache with it.

    A progress thread would cost about a seventh of a core while idle; the caller polls instead. Returns the
    agent and the registration, which ``deregister_memory`` takes. Raises ``TransportUnavailableError`` if
    NIXL, a back end, or support for the memory is missing.
    """
    nixl = load_nixl()
    backends = ", ".join(settings.backends)
    config = nixl.nixl_agent_config(enable_prog_thread=False, backends=list(settings.backends))
    try:
        agent = nixl.nixl_agent(settings.agent_name, config)
    except Exception as error:
        raise TransportUnavailableError(
            f"cannot create a NIXL agent with back ends {backends}: {error}"
        ) from error
    missing = [backend for backend in settings.backends if backend not in agent.backends]
    if missing:
        raise TransportUnavailableError(
            f"NIXL has no back end {', '.join(missing)} here; available: {', '.join(agent.get_plugin_list())}"
        )
    region = (settings.base_address, settings.num_bytes, settings.device_id, "")
    try:
        registration = agent.register_memory([region], settings.memory)
    except Exception as error:
        raise TransportUnavailableError(
            f"NIXL cannot register {settings.num_bytes} bytes of {settings.memory} memory on device "
            f"{settings.device_id} with back ends {backends}: {error}"
        ) from error
    return agent, registration


def load_remote_agent(agent: Any, endpoint: TransportEndpoint) -> None:
    """Load a peer's metadata and begin to connect. Raises what NIXL raises, and ``TransferError``."""
    loaded = agent_name_of(agent.add_remote_agent(endpoint.metadata))
    if loaded != endpoint.agent_name:
        forget_remote_agent(agent, loaded)
        raise TransferError(
            f"its metadata is that of agent {loaded!r}, its record says {endpoint.agent_name!r}"
        )
    agent.make_connection(loaded)


def forget_remote_agent(agent: Any, agent_name: str) -> None:
    """Close the endpoint of a remote agent and forget it. Unknown ones are ignored."""
    with contextlib.suppress(Exception):  # it is gone either way, and NIXL reports unknown agents so
        agent.remove_remote_agent(agent_name)


def prepare_write(agent: Any, settings: AgentSettings, endpoint: TransportEndpoint, copies: Int64s) -> Any:
    """The handle of a write of ``copies`` (as in ``RankCopies``), not posted yet. Raises what NIXL raises."""
    local = _descriptors(settings.base_address, copies[:, 0], copies[:, 2], settings.device_id)
    remote = _descriptors(endpoint.base_address, copies[:, 1], copies[:, 2], endpoint.device_id)
    return agent.initialize_xfer(
        "WRITE",
        agent.get_xfer_descs(local, settings.memory),
        agent.get_xfer_descs(remote, endpoint.memory),
        endpoint.agent_name,
    )


def _descriptors(base_address: int, offsets: Int64s, num_bytes: Int64s, device_id: int) -> NDArray[np.uint64]:
    """As NIXL takes them: address, length and device."""
    devices = np.full_like(offsets, device_id)
    return np.column_stack((base_address + offsets, num_bytes, devices)).astype(np.uint64)  # [n, 3]


def agent_name_of(name: str | bytes) -> str:
    """NIXL gives the name of a remote agent as text or as bytes."""
    return name.decode() if isinstance(name, bytes) else name
