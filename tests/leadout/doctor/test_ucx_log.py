"""What is read from UCX's own log. The samples are UCX 1.23's, shortened; RDMA's is made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadout.doctor.ucx_log import UcxLog, parse_ucx_log

_HEAD = """\
[1796132539.98] [vm:149:0]     ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from libucp.so.0.0.0, git)
[1796132540.00] [vm:149:0]          parser.c:2587 UCX  INFO  UCX_* env variables: UCX_TLS=tcp,self A=y
"""
_SELF = """\
[1796132540.01] [vm:149:0]   +--------+-------------+-----------------------------------+
[1796132540.01] [vm:149:0]   | source@1 self cfg#0                                      |
[1796132540.01] [vm:149:0]   | remote memory write by ucp_put* from host memory to host |
[1796132540.01] [vm:149:0]   +--------+-------------+-----------------------------------+
[1796132540.01] [vm:149:0]   | Range  | Description |              Config               |
[1796132540.01] [vm:149:0]   | 0..inf | zero-copy   | self/memory                       |
"""
_MESSAGES = """\
[1796132540.05] [vm:149:0]   | source@1 intra-node cfg#1                       |
[1796132540.05] [vm:149:0]   | active message by ucp_am_send* from host memory |
[1796132540.05] [vm:149:0]   |   Range    |    Description     |    Config     |
[1796132540.05] [vm:149:0]   |          0 | short              | tcp/lo        |
[1796132540.05] [vm:149:0]   | 16516..inf | multi-frag copy-in | tcp/lo        |
"""


def _writes(*rows: str, place: str = "intra-node") -> str:
    table = [
        "+--------+-------------+------------------------------------------+",
        f"| source@1 {place} cfg#1                                |",
        "| remote memory write by ucp_put*(multi) from host memory to host |",
        "| Range  | Description |                  Config                  |",
        *rows,
    ]
    return "".join(f"[1796132540.06] [vm:149:0]   {line}\n" for line in table)


def _parse(text: str) -> UcxLog:
    return parse_ucx_log(text.splitlines())


def test_shared_memory() -> None:
    log = _parse(_HEAD + _SELF + _MESSAGES + _writes("| 0..inf | zero-copy   | cma/memory    |") + _MESSAGES)
    assert log.version == "1.23.0"
    assert log.settings == "UCX_TLS=tcp,self A=y"
    assert log.write_lanes == ("cma/memory",)
    assert not log.is_tcp_only


def test_tcp_over_several_devices() -> None:
    log = _parse(_HEAD + _SELF + _writes("| 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |"))
    assert log.write_lanes == ("tcp/lo", "tcp/eth0")
    assert log.transports == ("tcp",)
    assert log.is_tcp_only


def test_rdma_to_another_machine_with_a_row_per_size() -> None:
    log = _parse(
        _writes(
            "|        0 | short     | rc_mlx5/mlx5_0:1/path0 |",
            "| 1..inf   | zero-copy | 50% on rc_mlx5/mlx5_0:1/path0 and 50% on rc_mlx5/mlx5_1:1/path0 |",
            place="inter-node",
        )
    )
    assert log.write_lanes == ("rc_mlx5/mlx5_0:1/path0", "rc_mlx5/mlx5_1:1/path0")
    assert log.transports == ("rc_mlx5",)


def test_problems_are_kept_once() -> None:
    line = (
        "[1796132595.75] [vm:150:0] ucp_context.c:1508 UCX  WARN  transport 'ib' is not available, use tcp\n"
    )
    error = "[1796132595.75] [vm:150:0] ucp_context.c:1770 UCX  ERROR no usable transports/devices\n"
    assert _parse(line + line + error).problems == (
        "transport 'ib' is not available, use tcp",
        "no usable transports/devices",
    )


def test_another_program_s_output_is_passed_over() -> None:
    assert _parse("hello\n| 0..inf | not a table | tcp/lo |\n\n") == UcxLog()
    assert not UcxLog().is_tcp_only, "nothing known is not TCP"


@given(st.lists(st.one_of(st.text(), st.sampled_from((_HEAD + _SELF + _MESSAGES).splitlines()))))
def test_any_output_is_read_without_an_error(lines: list[str]) -> None:
    log = parse_ucx_log(lines)
    assert set(log.transports) <= {"tcp", "self", "cma"}


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_a_log_that_breaks_off_names_no_other_path(cut: int) -> None:
    text = _writes("| 0..inf | zero-copy   | cma/memory    |")
    assert set(_parse(text[:cut]).write_lanes) <= {"cma/memory"}
