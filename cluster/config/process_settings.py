"""Settings of every process: the registry, the log, and what one machine runs."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cluster.config.section import Section
from cluster.config.values import LowerCase, Milliseconds, Name, RegistryUrl


class RegistryConfig(Section):
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


class LocalConfig(Section):
    """What `leadout serve` starts on one machine."""

    prefill: int = Field(
        default=1, ge=0, le=64, description="Number of prefill workers; 0: decode workers prefill themselves."
    )
    decode: int = Field(default=1, ge=1, le=64, description="Number of decode workers.")


class LogConfig(Section):
    """Logging of every process."""

    level: Annotated[Literal["debug", "info", "warning", "error", "critical"], LowerCase] = Field(
        default="info", description="Least severe level that is written."
    )
    format: Annotated[Literal["text", "json"], LowerCase] = Field(
        default="text", description="One line per event: key=value text, or a JSON object."
    )
