"""What the command line itself finds wrong."""

from __future__ import annotations

from cluster.errors import LeadoutError


class UserError(LeadoutError):
    """A wrong argument, a port in use, a server that does not answer."""
