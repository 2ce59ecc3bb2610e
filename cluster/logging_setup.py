"""One log format for every process: a line of text or of JSON on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from cluster.config.settings import LogConfig

_OWN_FIELDS = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {
    "message",
    "asctime",
    "taskName",
}
_QUIET_LIBRARIES = ("asyncio", "httpx", "httpcore", "huggingface_hub", "redis", "urllib3", "uvicorn.access")


def configure_logging(log: LogConfig, *, process: str, role: str = "") -> None:
    """Send the log of this process to standard error. Its id and its present role are in every line.

    Fields given as ``extra={...}`` are added to the line. Replaces what was configured before.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(process, role) if log.format == "json" else TextFormatter(process, role)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log.level.upper())
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z info worker-0/decode engine.engine: message key=value``"""

    def __init__(self, process: str, role: str) -> None:
        super().__init__()
        self._process = f"{process}/{role}" if role else process

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        extras = "".join(f" {key}={value}" for key, value in _extras(record).items())
        line = (
            f"{_timestamp(record)} {record.levelname.lower()} {self._process} {record.name}: "
            f"{record.getMessage()}{extras}"
        )
        trace = _trace(self, record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, process, a worker's role, logger, message, error, extras."""

    def __init__(self, process: str, role: str) -> None:
        super().__init__()
        self._process = {"process": process, "role": role} if role else {"process": process}

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        fields: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            **self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        trace = _trace(self, record)
        if trace:
            fields["error"] = trace
        return json.dumps(fields, default=str, ensure_ascii=False)


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _OWN_FIELDS}


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
