"""Renders a conversation to the text a model was trained on, with the template that comes with the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_OUTPUT_CHARACTERS = 16 * 2**20
MAX_RANGE_STEPS = 1_000_000


class ChatTemplateError(ValueError):
    """The template is broken, refused the conversation, or hit a limit; the message is the template's own
    if any.
    """


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: marks what the assistant says for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with repetition (``"x" * 10**9``) and powers refused where their result would be huge."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and abs(right) * left.bit_length() > 65_536:
                raise jinja2.exceptions.SecurityError(f"{left} ** {right} is too large a number")
        elif _repeated_size(left, right) > MAX_OUTPUT_CHARACTERS or _repeated_size(right, left) > (
            MAX_OUTPUT_CHARACTERS
        ):
            raise jinja2.exceptions.SecurityError("a value is repeated too often")
        return super().call_binop(context, operator, left, right)


def _repeated_size(items: object, times: object) -> int:
    """How many items ``items * times`` would have; 0 where that is no repetition."""
    if isinstance(items, (str, bytes, list, tuple)) and isinstance(times, int):
        return len(items) * times
    return 0


class ChatTemplate:
    """A compiled chat template. Rendering has no side effects and may run in several threads.

    The template runs in jinja2's immutable sandbox: it can read the conversation and nothing else. Bounded
    are the rendered text (16 Mi characters), the steps of all ``range`` loops of one rendering together
    (1,000,000) and the size of repeated values. A template is still part of the model, trusted as its
    weights are: loops over the conversation inside loops have no bound but these. Never take a template
    from a request.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None,
        eos_token: str | None,
        *,
        tool_use_source: str | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compiles ``source``; ``tool_use_source`` is used instead where tools are given (some models have
        two).

        ``clock`` is what ``strftime_now`` reads. Raises ChatTemplateError where a template does not compile.
        """
        self.sources = (source,) if tool_use_source is None else (source, tool_use_source)
        self.bos_token = bos_token or ""
        self.eos_token = eos_token or ""
        self._clock = clock
        self._template = self._compile(source)
        self._tool_use_template = None if tool_use_source is None else self._compile(tool_use_source)

    def _compile(self, source: str) -> jinja2.Template:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._strftime_now
        try:
            return environment.from_string(source)
        except jinja2.TemplateError as error:
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ChatTemplateError(f"the chat template does not compile{line}: {error.message}") from None
        except (RecursionError, ValueError, SyntaxError, MemoryError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error!r}") from None

    def _strftime_now(self, time_format: str) -> str:
        return self._clock().strftime(time_format)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The conversation as text, with the start of the assistant's turn if ``add_generation_prompt``.

        ``messages`` and ``tools`` are plain dicts as in the OpenAI API and reach the template as they are.
        Most templates take only a string as ``content``: the caller joins lists of ``{"type": "text",
        "text": ...}`` parts first, and turns the JSON text of tool-call arguments into objects where a
        template wants them. ``kwargs`` are further template variables (``enable_thinking``,
        ``documents``). Raises ChatTemplateError; where the template itself refuses the conversation, with
        the template's message.
        """
        template = self._template
        if tools and self._tool_use_template is not None:
            template = self._tool_use_template
        variables = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "range": _BoundedRange(MAX_RANGE_STEPS),
        }
        try:
            return _join_bounded(template.generate(variables))
        except ChatTemplateError:
            raise
        except jinja2.exceptions.SecurityError as error:
            raise ChatTemplateError(
                f"the chat template was stopped by its sandbox: {error.message}"
            ) from None
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template failed: {error.message}") from None
        except (
            Exception
        ) as error:  # template code can fail in any way: None + "x", a missing method, recursion
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}") from None


def _join_bounded(pieces: Iterable[str]) -> str:
    out: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_OUTPUT_CHARACTERS:
            raise ChatTemplateError(f"the chat template wrote more than {MAX_OUTPUT_CHARACTERS:,} characters")
        out.append(piece)
    return "".join(out)


class _BoundedRange:
    """``range`` for one rendering, which counts the steps of all its loops together."""

    def __init__(self, steps: int) -> None:
        self._steps_left = steps

    def __call__(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._steps_left -= len(numbers)
        if self._steps_left < 0:
            raise ChatTemplateError(f"the chat template loops over more than {MAX_RANGE_STEPS:,} numbers")
        return numbers


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
