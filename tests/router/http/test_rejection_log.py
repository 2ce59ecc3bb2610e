"""What is logged of refused requests, how much of it, and that clients cannot write in the log."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from cluster.clock import ManualClock
from cluster.logging_setup import TextFormatter
from router.http.rejection_log import Rejection, RejectionLog, address_text, plain
from tests.router.conftest import StartRouter
from tests.router.scripted_worker import within


class _Records(logging.Handler):
    """Keeps the records and can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.summary = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if "more refused" in record.getMessage():
            self.summary.set()


@pytest.fixture
def records() -> Any:
    handler = _Records()
    logger = logging.getLogger("router.http.rejection_log")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def _rejection(**fields: Any) -> Rejection:
    return Rejection(**{"request_id": "r", "client": "c", "route": "x", "status": 400, **fields})


async def test_a_flood_is_cut_off_and_counted(records: _Records) -> None:
    clock = ManualClock(monotonic=100.0)
    log = RejectionLog(max_lines=3, window_s=0.05, clock=clock)
    for _ in range(10):
        log.add(_rejection())
    assert len(records.records) == 3
    await within(records.summary.wait(), "the number of those left out, though nothing further comes")
    assert records.records[-1].getMessage() == (
        "7 more refused requests were not logged: at most 3 lines in 0.05 s"
    )
    clock.advance(1)
    log.add(_rejection())
    assert len(records.records) == 5


async def test_the_number_is_said_before_the_next_window_s_lines(records: _Records) -> None:
    clock = ManualClock(monotonic=100.0)
    log = RejectionLog(max_lines=1, window_s=3600, clock=clock)
    for _ in range(5):
        log.add(_rejection())
    clock.advance(3600)
    log.add(_rejection())
    messages = [one.getMessage() for one in records.records]
    assert messages[0] == messages[2] == "request refused"
    assert messages[1].startswith("4 more refused requests were not logged")


def test_words_of_clients_stay_words() -> None:
    assert plain("a\nb c=d\x1b[0m\u2028é") == "a\\nb\\x20c\\x3dd\\x1b[0m\\u2028\\xe9"
    assert plain("x" * 129) == "x" * 128 + "…"
    assert address_text(("::1", 80)) == "[::1]:80"
    assert address_text(None) == "-"


async def test_keys_of_free_form_objects_are_not_logged(records: _Records) -> None:
    log = RejectionLog()
    log.add(_rejection(param="messages[0].content"))
    log.add(_rejection(param="metadata.my secret\nline"))
    log.add(_rejection(param="☃"))
    assert [vars(one)["param"] for one in records.records] == ["messages[0].content", "metadata.my", "-"]


async def test_each_refused_request_has_one_line(start_router: StartRouter, records: _Records) -> None:
    router = await start_router()
    headers = {"X-Request-Id": "mine"}
    secret = "open sesame"
    body = {"model": "test-model", "prompt": secret, "top_p": secret}
    await router.post("completions", body, headers=headers)
    await router.http.get("/health", headers=headers)
    await router.http.get(f"/no%0Athing/{secret}?key={secret}", headers=headers)
    await router.http.put("/v1/models", headers=headers)
    await router.http.post("/v1/completions", content=b"\xff", headers=headers)
    await router.http.get("/v1/models/none", headers=headers)
    lines = [{key: vars(one)[key] for key in ("route", "status", "code", "param")} for one in records.records]
    text = json.dumps(lines) + "".join(
        TextFormatter("router", role="").format(one) for one in records.records
    )
    assert "sesame" not in text.replace("/open%20sesame", "")
    assert "\n" not in text
    assert [tuple(line.values()) for line in lines] == [
        ("POST:/v1/completions", 400, "invalid_type", "top_p"),
        ("GET:/no%0Athing/open%20sesame", 404, "unknown_route", "-"),
        ("PUT:/v1/models", 405, "method_not_allowed", "-"),
        ("POST:/v1/completions", 400, "invalid_json", "-"),
        ("GET:/v1/models/{name:path}", 404, "model_not_found", "model"),
    ]
    assert {vars(one)["request_id"] for one in records.records} == {"mine"}
    assert all(vars(one)["client"].startswith("127.0.0.1:") for one in records.records)


async def test_a_full_router_s_refusal_has_its_line(start_router: StartRouter, records: _Records) -> None:
    router = await start_router(max_concurrent_requests=1, max_waiting_requests=0)
    router.services.queue.num_requests = 1
    response = await router.post("completions", {})
    assert response.status_code == 429
    [line] = records.records
    assert (vars(line)["status"], vars(line)["code"]) == (429, "too_many_requests")
