"""Synthetic prompts, arrivals, and prompts from a file."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadout.bench.workload import WorkloadSettings, synthetic_workload, workload_from_file
from leadout.errors import UserError

_SETTINGS = WorkloadSettings(num_requests=20, input_len=30, output_len=12)


def _with(**changes: float | None) -> WorkloadSettings:
    return dataclasses.replace(_SETTINGS, **changes)  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_workload() -> None:
    varied = _with(length_spread=0.5, request_rate=3.0, seed=7)
    assert synthetic_workload(varied) == synthetic_workload(varied)
    assert synthetic_workload(varied) != synthetic_workload(dataclasses.replace(varied, seed=8))


def test_without_spread_all_lengths_are_exact() -> None:
    requests = synthetic_workload(_SETTINGS)
    assert [len(request.prompt.split()) for request in requests] == [30] * 20
    assert {request.max_tokens for request in requests} == {12}
    assert len({request.prompt for request in requests}) == 20


@settings(max_examples=50)
@given(
    input_len=st.integers(1, 60),
    output_len=st.integers(1, 60),
    spread=st.floats(0, 0.99),
    share=st.floats(0, 0.99),
    seed=st.integers(),
)
def test_lengths_stay_within_the_spread(
    input_len: int, output_len: int, spread: float, share: float, seed: int
) -> None:
    prefix_len = min(int(input_len * share), input_len - 1)
    requests = synthetic_workload(
        WorkloadSettings(
            num_requests=5,
            input_len=input_len,
            output_len=output_len,
            length_spread=spread,
            shared_prefix_len=prefix_len,
            seed=seed,
        )
    )
    for request in requests:
        # At least one word of its own follows the shared ones; rounding adds up to half a word.
        longest = max(input_len * (1 + spread) + 0.5, prefix_len + 1)
        assert max(1, input_len * (1 - spread) - 0.5) <= len(request.prompt.split()) <= longest
        assert max(1, output_len * (1 - spread) - 0.5) <= request.max_tokens
        assert request.max_tokens <= output_len * (1 + spread) + 0.5


def test_all_prompts_begin_with_the_shared_words_only() -> None:
    prompts = [request.prompt.split() for request in synthetic_workload(_with(shared_prefix_len=25))]
    equal = [len(set(words)) == 1 for words in zip(*prompts, strict=False)]
    assert equal[:25] == [True] * 25
    assert not equal[25]


def test_without_a_rate_everything_is_sent_at_once() -> None:
    assert {request.at_s for request in synthetic_workload(_SETTINGS)} == {0.0}


def test_arrivals_are_in_order_and_of_the_asked_mean_distance() -> None:
    times = [request.at_s for request in synthetic_workload(_with(num_requests=2001, request_rate=50.0))]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] / 2000 == pytest.approx(1 / 50, rel=0.1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    # Of exponentially distributed gaps, the share 1/e is longer than the mean.
    assert sum(gap > 1 / 50 for gap in gaps) / 2000 == pytest.approx(0.368, abs=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_requests": 0}, "at least 1"),
        ({"input_len": 0}, "at least 1"),
        ({"output_len": 0}, "at least 1"),
        ({"length_spread": 1.0}, r"spread is 1\.0, must be from 0 to below 1"),
        ({"length_spread": -0.1}, r"spread is -0\.1"),
        ({"shared_prefix_len": 30}, r"\(30 words\) must be shorter than the input \(30 words\)"),
        ({"request_rate": 0.0}, r"rate is 0\.0, must be above 0"),
    ],
)
def test_impossible_numbers_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        synthetic_workload(_with(**changes))


def test_a_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "max_tokens": 3}\n\n{"prompt": "two", "more": 1}\n', encoding="utf-8")
    requests = workload_from_file(file, _SETTINGS)
    assert [(request.prompt, request.max_tokens) for request in requests] == [("one", 3), ("two", 12)]


def test_a_line_of_a_file_ends_at_a_newline_only(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    prompt = "before\u2028after\x85end"
    file.write_text(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [request.prompt for request in workload_from_file(file, _SETTINGS)] == [prompt]


def test_the_first_lines_of_a_file_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(9)) + "not reached\n")
    requests = workload_from_file(file, _with(num_requests=3, request_rate=10.0))
    assert [request.prompt for request in requests] == ["0", "1", "2"]
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)
    assert requests[-1].at_s > 0


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        "[]",
        '"text"',
        "{}",
        '{"prompt": 5}',
        '{"prompt": "p", "max_tokens": 0}',
        '{"prompt": "p", "max_tokens": "9"}',
        '{"prompt": "p", "max_tokens": true}',
        '{"prompt": "p", "max_tokens": null}',
    ],
)
def test_a_bad_line_is_named_by_its_number_in_the_file(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(UserError) as caught:
        workload_from_file(file, _SETTINGS)
    assert str(caught.value).startswith(f"{file}, line 3: expected ")
    assert repr(line) in str(caught.value)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*missing\.jsonl: No such file"):
        workload_from_file(tmp_path / "missing.jsonl", _SETTINGS)
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(UserError, match=r"empty\.jsonl holds no prompts"):
        workload_from_file(tmp_path / "empty.jsonl", _SETTINGS)
    (tmp_path / "binary.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(UserError, match=r"binary\.jsonl is not UTF-8 text: .* at byte 12"):
        workload_from_file(tmp_path / "binary.jsonl", _SETTINGS)


def test_a_file_needs_a_possible_number_of_requests(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "p"}\n' * 3)
    with pytest.raises(UserError, match="number of requests is -1"):
        workload_from_file(tmp_path / "prompts.jsonl", _with(num_requests=-1))
