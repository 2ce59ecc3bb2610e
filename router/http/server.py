"""The HTTP listener: a socket bound before anything else, and uvicorn on it without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
from collections.abc import Generator
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from cluster.config.settings import RouterConfig
from router.http.protocol import BoundedHttpProtocol, HttpLimits
from router.http.rejection_log import RejectionLog
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_OTHER_FILES = 512  # connections to workers and to the registry, logs, libraries
_BACKLOG = 2048
_KEEP_ALIVE_S = 65  # longer than the minute after which most clients and proxies drop an idle connection


class HttpServer(uvicorn.Server):
    """One uvicorn server on an own socket.

    Who owns the process decides what a signal means: ``stop_accepting`` begins the shutdown, and ``serve``
    returns when the last connection has ended or the grace period is over.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        limits: HttpLimits,
        metrics: RouterMetrics,
        rejections: RejectionLog,
        shutdown_grace_s: int,
    ) -> None:
        protocol = functools.partial(
            BoundedHttpProtocol, limits=limits, metrics=metrics, rejections=rejections
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(type[asyncio.Protocol], protocol),  # uvicorn only calls it
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=shutdown_grace_s,
            )
        )
        self._listener = listener

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests until ``stop_accepting``."""
        await super().serve(sockets or [self._listener])

    def stop_accepting(self) -> None:
        """Close the listening socket and idle connections; requests that have begun go on."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves the process's signal handlers alone."""
        yield


def bind_listener(host: str, port: int) -> socket.socket:
    """Bind a TCP socket; port 0 takes a free one. Raises OSError that says what could not be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise OSError(error.errno, f"router.host is {host!r}, which is no address here: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"cannot listen on router.host {host!r}, router.port {port}: {error.strerror}"
        ) from None
    return listener


def listener_url(listener: socket.socket) -> str:
    """The http URL that other machines reach ``listener`` at: the host's name where it is bound to all."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def http_limits(config: RouterConfig) -> HttpLimits:
    """The configured bounds on connections; as many connections as this process may open files for."""
    return HttpLimits(
        max_header_bytes=config.max_header_bytes,
        max_headers=config.max_headers,
        receive_timeout_s=config.receive_timeout_ms / 1000,
        max_connections=allow_open_files(config.max_connections),
    )


def allow_open_files(num_connections: int) -> int:
    """Raise this process's limit of open files for so many connections; returns how many it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return num_connections
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    allowed = min(num_connections, max(wanted - _OTHER_FILES, wanted // 2))
    if allowed < num_connections:
        logger.warning(
            "at most %d connections instead of router.max_connections=%d: the hard limit of open files is %d",
            allowed,
            num_connections,
            hard,
        )
    return allowed
