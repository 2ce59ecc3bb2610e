"""What ``leadout serve`` decides before it starts anything."""

from __future__ import annotations

import pytest

from cluster.config.settings import RegistryConfig, load_config
from leadout.serve import needs_own_registry


@pytest.fixture(autouse=True)
def _no_registry_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEADOUT_REGISTRY__URL", raising=False)


def test_a_registry_is_started_only_where_none_is_named() -> None:
    assert needs_own_registry(load_config())
    assert needs_own_registry(load_config(overrides={"registry": {"namespace": "mine"}}))
    assert not needs_own_registry(load_config(overrides={"registry": {"url": "redis://elsewhere:6379/0"}}))


def test_the_default_url_counts_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    default = RegistryConfig().url
    assert not needs_own_registry(load_config(overrides={"registry": {"url": default}}))
    monkeypatch.setenv("LEADOUT_REGISTRY__URL", default)
    assert not needs_own_registry(load_config())
