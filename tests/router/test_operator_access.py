"""Which hosts an operator may have meant."""

from __future__ import annotations

import socket

import pytest

from router.api.operator_access import is_expected_host

ALLOWED = ["leadout.example.com", "*.internal"]


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000",
        "10.1.2.3",
        "[::1]:8000",
        "localhost",
        "localhost.:80",
        "a.localhost:1",
        socket.gethostname().lower(),
        "leadout.example.com:8000",
        "router.internal",
    ],
)
def test_expected_hosts(host: str) -> None:
    assert is_expected_host(host, ALLOWED)


@pytest.mark.parametrize(
    "host",
    [
        "",
        ":80",
        "evil.example.com",
        "127.0.0.1.evil.example.com",
        "leadout.example.com.evil.com",
        "xinternal",
        "internal",
        "notlocalhost",
        "[::1",
        "user@evil.example.com:80",
    ],
)
def test_other_hosts(host: str) -> None:
    assert not is_expected_host(host, ALLOWED)


def test_any_host_where_that_is_set() -> None:
    assert is_expected_host("evil.example.com", ["*"])
