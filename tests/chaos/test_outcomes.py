"""The chaos tests see a fault in an answer when there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest

from tests.chaos.load_requests import completion, stream_of
from tests.chaos.steady_load import Answer, Outcome, ask, check_answers

REQUEST = stream_of(completion("some", "Once upon a time"))
UNDISTURBED = Answer(
    request=REQUEST,
    started_at=1.0,
    ended_at=2.0,
    content_at=[1.4, 1.5],
    text=" there was",
    logprobs=[(" there", -0.5), (" was", -0.25)],
    finish_reason="length",
    usage=(4, 2),
    is_complete=True,
)
HALF = replace(UNDISTURBED, text=" there", is_complete=False, finish_reason=None, usage=None)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (replace(UNDISTURBED, started_at=5.0, ended_at=9.0, content_at=[7.0, 8.0]), Outcome.EQUAL),
        (replace(UNDISTURBED, text=" there was was"), Outcome.WRONG),
        (replace(UNDISTURBED, logprobs=[(" there", -0.5), (" was", -0.26)]), Outcome.WRONG),
        (replace(UNDISTURBED, finish_reason="stop"), Outcome.WRONG),
        (replace(UNDISTURBED, usage=(4, 3)), Outcome.WRONG),
        (replace(UNDISTURBED, is_complete=False), Outcome.CUT_SHORT),
        (replace(HALF, has_left=True), Outcome.LEFT),
        (replace(HALF, text=" their", has_left=True), Outcome.WRONG),
        (replace(HALF, connection_error="broken"), Outcome.CONNECTION_ERROR),
        (replace(HALF, text=" therethere", connection_error="broken"), Outcome.WRONG),
        (replace(HALF, error="503"), Outcome.ERROR_RESPONSE),
        (replace(HALF, hangs=True), Outcome.HANGS),
    ],
)
def test_outcomes(answer: Answer, outcome: Outcome) -> None:
    assert answer.outcome(UNDISTURBED) is outcome
    if outcome is Outcome.EQUAL:
        check_answers([answer], {"some": UNDISTURBED})
    else:
        check_answers([answer], {"some": UNDISTURBED}, outcome)
        with pytest.raises(AssertionError, match="1 of 1 answers:\nsome: "):
            check_answers([answer], {"some": UNDISTURBED})


def test_a_stall_is_a_gap_between_request_and_token_or_between_tokens() -> None:
    assert UNDISTURBED.gaps() == [(1.0, 1.4), (1.4, 1.5)]


CHUNK = b'data: {"choices": [{"text": " there", "finish_reason": null}]}\n\n'


@pytest.mark.parametrize(
    ("respond", "outcome"),
    [
        (lambda: httpx.Response(503, json={"error": {"message": "none"}}), Outcome.ERROR_RESPONSE),
        (lambda: httpx.Response(200, content=CHUNK), Outcome.CUT_SHORT),
        (lambda: httpx.Response(200, content=CHUNK + b'data: {"error": {}}\n\n'), Outcome.ERROR_RESPONSE),
        (lambda: _fail(httpx.ReadError("reset")), Outcome.CONNECTION_ERROR),
        (lambda: _fail(httpx.ReadTimeout("nothing came")), Outcome.HANGS),
    ],
)
async def test_what_a_client_sees(respond: Callable[[], httpx.Response], outcome: Outcome) -> None:
    transport = httpx.MockTransport(lambda _request: respond())
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await ask(client, REQUEST)
    assert answer.outcome(UNDISTURBED) is outcome


def _fail(error: Exception) -> httpx.Response:
    raise error
