"""NIXL: whether it loads, and whether an agent with the configured back ends comes up."""

from __future__ import annotations

import os

from cluster.config.settings import KvTransferConfig
from leadout.doctor.check import Finding
from leadout.doctor.child import Child, ChildError
from leadout.doctor.ucx_log import LOGGING, parse_ucx_log

_ANSWER_TIMEOUT_S = 25.0
_INSTALL = (
    "pip install 'leadout[worker]' on Linux x86_64 or aarch64; a machine with routers only needs no NIXL"
)


def check_nixl(config: KvTransferConfig) -> list[Finding]:
    """The package, then an agent with 1 MiB of registered memory."""
    with Child("nixl_probe", environment=LOGGING) as child:
        child.tell({"backends": config.backends})
        try:
            package = child.answer(_ANSWER_TIMEOUT_S)
        except ChildError as error:
            return [Finding("failed", str(error), _INSTALL)]
        usable = [name for name, memory in package["plugins"].items() if memory]
        unusable = [name for name, memory in package["plugins"].items() if not memory]
        seen = f"{package['package']} {package['version']}; usable plugins: {', '.join(usable)}"
        if unusable:
            seen += f"; without their libraries here: {', '.join(unusable)}"
        found = [Finding("ok", seen, data=package)]
        backends = ", ".join(config.backends)
        try:
            agent = child.answer(_ANSWER_TIMEOUT_S)
        except ChildError as error:
            problems = parse_ucx_log(child.log).problems
            reported = f"; UCX says: {'; '.join(problems)}" if problems else ""
            found.append(
                Finding(
                    "failed",
                    f"{error}{reported}",
                    f"kv_transfer.backends is {backends}: leave out what is not usable here, and look at the "
                    f"UCX variables of this environment ({_ucx_settings()})",
                    {"problems": list(problems)},
                    about="agent",
                )
            )
            return found
    seen = f"an agent with {', '.join(agent['backends'])} comes up"
    found.append(Finding("ok", seen, data={"backends": agent["backends"]}, about="agent"))
    return found


def _ucx_settings() -> str:
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("UCX_")]
    return " ".join(settings) or "none is set"
