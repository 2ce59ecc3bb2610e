"""Shared by all tests: one torch thread, no hypothesis deadlines, helpers importable as ``tests.…``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.integration.running_cluster import RunningCluster

sys.path.insert(0, str(Path(__file__).parent.parent))

settings.register_profile("leadout", deadline=None, print_blob=True)
settings.load_profile("leadout")

try:
    import torch
except ImportError:  # the router's packages are tested without torch
    pass
else:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def one_prefill_one_decode() -> Iterator[RunningCluster]:
    """A running cluster of a prefill worker and a decode worker, shared by all tests that do it no harm."""
    from tests.integration.running_cluster import RunningCluster

    cluster = RunningCluster(prefill=1, decode=1)
    yield cluster
    assert cluster.stop() == 0
