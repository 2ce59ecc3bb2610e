"""From token ids to client text: stop strings end it, and tokens after them are not counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from text_pipeline.output_text import OutputText
from text_pipeline.stop_strings import StopStrings
from text_pipeline.tokenizer import Tokenizer


def test_tokens_after_the_stop_are_dropped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("One two.\nThree four.")
    newline = ids.index(tokenizer.encode("\n")[0])
    output = OutputText(tokenizer, stop_strings=StopStrings(["\n"]))
    delta = output.push(ids)
    assert (delta.text, delta.stop, delta.num_tokens_kept) == ("One two.", "\n", newline + 1)
    assert output.num_tokens == newline + 1
    later = output.push(ids)
    assert (later.text, later.stop, later.num_tokens_kept) == ("", "\n", 0)
    assert output.finish().text == ""
    assert output.stop == "\n"


def test_held_back_text_comes_at_the_end(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, stop_strings=StopStrings(["END of it"]))
    ids = tokenizer.encode("Not the END of")
    texts = [output.push([token_id]).text for token_id in ids]
    assert "".join(texts) == "Not the "
    final = output.finish()
    assert (final.text, final.stop, final.num_tokens_kept) == ("END of", None, 0)


def test_include_stop(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, stop_strings=StopStrings(["two"]), include_stop=True)
    assert output.push(tokenizer.encode("one two three")).text == "one two"


def test_unfinished_character_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab🦭")
    output = OutputText(tokenizer)
    assert output.push(ids[:-1]).text == "ab"
    assert output.finish().text == "\ufffd"
    stopped = OutputText(tokenizer, stop_strings=StopStrings(["\ufffd"]))
    stopped.push(ids[:-1])
    assert stopped.finish().stop == "\ufffd"


def test_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("1111")
    assert len(ids) == 4
    for min_tokens, kept in ((0, 1), (1, 1), (2, 2), (4, 4)):
        output = OutputText(tokenizer, stop_strings=StopStrings(["1"]), min_tokens=min_tokens)
        delta = output.push(ids)
        assert (delta.num_tokens_kept, delta.text) == (kept, "1" * (kept - 1))
    output = OutputText(tokenizer, stop_strings=StopStrings(["1"]), min_tokens=5)
    assert output.push(ids).stop is None


def test_special_tokens(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("hi"), 2]
    assert OutputText(tokenizer).push(ids).text == "hi"
    shown = OutputText(tokenizer, skip_special_tokens=False).push(ids)
    assert (shown.text, shown.num_tokens_kept) == ("hi<|im_end|>", len(ids))


def test_empty_stop_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="empty"):
        OutputText(tokenizer, stop_strings=StopStrings([""]))


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("ab é中🙂\n1", max_size=30),
    stops=st.lists(st.text("ab é中🙂\n1", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1),
)
def test_any_chunking_gives_the_same(
    tokenizer: Tokenizer, text: str, stops: list[str], sizes: list[int]
) -> None:
    ids = tokenizer.encode(text)
    output = OutputText(tokenizer, stop_strings=StopStrings(stops))
    streamed, kept, position = "", 0, 0
    while position < len(ids):
        size = sizes[kept % len(sizes)]
        delta = output.push(ids[position : position + size])
        streamed, kept, position = streamed + delta.text, kept + delta.num_tokens_kept, position + size
    streamed += output.finish().text
    ends = [(text.find(stop) + len(stop), index) for index, stop in enumerate(stops) if stop in text]
    if ends:
        end, index = min(ends)
        assert (streamed, output.stop) == (text[: end - len(stops[index])], stops[index])
        assert stops[index] in tokenizer.decode(ids[:kept])
        assert stops[index] not in tokenizer.decode(ids[: kept - 1])
    else:
        assert (streamed, output.stop, kept) == (text, None, len(ids))
    assert output.num_tokens == kept
