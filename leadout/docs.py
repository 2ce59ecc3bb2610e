"""Writes what is generated in ``docs/``: ``python -m leadout.docs``, or ``--check`` to compare only."""

from __future__ import annotations

import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from cluster.config.docs import configuration_markdown
from cluster.metrics import WorkerMetrics
from router.api.request.unsupported_fields import unsupported_fields_markdown
from router.metrics import RouterMetrics

DOCS = Path(__file__).parent.parent / "docs"

_METRICS_INTRODUCTION = """\
# Metrics

Written by `python -m leadout.docs` from the metric objects; a test keeps it current.

The router answers at `GET /metrics` on its own port; a worker on a port of its own (`worker.metrics_port`),
whose URL is in `/cluster` as `metrics_address`. All are in the Prometheus text format.
"""


def metrics_markdown() -> str:
    """``docs/metrics.md``."""
    return "\n".join(
        [
            _METRICS_INTRODUCTION,
            _table("Router", RouterMetrics().registry),
            _table("Workers", WorkerMetrics().registry),
        ]
    )


def generated_pages() -> dict[Path, str]:
    """The content of every page that is generated, in whole or in part."""
    api = DOCS / "api.md"
    return {
        DOCS / "configuration.md": configuration_markdown(),
        DOCS / "metrics.md": metrics_markdown(),
        api: _with_section(api.read_text(), "unsupported fields", unsupported_fields_markdown()),
    }


def main() -> int:
    """Write the pages; with ``--check``, only say whether they are current (0) or not (1)."""
    is_check = sys.argv[1:] == ["--check"]
    status = 0
    for path, text in generated_pages().items():
        is_current = path.exists() and path.read_text() == text
        if is_check and not is_current:
            print(f"{path} is not current: run `python -m leadout.docs`")
            status = 1
        elif not is_current:
            path.write_text(text)
            print(f"wrote {path}")
    return status


def _with_section(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between the two comments that mark the section ``name``."""
    begin, end = f"<!-- begin: {name} (generated) -->\n", f"<!-- end: {name} -->\n"
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"the page has no section between {begin.strip()} and {end.strip()}")
    return f"{before}{begin}{text}{end}{after}"


def _table(title: str, registry: CollectorRegistry) -> str:
    rows = [f"## {title}\n", "| metric | type | labels | meaning |", "|---|---|---|---|"]
    for collector in sorted(registry._collector_to_names, key=lambda one: one._name):  # type: ignore[attr-defined]
        suffix = "_total" if collector._type == "counter" else ""  # type: ignore[attr-defined]
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)  # type: ignore[attr-defined]
        rows.append(
            f"| `{collector._name}{suffix}` | {collector._type} | {labels} "  # type: ignore[attr-defined]
            f"| {collector._documentation} |"  # type: ignore[attr-defined]
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
