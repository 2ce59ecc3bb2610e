"""Keeps the tokens that give a conversation its structure out of the hands of those who write its texts.

A chat template writes ``<|im_end|>`` to end a turn. The same letters in a message must stay letters, or
whoever wrote that message has written a turn of their own. Only the rendered text is tokenized, where both
look the same; so where a client's string spells a control token, a *mark* is put inside that spelling before
the template runs: a Unicode noncharacter that no string of the conversation has. Spellings that are whole in
the rendered text are then the template's own. Texts with a mark are cut at it and encoded piece by piece, so
that no piece spells the token. A string that could begin or end a token where a template joins it with
another one gets a mark there. A conversation without any of this is never touched, and where no token came
about all marks are taken out before the text is encoded.

What is not seen is a token that a template itself makes out of harmless strings: by removing what is inside,
or by cutting off both the end of one and the beginning of another.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from text_pipeline.tokenizer import AddedToken, Tokenizer, TokenizerError, encode_texts

_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # Unicode's noncharacters, which no text should have
_MIN_MARKUP_LENGTH = 3
# Templates compare these with words of their own; a mark at the end of such a word would change what they do.
_WORDS = frozenset({"role", "type"})
# Where an assistant's message holds what the model wrote.
_ANSWERS = frozenset({"content", "reasoning_content", "reasoning"})


@dataclass(frozen=True)
class ClientTexts:
    """What a client puts into a template: messages, tools, and further template variables."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]


@dataclass(frozen=True)
class Marked:
    """Client texts that are safe to render. ``mark`` is in them where it was needed, else None."""

    texts: ClientTexts
    mark: str | None


@dataclass(frozen=True)
class _MarkedPart:
    begin: int  # in the rendered text
    end: int
    pieces: list[str]  # what is between its marks


@dataclass(frozen=True)
class _Continuing:
    """Encodes a text that goes on after another one, where a tokenizer puts a space before each text.

    ``is_only_at_start``: that space comes before the first text of a prompt only.
    """

    backend: tokenizers.Tokenizer
    is_only_at_start: bool


class ControlTokens:
    """The control tokens of a tokenizer and its chat template. Immutable, and safe to use in several threads.

    Those are its special tokens, and added tokens that are not marked special but that the template names and
    that look like markup (Qwen's ``<think>`` and ``<tool_call>``). The latter stay tokens in the content of
    an assistant's message: a model's answer has them, and templates look for them there. Special tokens never
    do.
    """

    def __init__(self, tokenizer: Tokenizer, template_sources: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._sources = "\n".join(template_sources)
        tokens = [token for token in tokenizer.added_tokens if self._is_control(token)]
        self._by_text = {token.text: token for token in tokens}
        texts = tuple(self._by_text)
        self._anywhere = _Spellings(texts)
        self._in_answers = _Spellings([token.text for token in tokens if token.is_special])
        self._prefixes = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._suffixes = frozenset(text[start:] for text in texts for start in range(1, len(text)))
        self._first_characters = frozenset(text[0] for text in texts)
        self._last_characters = frozenset(text[-1] for text in texts)
        self._max_length = max(map(len, texts), default=1)
        self._continuing = _continuing(tokenizer)

    @property
    def texts(self) -> frozenset[str]:
        """How the control tokens are spelled."""
        return frozenset(self._by_text)

    def _is_control(self, token: AddedToken) -> bool:
        if not token.text:
            return False
        return token.is_special or (
            len(token.text) >= _MIN_MARKUP_LENGTH
            and token.text[0] in "<["
            and token.text[-1] in ">]"
            and token.text in self._sources
        )

    def mark(self, texts: ClientTexts) -> Marked:
        """``texts``, with every spelling of a control token broken by a mark where there is one.

        Raises TokenizerError where no noncharacter is left to be the mark, and RecursionError for values
        nested too deeply.
        """
        strings = [*_strings(texts.messages), *_strings(texts.tools), *_strings(texts.variables)]
        if not any(map(self._needs_mark, strings)):
            return Marked(texts, None)
        mark = self._free_mark(strings)

        def breaking(spellings: _Spellings) -> Callable[[str, bool], str]:
            def broken(text: str, is_word: bool) -> str:
                changed = spellings.broken(text, mark)
                return changed if is_word else self._fenced(text, changed, mark)

            return broken

        anywhere, in_answers = breaking(self._anywhere), breaking(self._in_answers)

        def message(fields: Mapping[str, Any]) -> dict[str, Any]:
            answers = _ANSWERS if fields.get("role") == "assistant" else ()
            return {
                name: _map_strings(value, in_answers if name in answers else anywhere, name)
                for name, value in fields.items()
            }

        messages = list(map(message, texts.messages))
        variables = {name: _map_strings(value, anywhere) for name, value in texts.variables.items()}
        return Marked(ClientTexts(messages, _map_strings(texts.tools, anywhere), variables), mark)

    def encode(self, text: str, mark: str | None) -> list[int]:
        """The token ids of a rendered conversation. Raises TokenizerError."""
        if mark is None:
            return self._tokenizer.encode(text)
        token_ids: list[int] = []
        start = 0  # of what has not been encoded yet
        for part in self._marked_parts(text, mark):
            if part.begin > start:
                token_ids += self._tokenizer.encode(text[start : part.begin].replace(mark, ""))
            token_ids += self._encode_pieces(part.pieces, is_start=part.begin == 0)
            start = part.end
        return token_ids + self._tokenizer.encode(text[start:].replace(mark, ""))

    def _marked_parts(self, text: str, mark: str) -> Iterator[_MarkedPart]:
        """The stretches between two control tokens in which only a mark prevents another one."""
        spans = [(0, 0), *self._anywhere.spans(text, mark), (len(text), len(text))]
        for (before, begin), (end, after) in itertools.pairwise(spans):
            if text.find(mark, begin, end) < 0:
                continue
            part = text[begin:end]
            if not self._anywhere.is_in(part.replace(mark, "")):
                continue
            if begin and self._by_text[text[before:begin]].strips_right:
                part = part.lstrip()
            if end < len(text) and self._by_text[text[end:after]].strips_left:
                part = part.rstrip()
            yield _MarkedPart(begin, end, part.split(mark))

    def _encode_pieces(self, pieces: Sequence[str], *, is_start: bool) -> list[int]:
        """Pieces of one text, none of which spells a control token. ``is_start``: of the prompt."""
        first, rest = [piece for piece in pieces[:1] if piece], [piece for piece in pieces[1:] if piece]
        if self._continuing is None:
            encoded = self._tokenizer.encode_each([*first, *rest])
        elif self._continuing.is_only_at_start and not is_start:
            encoded = encode_texts(self._continuing.backend, [*first, *rest])
        else:
            encoded = [*self._tokenizer.encode_each(first), *encode_texts(self._continuing.backend, rest)]
        return [token_id for token_ids in encoded for token_id in token_ids]

    def _needs_mark(self, text: str) -> bool:
        return self._may_begin(text) or self._may_end(text) or self._anywhere.is_in(text)

    def _fenced(self, text: str, changed: str, mark: str) -> str:
        """``changed`` with marks at its ends where ``text`` may be a part of a control token.

        Inside the whitespace there, which a template may trim.
        """
        if self._may_begin(text):
            end = len(changed.rstrip())
            changed = changed[:end] + mark + changed[end:]
        if self._may_end(text):
            start = len(changed) - len(changed.lstrip())
            changed = changed[:start] + mark + changed[start:]
        return changed

    def _may_begin(self, text: str) -> bool:
        """Whether ``text``, trimmed, ends like the beginning of a control token."""
        end = text.rstrip()[-self._max_length :]
        if not any(first in end for first in self._first_characters):
            return False
        return any(end[-length:] in self._prefixes for length in range(1, len(end) + 1))

    def _may_end(self, text: str) -> bool:
        """Whether ``text``, trimmed, begins like the end of a control token."""
        start = text.lstrip()[: self._max_length]
        if not any(last in start for last in self._last_characters):
            return False
        return any(start[:length] in self._suffixes for length in range(1, len(start) + 1))

    def _free_mark(self, strings: Sequence[str]) -> str:
        for mark in _MARKS:
            spelled = _in_json(mark)
            if not any(mark in text or spelled in text for text in (self._sources, *strings)):
                return mark
        raise TokenizerError(
            "a text that spells a control token of this model may not come with all of the noncharacters "
            "U+FDD0 to U+FDEF"
        )


def unescape_marks(text: str, mark: str | None) -> str:
    """``text`` with each mark as itself, also where a template wrote it as JSON in plain ASCII."""
    return text if mark is None else text.replace(_in_json(mark), mark)


def _in_json(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


class _Spellings:
    """Finds the texts of some tokens in other texts, the longest where several begin at one place."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._single = "".join(re.escape(text) for text in texts if len(text) == 1)
        pattern = _trie_pattern(texts) if texts else r"(?!)"
        self._pattern = re.compile(pattern)
        self._starts = re.compile(f"(?={pattern})(.)", re.DOTALL)
        self._longer = _trie_pattern([text for text in texts if len(text) > 1])

    def is_in(self, text: str) -> bool:
        """Whether ``text`` has one of them."""
        return self._pattern.search(text) is not None

    def broken(self, text: str, mark: str) -> str:
        """``text`` with a mark after the first character of each, those that overlap included."""
        return self._starts.sub(lambda match: match[1] + mark, text)

    def spans(self, text: str, mark: str) -> Iterator[tuple[int, int]]:
        """Where those lie that are not broken, from left to right."""
        pattern = self._pattern
        if self._single:  # a mark cannot be inside one character, so it is behind it
            alternatives = [f"[{self._single}](?!{mark})", *([self._longer] if self._longer else [])]
            pattern = re.compile("|".join(reversed(alternatives)))
        return (match.span() for match in pattern.finditer(text))


def _trie_pattern(texts: Sequence[str]) -> str:
    """A regular expression for any of ``texts``, the longest first, that looks at each character once."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + _trie_pattern(rests) for first, rests in by_first.items()]
    if len(branches) <= 1 and "" not in texts:
        return "".join(branches)
    return f"(?:{'|'.join(branches)})?" if "" in texts and branches else f"(?:{'|'.join(branches)})"


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str, bool], str], name: object = None) -> Any:
    """A copy of a JSON-like value with every string changed, keys included. ``name`` is its own key."""
    if isinstance(value, str):
        return change(value, name in _WORDS)
    if isinstance(value, Mapping):
        return {
            change(key, True) if isinstance(key, str) else key: _map_strings(item, change, key)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _continuing(tokenizer: Tokenizer) -> _Continuing | None:
    """None where a tokenizer puts nothing before a text."""
    if b"".join(map(tokenizer.token_bytes, tokenizer.encode("a"))) == b"a":
        return None
    prefixes: list[str] = []
    normalizer = _without_prefix(tokenizer.normalizer, prefixes)
    pre_tokenizer = _without_prefix(tokenizer.pre_tokenizer, prefixes)
    if not prefixes:
        return None
    description = {**tokenizer.description(), "normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    backend = tokenizers.Tokenizer.from_str(json.dumps(description))
    return _Continuing(backend, is_only_at_start=set(prefixes) == {"first"})


def _without_prefix(step: Any, prefixes: list[str]) -> Any:
    """A normalizer or pre-tokenizer that puts no space before a text; adds to ``prefixes`` when one did."""
    match step:
        case {"type": "Sequence", "normalizers": list(steps)}:
            kept = [_without_prefix(one, prefixes) for one in steps]
            return {**step, "normalizers": [one for one in kept if one is not None]}
        case {"type": "Sequence", "pretokenizers": list(steps)}:
            return {**step, "pretokenizers": [_without_prefix(one, prefixes) for one in steps]}
        case {"type": "Prepend"}:
            prefixes.append("always")
            return None
        case {"type": "Metaspace", "prepend_scheme": "always" | "first" as scheme}:
            prefixes.append(scheme)
            return {**step, "prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": True}:
            prefixes.append("always")
            return {**step, "add_prefix_space": False}
    return step
