"""Which backend a name stands for."""

from __future__ import annotations

import typing

import pytest

from cluster.config.worker_settings import EngineConfig
from engine.ops.cpu import CpuBackend
from engine.ops.reference import ReferenceBackend
from engine.ops.registry import BACKEND_NAMES, backend_class


def test_the_setting_allows_what_is_registered() -> None:
    allowed = typing.get_args(EngineConfig.model_fields["backend"].annotation)
    assert set(allowed) == {"auto", *BACKEND_NAMES}


def test_backends_by_name() -> None:
    assert backend_class("cpu") is CpuBackend
    assert backend_class("reference") is ReferenceBackend


def test_auto_takes_the_first_that_suits_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_class("auto") is CpuBackend
    monkeypatch.setattr(CpuBackend, "suits_this_machine", lambda: False)
    monkeypatch.setattr(ReferenceBackend, "suits_this_machine", lambda: True)
    assert backend_class("auto") is ReferenceBackend


def test_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="backend 'abacus' is unknown; known are auto, cpu, reference"):
        backend_class("abacus")
