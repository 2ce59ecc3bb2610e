"""The configuration tree: defaults < YAML file < environment (``LEADOUT_*``) < flags.

``load_config`` is the way in. The tree is frozen, and an unknown key or a wrong value is a
:class:`ConfigError` that names the key, the value, where it came from and what is allowed. A section built
directly (``EngineConfig(block_size=32)``) reads neither file nor environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from cluster.config.process_settings import LocalConfig, LogConfig, RegistryConfig
from cluster.config.router_settings import RouterConfig
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
from cluster.config.worker_settings import EngineConfig, KvTransferConfig, ModelConfig, WorkerConfig

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
