"""Settings of a router."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic_settings import NoDecode

from cluster.config.section import Section
from cluster.config.values import (
    ByteSize,
    CommaSeparated,
    HostPattern,
    Milliseconds,
    NonEmpty,
    Origin,
    Port,
)

_MIB = 1024**2


class RouterConfig(Section):
    """The router: the OpenAI-compatible front door."""

    host: NonEmpty = Field(default="127.0.0.1", description="Address the HTTP server binds.")
    port: Port = Field(default=8000, description="Port of the HTTP server; 0: any free port.")
    local_prefill_max_tokens: int = Field(
        default=16,
        ge=0,
        description="Prompts whose uncached part is at most this many tokens are prefilled by the decode "
        "worker itself.",
    )
    overload_factor: float = Field(
        default=2.0,
        ge=1,
        le=1000,
        allow_inf_nan=False,
        description="A worker with more than this many times the load of the least loaded one, and "
        "`router.overload_slack` more, gets no request for the prefix that it has cached.",
    )
    overload_slack: int = Field(
        default=4, ge=0, description="Requests by which a decode worker may exceed `router.overload_factor`."
    )
    max_failed_prefills: int = Field(
        default=2,
        ge=1,
        description="After so many failed prefills a request's decode worker computes its prompt itself.",
    )
    max_index_blocks: int = Field(
        default=1_000_000,
        ge=1,
        description="Most KV blocks of which the router remembers the workers that have them cached.",
    )
    request_timeout_ms: Milliseconds = Field(
        default=600_000, description="Deadline of a request from its arrival to its last token, in ms."
    )
    sse_keepalive_ms: int = Field(
        default=10_000,
        ge=0,
        le=86_400_000,
        description="A stream in which nothing was sent for this long gets a comment, so that proxies do not "
        "cut it, in ms; 0: never.",
    )
    max_request_body: ByteSize = Field(default=8 * _MIB, description="Largest HTTP request body, in bytes.")
    max_header_bytes: Annotated[ByteSize, Field(ge=1024)] = Field(
        default=64 * 1024,
        json_schema_extra={"minimum": 1024},
        description="Longest request line and headers together, in bytes.",
    )
    max_headers: int = Field(
        default=100, ge=1, le=10_000, description="Most headers of a request, and most trailers of its body."
    )
    receive_timeout_ms: Milliseconds = Field(
        default=30_000,
        description="How long a client may take to send a request's headers, and be silent in the middle of "
        "its body, in ms. The body as a whole has the request's deadline.",
    )
    max_connections: int = Field(
        default=4096,
        ge=1,
        le=1_000_000,
        description="Most open connections of clients; further ones get 503. The limit of open files "
        "(`ulimit -n`) is raised towards it where the system allows.",
    )
    cors_origins: Annotated[list[Origin], NoDecode, CommaSeparated] = Field(
        default=[],
        description="Origins of web pages, like https://chat.example.com, whose scripts may use the API from "
        "a browser; `*`: any. Never the operator's actions.",
    )
    allowed_hosts: Annotated[list[HostPattern], NoDecode, CommaSeparated] = Field(
        default=[],
        description="Further names by which operators reach this router, like leadout.example.com or "
        "`*.example.com`, besides IP addresses, localhost and the machine's own name; `*`: any.",
    )
    max_concurrent_requests: int = Field(
        default=1024,
        ge=1,
        description="Most sequences served at once; further requests wait.",
    )
    max_waiting_requests: int = Field(
        default=128,
        ge=0,
        description="Most requests that wait for others to end; further ones are refused with 429.",
    )
    max_wait_ms: Milliseconds = Field(
        default=30_000, description="How long a request waits for others to end before its 429, in ms."
    )
    max_n: int = Field(
        default=16, ge=1, le=1024, description="Most choices (`n`) that one request may ask for."
    )
    max_messages: int = Field(default=10_000, ge=1, description="Most messages of one chat request.")
    max_content_parts: int = Field(
        default=20_000,
        ge=1,
        description="Most content parts and tool calls of all messages of one request together.",
    )
    max_prompts: int = Field(default=128, ge=1, description="Most prompts of one request to /v1/completions.")
    body_processes: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Most processes that parse, render and tokenize request bodies beside the event loop; "
        "large bodies leave one of them to the others.",
    )
    drain_grace_ms: Milliseconds = Field(
        default=10_000, description="How long a router that ends lets its requests finish, in ms."
    )
