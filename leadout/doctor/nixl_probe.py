"""Loads NIXL, and creates an agent with a little registered memory, in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import sys
from types import ModuleType

from kv_transfer.nixl.agent import AgentSettings, create_agent, load_nixl
from kv_transfer.transport import TransportUnavailableError
from leadout.doctor.child import read_message, send_answer

_NUM_BYTES = 1024**2


def main() -> int:
    """First what is installed, then the agent: the second may fail for the back ends' sake."""
    settings = read_message()
    try:
        nixl = load_nixl()
    except TransportUnavailableError as error:
        send_answer({"error": str(error)})
        return 1
    package = nixl.__name__.partition(".")[0]
    version = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(package.replace("_", "-"))
    send_answer({"package": package.replace("_", "-"), "version": version, "plugins": _plugins(nixl)})
    memory = ctypes.create_string_buffer(_NUM_BYTES)
    try:
        agent, registration = create_agent(
            AgentSettings(
                agent_name="doctor",
                base_address=ctypes.addressof(memory),
                num_bytes=_NUM_BYTES,
                memory="DRAM",
                device_id=0,
                backends=tuple(settings["backends"]),
            )
        )
    except TransportUnavailableError as error:
        send_answer({"error": str(error)})
        return 1
    send_answer({"backends": sorted(agent.backends)})
    agent.deregister_memory(registration)
    return 0


def _plugins(nixl: ModuleType) -> dict[str, list[str]]:
    """Every plugin of the package with the kinds of memory it moves; none where its libraries are missing."""
    agent = nixl.nixl_agent("doctor-plugins", nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    return {name: sorted(agent.get_plugin_mem_types(name)) for name in agent.get_plugin_list()}


if __name__ == "__main__":
    sys.exit(main())
