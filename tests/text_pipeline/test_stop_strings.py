"""Stop strings: against an oracle that looks at the whole text, for any text and chunking."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from text_pipeline.stop_strings import StopStringMatcher, StopStrings


def oracle(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The text a client must get in the end, and the stop string that ended it."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include_stop else end - len(stop)], stop
    return text, None


def longest_proper_prefix_at_end(text: str, stops: list[str]) -> int:
    lengths = [length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])]
    return max(lengths, default=0)


SMALL_TEXT = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4)


@settings(max_examples=1000, deadline=None)
@given(
    text=SMALL_TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8), include_stop=st.booleans()
)
def test_any_chunking_equals_oracle(text: str, stops: list[str], cuts: list[int], include_stop: bool) -> None:
    matcher = StopStringMatcher(StopStrings(stops), include_stop=include_stop)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    emitted, matched = "", None
    for start, end in itertools.pairwise(edges):
        result = matcher.push(text[start:end])
        emitted += result.text
        if matched is None and result.matched is None:
            held = len(text[:end]) - len(emitted)
            assert held == longest_proper_prefix_at_end(text[:end], stops)
        matched = result.matched
    final = matcher.finish()
    assert (emitted + final.text, final.matched) == oracle(text, stops, include_stop)
    assert matcher.matched == final.matched


def test_earliest_completion_wins_not_earliest_start() -> None:
    result = StopStringMatcher(StopStrings(["abcdef", "cd"])).push("xabcdef")
    assert (result.text, result.matched) == ("xab", "cd")


def test_ties_go_by_list_order() -> None:
    assert StopStringMatcher(StopStrings(["bc", "abc"])).push("abc").matched == "bc"
    result = StopStringMatcher(StopStrings(["abc", "bc"])).push("abc")
    assert (result.text, result.matched) == ("", "abc")


def test_holds_back_a_real_prefix_only() -> None:
    matcher = StopStringMatcher(StopStrings(["</answer>"]))
    assert matcher.push("x < y").text == "x < y"
    assert matcher.push("<").text == ""
    assert matcher.push("/b>").text == "</b>"
    assert matcher.push("</ans").text == ""
    assert matcher.finish().text == "</ans"


def test_after_a_match_text_is_dropped() -> None:
    matcher = StopStringMatcher(StopStrings(["\n\n"]), include_stop=True)
    assert matcher.push("a\n\nb").text == "a\n\n"
    again = matcher.push("more")
    assert (again.text, again.matched) == ("", "\n\n")
    assert matcher.finish().text == ""


def test_no_stops_pass_everything() -> None:
    assert StopStringMatcher(StopStrings([])).push("abc").text == "abc"


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(StopStrings(["a", ""]))
