"""Addresses: the router's port, and the one that a worker binds and tells its peers."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

import httpx
import zmq

from cluster.config.settings import RouterConfig, WorkerConfig
from leadout.doctor.check import Finding

_HTTP_TIMEOUT_S = 3.0


def check_router_port(config: RouterConfig) -> Finding:
    """Whether a router can listen at its address. One that listens there already is named."""
    where = f"{config.host}:{config.port}"
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        remedy = "set router.host to an address of this machine, 127.0.0.1, or 0.0.0.0 for all of them"
        return Finding("failed", f"router.host {config.host!r} is not known here: {error.strerror}", remedy)
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the HTTP server does
            try:
                server.bind(address)
                server.listen(1)
            except OSError as error:
                return _not_bound(config, where, error)
    if config.port == 0:
        return Finding("ok", f"router.port is 0: any free port of {config.host}")
    return Finding("ok", f"{where} is free", data={"address": where})


def check_worker_address(config: WorkerConfig, registry_url: str) -> Finding:
    """Whether a worker can listen at its address, in just the way it will, and whether peers can reach it."""
    where = f"tcp://{config.host}:{config.port or '*'}"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.setsockopt(zmq.IPV6, int("[" in where))
        server.setsockopt(zmq.LINGER, 0)
        try:
            server.bind(where)
        except zmq.ZMQError as error:
            remedy = (
                "set worker.host to a numeric address or the name of a network interface of this machine (ip "
                "-br addr lists them), and worker.port to 0 or a free port"
            )
            return Finding("failed", f"a worker cannot listen at {where}: {error.strerror}", remedy)
        bound = server.getsockopt_string(zmq.LAST_ENDPOINT)
    address = bound.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return judge_worker_address(address, config.host, registry_url)


def judge_worker_address(address: str, configured: str, registry_url: str) -> Finding:
    """``address`` is numeric. A worker that others cannot reach is a fault only if there are others."""
    data = {"host": configured, "address": address}
    parsed = ipaddress.ip_address(address)
    shown = configured if configured == address else f"{configured} ({address})"
    if _is_on_this_machine(registry_url) or not (parsed.is_loopback or parsed.is_unspecified):
        reach = "; only this machine reaches it" if parsed.is_loopback else ""
        return Finding("ok", f"workers can listen at {shown}{reach}", data=data)
    why = "only this machine reaches it" if parsed.is_loopback else "it is nobody's address to connect to"
    return Finding(
        "warning",
        f"workers tell their peers to connect to {shown}, and {why}: those on other machines cannot",
        "set worker.host to the address by which other machines reach this one",
        data,
    )


def _is_on_this_machine(registry_url: str) -> bool:
    parts = urlsplit(registry_url)
    if parts.scheme == "unix" or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:  # a name
        return False


def _not_bound(config: RouterConfig, where: str, error: OSError) -> Finding:
    data = {"address": where}
    if _is_router(config):
        remedy = "nothing, if that is the one you mean; else choose another router.port"
        return Finding("warning", f"a Leadout router answers at {where} already", remedy, data)
    remedy = (
        "choose another router.port (or --port), or end what listens there: "
        f"ss -ltnp 'sport = :{config.port}' names it"
    )
    return Finding("failed", f"a router cannot listen at {where}: {error.strerror}", remedy, data)


def _is_router(config: RouterConfig) -> bool:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    try:
        answer = httpx.get(f"http://{host}:{config.port}/cluster", timeout=_HTTP_TIMEOUT_S, trust_env=False)
        state = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return False
    return isinstance(state, dict) and {"workers", "routers"} <= state.keys()
