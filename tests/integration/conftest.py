"""One running cluster of each shape, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.running_cluster import RunningCluster


@pytest.fixture(scope="package")
def one_prefill_one_decode() -> Iterator[RunningCluster]:
    """A prefill worker and a decode worker."""
    cluster = RunningCluster(prefill=1, decode=1)
    yield cluster
    assert cluster.stop() == 0
