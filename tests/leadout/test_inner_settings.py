"""Each part's own settings come from the configuration: no defaults of their own, nothing out of reach."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from cluster.config.settings import EngineConfig, RouterConfig
from leadout.worker.process import scheduler_config
from router.api.request.body_limits import body_limits
from router.http.server import http_limits
from router.services import policy_settings


def changed(section: BaseModel) -> Iterator[BaseModel]:
    """The section once with each of its numbers, words and switches changed to another allowed value."""
    for name, field in type(section).model_fields.items():
        value: Any = getattr(section, name)
        choices = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is Literal else ()
        if choices:
            other: Any = next(choice for choice in choices if choice != value)
        elif isinstance(value, bool):
            other = not value
        elif isinstance(value, float):
            other = value * 1.5
        elif isinstance(value, int):
            other = value * 2 or 1
        else:
            continue  # texts and lists: no part takes over any of these as they are
        yield type(section)(**{name: other})


@pytest.mark.parametrize(
    ("section", "settings_of"),
    [
        (EngineConfig(), scheduler_config),
        (RouterConfig(), policy_settings),
        (RouterConfig(), http_limits),
        (RouterConfig(), body_limits),
    ],
)
def test_each_field_is_set_from_the_configuration(
    section: BaseModel, settings_of: Callable[[Any], Any]
) -> None:
    plain = settings_of(section)
    for field in dataclasses.fields(plain):
        assert field.default is dataclasses.MISSING, f"{field.name} has a default of its own"
        values = [getattr(settings_of(other), field.name) for other in changed(section)]
        assert any(value != getattr(plain, field.name) for value in values), f"nothing sets {field.name}"
