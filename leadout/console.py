"""Where the command line prints."""

from __future__ import annotations

from rich.console import Console

_FILE_WIDTH = 200


def wide_console() -> Console:
    """Standard output; where it is no terminal, so wide that nothing is cut off or wrapped."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)
