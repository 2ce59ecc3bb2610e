"""One line per event, readable by people or by machines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from cluster.config.settings import LogConfig
from cluster.logging_setup import configure_logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig(), process="worker-0", role="decode")
    logging.getLogger("engine.engine").info("loaded %s", "model", extra={"blocks": 7})
    logging.getLogger("engine.engine").debug("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.split(" ", 1)[1] == "info worker-0/decode engine.engine: loaded model blocks=7"


def test_json_lines_hold_exceptions_and_extras(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig(format="json"), process="router-0")
    try:
        raise ValueError("broken\nin two lines")
    except ValueError:
        logging.getLogger("router").exception("failed", extra={"request": "r1"})
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert entry["process"] == "router-0"
    assert "role" not in entry
    assert entry["level"] == "error"
    assert entry["request"] == "r1"
    assert "ValueError: broken" in entry["error"]


def test_the_role_is_the_present_one(capsys: pytest.CaptureFixture[str]) -> None:
    for role in ("decode", "prefill"):
        configure_logging(LogConfig(format="json"), process="worker-0", role=role)
        logging.getLogger("cluster").info("said")
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(entry["process"], entry["role"]) for entry in entries] == [
        ("worker-0", "decode"),
        ("worker-0", "prefill"),
    ]


def test_the_level_and_quiet_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig(level="debug"), process="p")
    logging.getLogger("cluster").debug("shown")
    logging.getLogger("httpx").info("chatter")
    assert len(capsys.readouterr().err.splitlines()) == 1
