"""``leadout chat``: a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
from rich.console import Console

from leadout.errors import UserError

Message = dict[str, str]

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it"


def run_chat(
    url: str, model: str, *, system: str | None, temperature: float | None, max_tokens: int | None
) -> None:
    """Read lines from standard input and stream the answers. Raises UserError if the server refuses."""
    console = Console(highlight=False)
    is_interactive = sys.stdin.isatty()
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    if is_interactive:
        console.print(f"{model} at {url}. {HELP}", style="dim")
    options = {"temperature": temperature, "max_tokens": max_tokens}
    body = {"model": model, **{name: value for name, value in options.items() if value is not None}}
    for line in _lines(is_interactive):
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
            continue
        if line.startswith("/"):
            console.print(f"unknown command {line.split()[0]}; {HELP}", style="yellow")
            continue
        messages.append({"role": "user", "content": line})
        answer = ""
        try:
            for piece in stream_answer(url, {**body, "messages": messages}):
                answer += piece
                print(piece, end="", flush=True)
            messages.append({"role": "assistant", "content": answer})
        except KeyboardInterrupt:  # stop this answer, keep the conversation without it
            messages.pop()
        print()


def stream_answer(url: str, body: dict[str, Any]) -> Iterator[str]:
    """The answer's text, piece by piece. Raises UserError with the server's message."""
    try:
        with httpx.stream(
            "POST",
            f"{url}/v1/chat/completions",
            json={**body, "stream": True},
            timeout=httpx.Timeout(None, connect=10),
            trust_env=False,
        ) as response:
            if response.status_code != 200:
                response.read()
                raise UserError(_error_message(response))
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if chunk.get("error"):
                    raise UserError(_message_of(chunk["error"]))
                for choice in chunk.get("choices") or []:
                    yield choice["delta"].get("content") or ""
    except httpx.HTTPError as error:
        raise UserError(f"{url} does not answer: {error}") from None


def _lines(is_interactive: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> " if is_interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line:
            yield line


def _error_message(response: httpx.Response) -> str:
    try:
        return _message_of(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}: {response.text[:200]}"


def _message_of(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
