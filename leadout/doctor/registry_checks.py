"""The registry: the server that is configured, or the one that `leadout serve` brings."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import redis
from redis.exceptions import RedisError, ResponseError

from cluster.config.settings import RegistryConfig
from cluster.config.values import mask_password
from cluster.registry import Registry, RegistryUnavailableError
from leadout.doctor.check import Finding
from leadout.local.embedded_registry import EmbeddedRegistry, EmbeddedRegistryError

_TIMEOUT_S = 3.0
_ROUNDS = 10
_SLOW_ROUND_TRIP_MS = 50.0  # each heartbeat and each new member waits for a few of them
# Deadlines go between machines as unix times, so a skewed clock lengthens or shortens every request's. 100 ms
# is far above what chrony or systemd-timesyncd keep (a few ms) and no harm yet; 1 s is what a short deadline
# has in all, and a worker that moves to a machine with such a clock may be taken for its own past life.
_SKEW_WARNING_S = 0.1
_SKEW_FAILED_S = 1.0


def check_registry(config: RegistryConfig, *, is_named: bool) -> list[Finding]:
    """``is_named``: somebody has set registry.url. Else a server at the default address may be missing."""
    where = mask_password(config.url)
    client = redis.Redis.from_url(
        config.url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, retry=None
    )
    try:
        try:
            client.ping()
        except (RedisError, OSError) as error:
            return [_unreachable(where, error, is_named=is_named)]
        round_trip_s, skew_s = _measure_clock(client)
        server, memory = _info(client, "server"), _info(client, "memory")
    finally:
        client.close()
    return [
        judge_answer(where, server, round_trip_s, _members(config)),
        judge_eviction(str(memory.get("maxmemory_policy", "")), int(memory.get("maxmemory", 0))),
        judge_clock_skew(skew_s, round_trip_s / 2),
    ]


def judge_answer(
    where: str, server: dict[str, Any], round_trip_s: float, members: tuple[int, int] | str
) -> Finding:
    """``server`` is INFO's section; ``members`` are workers and routers, or why they could not be read."""
    name = str(server.get("server_name", "redis"))
    version = str(server.get(f"{name}_version", server.get("redis_version", "of unknown version")))
    seen = f"{name} {version} at {where} answers in {round_trip_s * 1e3:.1f} ms"
    data = {"url": where, "server": name, "version": version, "round_trip_ms": round(round_trip_s * 1e3, 3)}
    if isinstance(members, str):
        remedy = (
            "give the user of registry.url the right to run scripts and to read and write this namespace's "
            "keys and channel"
        )
        return Finding("failed", f"{seen}, but refuses the registry's script: {members}", remedy, data)
    data |= {"workers": members[0], "routers": members[1]}
    seen += f"; registered: {members[0]} workers, {members[1]} routers"
    if round_trip_s * 1e3 > _SLOW_ROUND_TRIP_MS:
        remedy = "put the registry closer (same data centre), or raise registry.lease_ms and heartbeat_ms"
        return Finding("warning", seen, remedy, data)
    return Finding("ok", seen, data=data)


def judge_eviction(policy: str, max_memory: int) -> Finding:
    """A server that evicts keys forgets live workers. ``max_memory`` in bytes, 0 for no limit.

    ``volatile-…`` is no better than ``allkeys-…``: records are what has a lease, which is a time to live.
    """
    limit = f"maxmemory is {max_memory / 2**20:,.0f} MiB" if max_memory else "maxmemory is not set"
    data = {"maxmemory_policy": policy, "maxmemory": max_memory}
    if not policy:
        remedy = "look it up at its provider: it must be noeviction"
        return Finding("warning", "the server does not tell its maxmemory-policy", remedy, data, "eviction")
    seen = f"maxmemory-policy is {policy}, {limit}"
    if policy == "noeviction":
        return Finding("ok", seen, data=data, about="eviction")
    when = "when memory is full" if max_memory else "once a limit is set"
    return Finding(
        "warning",
        f"{seen}: {when} it drops records of live workers, which get no requests until their next heartbeat",
        "CONFIG SET maxmemory-policy noeviction (and in its configuration file), or use a server of its own",
        data,
        "eviction",
    )


def judge_clock_skew(skew_s: float, uncertainty_s: float) -> Finding:
    """``skew_s``: this machine's clock minus the registry's. Judged by what it is at least."""
    seen = f"this clock is {abs(skew_s) * 1e3:.1f} ms {'ahead of' if skew_s > 0 else 'behind'} the registry's"
    seen += f" (± {uncertainty_s * 1e3:.1f} ms)"
    data = {"skew_ms": round(skew_s * 1e3, 3), "uncertainty_ms": round(uncertainty_s * 1e3, 3)}
    least = abs(skew_s) - uncertainty_s
    if least <= _SKEW_WARNING_S:
        return Finding("ok", seen, data=data, about="clock")
    return Finding(
        "failed" if least > _SKEW_FAILED_S else "warning",
        f"{seen}: deadlines are unix times, and requests would end too early or too late",
        "run chrony or systemd-timesyncd on this machine and on the registry's (timedatectl shows the state)",
        data,
        "clock",
    )


def check_embedded_registry(*, is_needed: bool) -> Finding:
    """Starts the server that `leadout serve` brings, and stops it. ``is_needed``: no registry.url is set."""
    server = EmbeddedRegistry()
    try:
        server.start()
        client = redis.Redis.from_url(server.url, socket_timeout=_TIMEOUT_S)
        try:
            info: dict[str, Any] = client.info("server")
        finally:
            client.close()
    except EmbeddedRegistryError as error:
        if not is_needed:
            return Finding("skipped", f"not needed, since registry.url is set: {_first_line(error)}")
        remedy = "pip install 'leadout[local]', or set registry.url to a server that runs elsewhere"
        return Finding("failed", str(error), remedy)
    finally:
        server.stop()
    name = str(info.get("server_name", "redis"))
    version = str(info.get(f"{name}_version", info.get("redis_version", "")))
    return Finding("ok", f"{name} {version} starts", data={"server": name, "version": version})


def _measure_clock(client: redis.Redis) -> tuple[float, float]:
    """Shortest round trip in seconds, and the clock skew that it showed, ± half of it."""
    best = (float("inf"), 0.0)
    for _ in range(_ROUNDS):
        before, started = time.time(), time.perf_counter()
        seconds, microseconds = client.time()
        round_trip_s = time.perf_counter() - started
        best = min(best, (round_trip_s, before + round_trip_s / 2 - (seconds + microseconds / 1e6)))
    return best


def _info(client: redis.Redis, section: str) -> dict[str, Any]:
    """A section of INFO; empty where this user may not read it."""
    try:
        info: dict[str, Any] = client.info(section)
    except ResponseError:
        return {}
    return info


def _members(config: RegistryConfig) -> tuple[int, int] | str:
    """Who is registered, read as every process reads it; or why not."""

    async def read() -> tuple[int, int]:
        registry = Registry(config)
        try:
            members = await registry.members()
        finally:
            await registry.close()
        return len(members.workers), len(members.routers)

    try:
        return asyncio.run(read())
    except RegistryUnavailableError as error:
        return _first_line(error)


def _unreachable(where: str, error: Exception, *, is_named: bool) -> Finding:
    data = {"url": where, "error": str(error)}
    if not is_named:
        seen = f"registry.url is not set, and no server is at {where}: `leadout serve` brings its own"
        return Finding("skipped", seen, data=data)
    remedy = (
        "start the server, or correct registry.url; from this machine: redis-cli -u URL ping. Between "
        "machines it must listen at more than 127.0.0.1, and firewalls must let it through"
    )
    return Finding("failed", f"{where} does not answer: {_first_line(error)}", remedy, data)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
