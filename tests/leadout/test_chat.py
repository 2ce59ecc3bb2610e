"""``leadout chat`` against a real HTTP server."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

from leadout.chat import run_chat, stream_answer
from leadout.errors import UserError
from tests.leadout.http_server import Answer, Request, ScriptedServer, as_json, event_stream, scripted_server


def _pieces(*texts: str | None) -> list[dict[str, Any]]:
    return [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]


def _echo(request: Request) -> Answer:
    """Streams ``answer to`` and the last message, between the chunks that carry no text."""
    last = request.body["messages"][-1]["content"]
    return event_stream(
        {"choices": [{"index": 0, "delta": {"role": "assistant"}}]},
        *_pieces("answer ", "to ", last, None),
        {"choices": [], "usage": {"completion_tokens": 3}},
    )


def _talk(
    monkeypatch: pytest.MonkeyPatch,
    typed: str,
    respond: Callable[[Request], Answer] = _echo,
    **options: Any,
) -> ScriptedServer:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    with scripted_server(respond) as server:
        run_chat(server.url, "m", **{"system": None, "temperature": None, "max_tokens": None, **options})
    return server


def _messages(server: ScriptedServer) -> list[list[tuple[str, str]]]:
    """Roles and texts of each request."""
    return [[(one["role"], one["content"]) for one in body["messages"]] for body in server.bodies()]


def test_answers_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server = _talk(monkeypatch, "one\n\n  two  \n")
    assert capsys.readouterr().out == "answer to one\nanswer to two\n"
    assert [request.path for request in server.requests] == ["/v1/chat/completions"] * 2


def test_the_conversation_is_sent_again_with_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    server = _talk(monkeypatch, "one\ntwo\n", system="Be brief.")
    opening = [("system", "Be brief."), ("user", "one")]
    assert _messages(server) == [opening, [*opening, ("assistant", "answer to one"), ("user", "two")]]


def test_reset_forgets_all_but_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    server = _talk(monkeypatch, "one\n/reset\ntwo\n/reset\nthree\n", system="Be brief.")
    system = ("system", "Be brief.")
    assert _messages(server) == [[system, ("user", text)] for text in ("one", "two", "three")]


def test_exit_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _messages(_talk(monkeypatch, "one\n/exit\ntwo\n")) == [[("user", "one")]]


def test_an_unknown_command_is_explained_and_not_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = _talk(monkeypatch, "/rest now\none\n")
    assert "unknown command /rest; /reset forgets the conversation" in capsys.readouterr().out
    assert _messages(server) == [[("user", "one")]]


def test_only_options_that_were_given_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain,) = _talk(monkeypatch, "one\n").bodies()
    (special,) = _talk(monkeypatch, "one\n", temperature=0.0, max_tokens=9).bodies()
    assert plain.keys() == {"model", "messages", "stream"}
    assert plain["model"] == "m"
    assert plain["stream"] is True
    assert special == {**plain, "temperature": 0.0, "max_tokens": 9}


def test_an_interrupted_answer_is_left_out_of_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    original = stream_answer
    calls: list[None] = []

    def interrupted_first(url: str, body: dict[str, Any]) -> Any:
        calls.append(None)
        for piece in original(url, body):
            yield piece
            if len(calls) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr("leadout.chat.stream_answer", interrupted_first)
    server = _talk(monkeypatch, "one\ntwo\n")
    assert _messages(server) == [[("user", "one")], [("user", "two")]]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (as_json({"error": {"message": "no such model", "code": 404}}, 404), "^no such model$"),
        (as_json({"error": "just text"}, 400), "^just text$"),
        (as_json({"detail": "other"}, 422), '^the server answered 422: {"detail": "other"}$'),
        (Answer(502, ["<html>bad gateway"]), "^the server answered 502: <html>bad gateway$"),
        (event_stream(*_pieces("par"), {"error": {"message": "the worker is lost"}}), "^the worker is lost$"),
        (event_stream({"error": "just text"}), "^just text$"),
        (event_stream(*_pieces("par"), done=False, breaks_off=True), "does not answer: .*incomplete"),
    ],
)
def test_the_server_s_error_is_the_message(
    monkeypatch: pytest.MonkeyPatch, answer: Answer, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        _talk(monkeypatch, "one\n", lambda _request: answer)


def test_an_error_of_null_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = event_stream({**_pieces("fine")[0], "error": None}, {"usage": {}})
    _talk(monkeypatch, "one\n", lambda _request: answer)
    assert capsys.readouterr().out == "fine\n"


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server(_echo) as server:
        pass
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    with pytest.raises(UserError, match=f"{server.url} does not answer"):
        run_chat(server.url, "m", system=None, temperature=None, max_tokens=None)


def test_comments_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a router sends them while there is nothing to say."""
    pieces = event_stream(*_pieces("fine")).pieces
    comment = ": keep-alive\n\n"
    answer = Answer(200, [comment, pieces[0], comment, *pieces[1:]], "text/event-stream", is_stream=True)
    _talk(monkeypatch, "one\n", lambda _request: answer)
    assert capsys.readouterr().out == "fine\n"
