"""Where a setting comes from, which source wins, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.settings import (
    ConfigError,
    EngineConfig,
    KvTransferConfig,
    LeadoutConfig,
    LocalConfig,
    ModelConfig,
    RegistryConfig,
    RouterConfig,
    WorkerConfig,
    load_config,
    to_environment,
)
from cluster.config.values import format_size, mask_password, parse_size


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("LEADOUT_"):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    file = folder / "leadout.yaml"
    file.write_text(text)
    return file


def test_flags_win_over_environment_over_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "engine: {block_size: 32, max_num_seqs: 7}\nrouter: {port: 1000}\n")
    monkeypatch.setenv("LEADOUT_ENGINE__MAX_NUM_SEQS", "8")
    monkeypatch.setenv("LEADOUT_ROUTER__PORT", "1001")
    config = load_config(file=file, overrides={"router": {"port": 1002, "host": None}})
    assert (config.engine.block_size, config.engine.max_num_seqs, config.router.port) == (32, 8, 1002)
    assert config.router.host == "127.0.0.1"


def test_the_file_may_be_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADOUT_CONFIG", str(write(tmp_path, "local: {prefill: 3}")))
    assert load_config().local.prefill == 3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("engine: {block_size: 17}", ["engine.block_size", "17", "leadout.yaml"]),
        ("engine: {blocksize: 16}", ["engine.blocksize", "block_size"]),
        ("engin: {block_size: 16}", ["engin", "engine"]),
        ("engine: {kv_cache_memory: 5 parsecs}", ["engine.kv_cache_memory", "5 parsecs", "MiB"]),
        ("router: {port: 70000}", ["router.port", "70000", "65535"]),
        (
            "router: {cors_origins: ['https://a.example/']}",
            ["router.cors_origins", "https://chat.example.com"],
        ),
        ("router: {cors_origins: [a.example]}", ["router.cors_origins", "'a.example'", "or *"]),
        ("router: {cors_origins: ['http://a:x']}", ["router.cors_origins", "http://localhost:3000"]),
        ("router: {allowed_hosts: ['a.example:80']}", ["router.allowed_hosts", "without a port"]),
        ("router: {max_header_bytes: 100}", ["router.max_header_bytes", "100", "at least 1024"]),
        ("model: {dtype: int3}", ["model.dtype", "int3", "bfloat16"]),
        ("registry: {url: 'http://x'}", ["registry.url", "redis://"]),
        ("registry: {lease_ms: 1000, heartbeat_ms: 900}", ["lease_ms", "900"]),
        ("engine: {max_num_batched_tokens: 8}", ["max_num_batched_tokens", "max_num_seqs"]),
        ("engine: {max_num_seqs: yes}", ["engine.max_num_seqs", "True", "integer"]),
        (
            "engine: {ageing_tokens_per_second: 0}",
            ["a number above 0, at most 1e+09"],
        ),
        ("engine: {watermark: 1}", ["engine.watermark", "a number from 0, below 1"]),
        ("engine: {max_num_waiting: 0}", ["engine.max_num_waiting", "0", "at least 1"]),
        ("engine: {step_timeout_ms: 0}", ["engine.step_timeout_ms", "0", "1 to 86400000"]),
        ("engine: {step_timeout_ms: on}", ["engine.step_timeout_ms", "True", "1 to 86400000"]),
        ("engine: {step_timeout_ms: off}", ["engine.step_timeout_ms", "False", "1 to 86400000"]),
        ("registry: {max_outage_ms: -1}", ["registry.max_outage_ms", "-1", "1 to 86400000"]),
        ("kv_transfer: {verify: true}", ["kv_transfer.verify", "True", "off, sampled, all"]),
        ("kv_transfer: {verify: on}", ["kv_transfer.verify", "True", "off, sampled, all"]),
        ("kv_transfer: {verify: some}", ["kv_transfer.verify", "'some'", "off, sampled, all"]),
        ("engine: [1, 2]", ["engine"]),
        ("engine: {block_size: 16, block_size: 32}", ["block_size"]),
        ("{", ["leadout.yaml"]),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_what_is_allowed(
    tmp_path: Path, text: str, named: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(file=write(tmp_path, text))
    for part in named:
        assert part in str(error.value)


def test_a_wrong_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADOUT_ROUTER__PORT", "abc")
    with pytest.raises(ConfigError, match="LEADOUT_ROUTER__PORT"):
        load_config()
    monkeypatch.delenv("LEADOUT_ROUTER__PORT")
    monkeypatch.setenv("LEADOUT_ROUTER__PROT", "1")
    with pytest.raises(ConfigError, match="LEADOUT_ROUTER__PORT"):
        load_config()


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"/no/such\.yaml"):
        load_config(file=Path("/no/such.yaml"))


# --- words that YAML takes for booleans --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "mode"),
    [("off", "off"), ("'off'", "off"), ("OFF", "off"), ("sampled", "sampled"), ("ALL", "all")],
)
def test_verify_in_a_file(tmp_path: Path, word: str, mode: str) -> None:
    assert load_config(file=write(tmp_path, f"kv_transfer: {{verify: {word}}}")).kv_transfer.verify == mode


@pytest.mark.parametrize(("word", "mode"), [("off", "off"), ("Off", "off"), ("ALL", "all")])
def test_verify_in_the_environment(monkeypatch: pytest.MonkeyPatch, word: str, mode: str) -> None:
    monkeypatch.setenv("LEADOUT_KV_TRANSFER__VERIFY", word)
    assert load_config().kv_transfer.verify == mode


def test_verify_on_the_command_line() -> None:
    """``--set kv_transfer.verify=off``: its value is read as YAML."""
    overrides = {"kv_transfer": {"verify": yaml.safe_load("off")}}
    assert overrides["kv_transfer"]["verify"] is False, "else this shows nothing"
    assert load_config(overrides=overrides).kv_transfer.verify == "off"
    assert load_config(overrides={"kv_transfer": {"verify": "ALL"}}).kv_transfer.verify == "all"


# --- defaults and what follows from settings ---------------------------------------------------------------


def test_defaults_of_the_bounds() -> None:
    config = load_config()
    assert config.kv_transfer.verify == "sampled"
    assert config.engine.max_num_waiting == 4096
    assert config.engine.step_timeout_ms == 300_000
    assert config.registry.max_outage_ms == 600_000


@pytest.mark.parametrize(
    ("lease_ms", "heartbeat_ms", "max_stall_s"),
    [
        (5000, 1000, 3.0),  # the record was renewed a heartbeat ago, and its renewal takes time as well
        (4000, 1000, 2.0),
        (2000, 1000, 1.0),  # never less than a heartbeat: that much is normal
        (2500, 1000, 1.0),
    ],
)
def test_how_long_a_process_may_stand_still(lease_ms: int, heartbeat_ms: int, max_stall_s: float) -> None:
    registry = RegistryConfig(lease_ms=lease_ms, heartbeat_ms=heartbeat_ms)
    assert registry.max_stall_s == max_stall_s


# --- a configuration for another process -------------------------------------------------------------------


milliseconds = st.integers(2000, 86_400_000)
configs = st.builds(
    LeadoutConfig,
    model=st.builds(
        ModelConfig,
        served_name=st.none() | st.sampled_from(["m", "org/name"]),
        max_model_len=st.none() | st.integers(1, 10**6),
    ),
    engine=st.builds(
        EngineConfig,
        block_size=st.sampled_from([8, 16, 32, 256]),
        kv_cache_memory=st.integers(1, 2**40),
        max_num_seqs=st.integers(1, 256),
        max_num_batched_tokens=st.integers(256, 10**5),
        ageing_tokens_per_second=st.floats(0.001, 1e6),
        prefix_caching=st.booleans(),
        max_num_waiting=st.integers(1, 10**6),
        step_timeout_ms=milliseconds,
    ),
    kv_transfer=st.builds(
        KvTransferConfig,
        backends=st.lists(st.sampled_from(["UCX", "GDS"]), min_size=1, max_size=2),
        verify=st.sampled_from(["off", "sampled", "all"]),
    ),
    registry=st.builds(
        RegistryConfig,
        heartbeat_ms=st.integers(10, 1000),
        lease_ms=milliseconds,
        max_outage_ms=milliseconds,
    ),
    router=st.builds(
        RouterConfig,
        port=st.integers(0, 65535),
        max_request_body=st.integers(1, 2**31),
        cors_origins=st.lists(st.sampled_from(["*", "https://a.example", "http://[::1]:3000"]), max_size=2),
        allowed_hosts=st.lists(st.sampled_from(["*", "a.example", "*.svc.cluster.local"]), max_size=2),
    ),
    worker=st.builds(WorkerConfig, id=st.none() | st.just("w-1"), metrics_port=st.integers(-1, 65535)),
    local=st.builds(LocalConfig, prefill=st.integers(0, 64)),
)


@settings(max_examples=60)
@given(config=configs)
def test_a_configuration_goes_to_another_process_by_its_environment(config: LeadoutConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in to_environment(config).items():
            patch.setenv(name, value)
        assert load_config() == config


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("512MiB", 512 * 2**20), ("1.5 GB", 1_500_000_000), ("2kib", 2048), (7, 7)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@given(st.integers(0, 2**50))
def test_a_formatted_size_reads_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_passwords_are_not_shown() -> None:
    assert mask_password("redis://user:secret@host:6379/0") == "redis://user:***@host:6379/0"
    assert "secret" not in mask_password("unix:///socket?password=secret&db=1")
