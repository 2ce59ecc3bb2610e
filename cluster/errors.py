"""The base of all errors that a person can cause and put right."""

from __future__ import annotations

from typing import ClassVar


class LeadoutError(Exception):
    """Something a person can put right: a wrong setting, a missing file, a server that does not answer.

    The message says what is wrong, where, and what is allowed. The command line prints it without a traceback
    and ends with ``exit_status``.
    """

    exit_status: ClassVar[int] = 1
