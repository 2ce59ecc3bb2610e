"""What the command line reports as one line, without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something a person can put right: a wrong argument, a port in use, a server that does not answer."""
