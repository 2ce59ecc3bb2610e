"""The configuration tree: defaults < YAML file < environment (``LEADOUT_*``) < flags.

``load_config`` is the way in. The tree is frozen, and an unknown key or a wrong value is a
:class:`ConfigError` that names the key, the value, where it came from and what is allowed. A section built
directly (``EngineConfig(block_size=32)``) reads neither file nor environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from cluster.config.sources import (
    CONFIG_FILE_VARIABLE,
    ENV_NESTED_DELIMITER,
    ENV_PREFIX,
    ConfigError,
    ConfigSource,
    env_name,
    explain,
    key_paths,
    merge_sources,
    read_environment,
    read_flags,
    read_yaml,
)
from cluster.config.values import (
    BlockSize,
    ByteSize,
    CommaSeparated,
    HostPattern,
    LowerCase,
    Milliseconds,
    Name,
    NonEmpty,
    Origin,
    Port,
    PortOrOff,
    RegistryUrl,
)

__all__ = [
    "CONFIG_FILE_VARIABLE",
    "ConfigError",
    "EngineConfig",
    "KvTransferConfig",
    "LeadoutConfig",
    "LocalConfig",
    "LogConfig",
    "ModelConfig",
    "RegistryConfig",
    "RouterConfig",
    "WorkerConfig",
    "load_config",
    "to_environment",
]

_MIB = 1024**2


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's ``on`` and ``yes`` are booleans, and Python would take them for the number 1."""
        field = cls.model_fields[info.field_name or ""]
        if value is False and "off" in get_args(field.annotation):
            return "off"  # what the word was
        if isinstance(value, bool) and field.annotation is not bool:
            raise PydanticCustomError("boolean", "a boolean is not allowed here")
        return value


class ModelConfig(_Section):
    """Which model is served."""

    source: NonEmpty = Field(
        default="smollm2-135m-instruct",
        description="A bundled model's name, the path of a .gguf file or of a folder with config.json and "
        "*.safetensors, or a Hugging Face id.",
    )
    served_name: NonEmpty | None = Field(
        default=None, description="The model's name in the API; null takes it from the source."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Number format of weights and KV cache (docs/number-formats.md). auto is float16 where "
        "the processor has kernels for it and the weights fit, else float32; both compute in float32. "
        "bfloat16 rounds activations as well, which changes answers.",
    )
    generation_defaults: Literal["auto", "openai"] = Field(
        default="auto",
        description="Sampling settings where a request has none: auto takes what the model's files recommend "
        "(generation_config.json), openai is temperature 1 and top_p 1.",
    )
    max_model_len: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Longest sequence, prompt and output, in tokens; null takes it from the model.",
    )


class EngineConfig(_Section):
    """The engine of each worker: KV cache, scheduler, threads."""

    block_size: BlockSize = Field(
        default=16,
        description="Tokens in one KV cache block; equal on all workers that hand over to each other.",
    )
    kv_cache_memory: ByteSize = Field(
        default=512 * _MIB, description="Memory of the KV cache of one worker, in bytes."
    )
    max_num_seqs: int = Field(default=64, ge=1, le=65536, description="Most sequences in the running batch.")
    max_num_batched_tokens: int = Field(
        default=256, ge=1, description="Token budget of one engine step, decodes and prefill chunks together."
    )
    num_threads: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="CPU threads of one worker; 0: cores divided by engine processes.",
    )
    prefill_order: Literal["shortest_remaining", "fcfs"] = Field(
        default="shortest_remaining",
        description="Which waiting prompt is computed first: the one with the fewest uncached tokens left, "
        "or the oldest.",
    )
    ageing_tokens_per_second: float = Field(
        default=200.0,
        ge=0,
        allow_inf_nan=False,
        description="With shortest_remaining: how many tokens shorter a prompt counts for each second it has "
        "waited, so that long prompts do not starve.",
    )
    max_num_waiting: int = Field(
        default=4096,
        ge=1,
        description="Most requests that wait in one worker's queue; the router plans further ones elsewhere.",
    )
    step_timeout_ms: Milliseconds = Field(
        default=300_000,
        description="An engine step that takes longer hangs: the worker ends, and others take over, in ms.",
    )
    prefix_caching: bool = Field(
        default=True, description="Whether full KV blocks are kept for later prompts."
    )

    @model_validator(mode="after")
    def _budget_holds_a_token_for_each_sequence(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence needs one token of a step"
            )
        return self


class KvTransferConfig(_Section):
    """How KV blocks move between workers."""

    backends: Annotated[list[NonEmpty], NoDecode, CommaSeparated] = Field(
        default=["UCX"],
        min_length=1,
        description="NIXL back ends in order of preference; a comma-separated list in the environment.",
    )
    write_timeout_ms: Milliseconds = Field(
        default=30_000,
        description="How long one write of KV blocks may take before its handoff fails, in ms.",
    )
    verify: Annotated[Literal["off", "sampled", "all"], LowerCase] = Field(
        default="sampled",
        description="Which KV blocks are checked by a checksum (xxh3) on arrival: none, one in 16 and the "
        "last of each prompt, or all. A prompt with a wrong block is computed again by the decode worker.",
    )


class RegistryConfig(_Section):
    """The Redis or Valkey server where processes find each other."""

    url: RegistryUrl = Field(
        default="redis://127.0.0.1:6379/0", description="The server: redis://, rediss:// or unix:// URL."
    )
    namespace: Name = Field(
        default="leadout", description="Prefix of all keys, so that several deployments can share one server."
    )
    lease_ms: Milliseconds = Field(
        default=5000, ge=100, description="How long a silent process stays registered, in ms."
    )
    heartbeat_ms: Milliseconds = Field(
        default=1000,
        ge=10,
        description="How often a process renews its lease and re-reads the members, in ms.",
    )
    max_outage_ms: Milliseconds = Field(
        default=600_000,
        description="How long a router goes on serving with the members it knew last while the registry does "
        "not answer, in ms.",
    )

    @property
    def max_stall_s(self) -> float:
        """How long a process may stand still and still be sure that its lease was renewed in time."""
        return max(self.lease_ms - 2 * self.heartbeat_ms, self.heartbeat_ms) / 1000

    @model_validator(mode="after")
    def _lease_outlives_a_lost_heartbeat(self) -> Self:
        if self.lease_ms < 2 * self.heartbeat_ms:
            raise ValueError(
                f"lease_ms ({self.lease_ms}) must be at least twice heartbeat_ms ({self.heartbeat_ms}): "
                "one late heartbeat must not end the lease"
            )
        return self


class RouterConfig(_Section):
    """The router: the OpenAI-compatible front door."""

    host: NonEmpty = Field(default="127.0.0.1", description="Address the HTTP server binds.")
    port: Port = Field(default=8000, description="Port of the HTTP server; 0: any free port.")
    local_prefill_max_tokens: int = Field(
        default=16,
        ge=0,
        description="Prompts whose uncached part is at most this many tokens are prefilled by the decode "
        "worker itself.",
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
        description="Longest request line and headers together, in bytes; at most 100 headers.",
    )
    receive_timeout_ms: Milliseconds = Field(
        default=30_000,
        description="How long a client may take to send a request's headers, and be silent in the middle of "
        "its body, in ms. The body as a whole has the request's deadline.",
    )
    max_connections: int = Field(
        default=4096,
        ge=1,
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
        description="Most requests in the router at once; further ones are refused with 429.",
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


class WorkerConfig(_Section):
    """What prefill and decode workers have in common."""

    host: NonEmpty = Field(
        default="127.0.0.1", description="Address a worker binds and advertises to its peers."
    )
    port: Port = Field(default=0, description="Port of the worker's RPC endpoint; 0: any free port.")
    metrics_port: PortOrOff = Field(
        default=0, description="Port of the worker's Prometheus endpoint; 0: any free port, -1: no endpoint."
    )
    load_report_ms: Milliseconds = Field(
        default=250, ge=10, description="Interval of load reports and KV events to the routers, in ms."
    )
    drain_grace_ms: Milliseconds = Field(
        default=30_000, description="How long a draining worker lets its running requests finish, in ms."
    )
    id: Name | None = Field(
        default=None, description="The worker's id, unique in the namespace; null: one is made up at start."
    )


class LocalConfig(_Section):
    """What `leadout serve` starts on one machine."""

    prefill: int = Field(
        default=1, ge=0, le=64, description="Number of prefill workers; 0: decode workers prefill themselves."
    )
    decode: int = Field(default=1, ge=1, le=64, description="Number of decode workers.")


class LogConfig(_Section):
    """Logging of every process."""

    level: Annotated[Literal["debug", "info", "warning", "error", "critical"], LowerCase] = Field(
        default="info", description="Least severe level that is written."
    )
    format: Annotated[Literal["text", "json"], LowerCase] = Field(
        default="text", description="One line per event: key=value text, or a JSON object."
    )


class LeadoutConfig(BaseSettings):
    """The whole tree. Built directly it holds defaults and arguments only; see :func:`load_config`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_NESTED_DELIMITER,
        env_ignore_empty=True,
        env_parse_none_str="null",
    )

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    kv_transfer: KvTransferConfig = KvTransferConfig()
    registry: RegistryConfig = RegistryConfig()
    router: RouterConfig = RouterConfig()
    worker: WorkerConfig = WorkerConfig()
    local: LocalConfig = LocalConfig()
    log: LogConfig = LogConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only the arguments: load_config gathers the other sources, and knows where each value came from."""
        return (init_settings,)


def load_config(*, file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> LeadoutConfig:
    """Reads the configuration: defaults < YAML file < environment < ``overrides``.

    ``file`` defaults to the path in ``LEADOUT_CONFIG``, if set. ``overrides`` is a nested mapping,
    ``{"router": {"port": 0}}``; a leaf of None means that the flag was not given. Raises ConfigError.
    """
    if file is None and os.environ.get(CONFIG_FILE_VARIABLE):
        file = Path(os.environ[CONFIG_FILE_VARIABLE])
    sources: list[ConfigSource] = []
    if file is not None:
        sources.append(read_yaml(file))
    sources.append(read_environment(LeadoutConfig))
    sources.append(read_flags(overrides or {}))
    try:
        return LeadoutConfig(**merge_sources(sources))
    except ValidationError as error:
        raise ConfigError(explain(error, LeadoutConfig, sources)) from None


def to_environment(config: LeadoutConfig) -> dict[str, str]:
    """The variables from which ``load_config`` reads the same configuration, in another process."""
    environment: dict[str, str] = {}
    for path in key_paths(LeadoutConfig):
        value: Any = config
        for name in path:
            value = getattr(value, name)
        if value is None:
            text = "null"
        elif isinstance(value, list):
            text = ",".join(value)
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
        environment[env_name(path)] = text
    return environment
