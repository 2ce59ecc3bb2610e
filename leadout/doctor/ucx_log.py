"""Reads what UCX writes about itself with ``UCX_LOG_LEVEL=info`` and ``UCX_PROTO_INFO=y``.

NIXL's wheels bring UCX without its ``ucx_info``; the tables it prints when it has chosen how to reach a peer
say what is really used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

LOGGING: Mapping[str, str | None] = MappingProxyType(
    {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": None, "UCX_LOG_LEVEL_TRIGGER": None}
)

_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+)")
_SETTINGS = re.compile(r"UCX\s+INFO\s+UCX_\* env variables: (.*)")
_PROBLEM = re.compile(r"UCX\s+(?:WARN|ERROR)\s+(.*)")
_PLACE = re.compile(r"\| \S+ (intra-node|inter-node|self) cfg#\d+")
_WRITE_TABLE = re.compile(r"\| remote memory write by ucp_put")
_RANGE_ROW = re.compile(r"\|\s*\d+(?:\.\.(?:\d+|inf))?\s*\|[^|]*\|\s*(.*?)\s*\|")
_LANE = re.compile(r"([a-z][a-z0-9_]*)/([^\s,]+)")


@dataclass(frozen=True, slots=True)
class UcxLog:
    """What one process's UCX reported. A lane is a transport and its device, like ``cma/memory``."""

    version: str = ""  # empty where UCX was not in use
    settings: str = ""  # the UCX_* variables it read
    write_lanes: tuple[str, ...] = ()  # by which it writes to the other process
    problems: tuple[str, ...] = ()  # warnings and errors

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports of ``write_lanes``, each once."""
        return tuple(dict.fromkeys(lane.partition("/")[0] for lane in self.write_lanes))

    @property
    def is_tcp_only(self) -> bool:
        """Whether every byte goes through TCP."""
        return self.transports == ("tcp",)


def parse_ucx_log(lines: Iterable[str]) -> UcxLog:
    """Reads a process's output. Lines that are not UCX's, or of a form that is not known, are passed over.

    Tables about the process's connection to itself do not count.
    """
    version = settings = place = ""
    is_write_table = False
    lanes: dict[str, None] = {}
    problems: dict[str, None] = {}
    for line in lines:
        if match := _VERSION.search(line):
            version = match[1]
        elif match := _SETTINGS.search(line):
            settings = match[1].strip()
        elif match := _PROBLEM.search(line):
            problems[match[1].strip()] = None
        elif match := _PLACE.search(line):
            place, is_write_table = match[1], False
        elif _WRITE_TABLE.search(line):
            is_write_table = True
        elif is_write_table and place != "self" and (match := _RANGE_ROW.search(line)):
            lanes.update({f"{transport}/{device}": None for transport, device in _LANE.findall(match[1])})
    return UcxLog(version, settings, tuple(lanes), tuple(problems))
