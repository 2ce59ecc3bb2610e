"""Where NIXL is missing or asked for what it lacks, the error says what to do."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import pytest

from cluster.members import Peer
from kv_transfer.nixl.agent import load_nixl
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.transport import TransportUnavailableError
from tests.kv_transfer.peers import LAYOUT, NUM_BLOCKS


@pytest.fixture
def cache() -> Any:
    return ctypes.create_string_buffer(NUM_BLOCKS * LAYOUT.block_bytes)


def options(cache: Any, **changes: Any) -> dict[str, Any]:
    return {
        "backends": ["UCX"],
        "write_timeout_s": 1.0,
        "own": Peer("p0", 1),
        "base_address": ctypes.addressof(cache),
        "num_blocks": NUM_BLOCKS,
        "layout": LAYOUT,
        **changes,
    }


def test_a_platform_without_nixl_is_told_what_to_install() -> None:
    with pytest.raises(TransportUnavailableError) as caught:
        load_nixl(packages=("no_such_package", "no_such_package_either"))
    message = str(caught.value)
    assert "no_such_package: No module named" in message
    assert "no_such_package_either: No module named" in message
    assert "pip install nixl-cu12" in message


def test_loading_nixl_leaves_logging_as_it_was() -> None:
    module = load_nixl()
    assert hasattr(module, "nixl_agent")
    assert logging.raiseExceptions
    assert logging.getLogger("nixl").propagate
    assert logging.getLogger("nixl").handlers == []


def test_a_backend_that_does_not_exist_is_named(cache: Any) -> None:
    with pytest.raises(TransportUnavailableError, match="NO_SUCH_BACKEND"):
        NixlTransport(**options(cache, backends=["UCX", "NO_SUCH_BACKEND"]))


def test_a_transport_names_its_incarnation_and_closes_twice(cache: Any) -> None:
    transport = NixlTransport(**options(cache, own=Peer("p0", 17)))
    endpoint = transport.endpoint
    assert (endpoint.kind, endpoint.agent_name, endpoint.num_blocks) == ("nixl", "p0@17", NUM_BLOCKS)
    assert endpoint.base_address == ctypes.addressof(cache)
    assert endpoint.metadata
    assert transport.links() == ()
    transport.close()
    transport.close()
