"""The generated pages are what the code says now."""

from __future__ import annotations

from leadout.docs import generated_pages


def test_generated_pages_are_current() -> None:
    stale = [path.name for path, text in generated_pages().items() if path.read_text() != text]
    assert not stale, f"{stale}: run `make docs`"
