"""Who may give the operator's orders, as far as it can be told without keys: nobody's web page.

A page that the operator has open in a browser can send requests to any address that the browser reaches. It
cannot choose the ``Origin`` header, nor send a JSON content type to another origin that does not allow it. It
can have its own name resolve to this router's address (DNS rebinding), but then that name is the ``Host``.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request

from router.api.errors import ApiError


def check_operator(request: Request, allowed_hosts: Sequence[str]) -> None:
    """Raises ApiError: 403 for an unexpected ``Host`` or a foreign ``Origin``, 415 for what is no JSON.

    Expected are IP addresses, ``localhost`` and what ends in ``.localhost``, the machine's name, and
    ``allowed_hosts``: names, ``*.example.com``, or ``*``.
    """
    host = request.headers.get("host", "").lower()
    if not is_expected_host(host, allowed_hosts):
        raise ApiError(
            403,
            f"Operator's actions are not open to requests with the Host {host[:100]!r}. Please use an IP "
            "address, localhost or the machine's name, or add the name to router.allowed_hosts.",
            code="host_not_allowed",
        )
    origin = request.headers.get("origin")
    is_same = origin is None or urlsplit(origin.lower()).netloc == host
    if not is_same or request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ApiError(
            403,
            f"Operator's actions are not open to pages of other origins ({(origin or 'unknown')[:100]!r}).",
            code="origin_not_allowed",
        )
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            415,
            f"The body must be JSON, at least {{}}, with 'Content-Type: application/json', not "
            f"{content_type[:100] or 'none'!r}.",
            code="unsupported_media_type",
        )


def is_expected_host(host: str, allowed_hosts: Sequence[str]) -> bool:
    """Whether ``host``, a lower-case ``Host`` header, names this router and cannot have been made to."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    if not name:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        return True
    if name == "localhost" or name.endswith(".localhost") or name == socket.gethostname().lower():
        return True
    return any(
        allowed == "*"
        or name == allowed.lower()
        or (allowed.startswith("*.") and name.endswith(allowed[1:].lower()))
        for allowed in allowed_hosts
    )
