"""Settings of a worker: model, engine, KV transfer, process."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import NoDecode

from cluster.config.section import Section
from cluster.config.values import (
    BlockSize,
    ByteSize,
    CommaSeparated,
    LowerCase,
    Milliseconds,
    Name,
    NonEmpty,
    Port,
    PortOrOff,
)

_MIB = 1024**2


class ModelConfig(Section):
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
        description="Number format of the weights (docs/number-formats.md). auto is float16 where "
        "the processor has kernels for it (x86-64 with AVX2) and the weights fit, else float32; both compute "
        "in float32. float16 is refused by a processor without those kernels. "
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


class EngineConfig(Section):
    """The engine of each worker: backend, KV cache, scheduler, threads."""

    backend: Literal["auto", "cpu", "reference"] = Field(
        default="auto",
        description="Which implementation of the numeric operations computes: auto is the best one for the "
        "machine, which is cpu everywhere so far; reference is plain PyTorch, very slow, for finding out "
        "whether a wrong answer comes from the others' kernels.",
    )
    block_size: BlockSize = Field(
        default=16,
        description="Tokens in one KV cache block; equal on all workers that hand over to each other.",
    )
    kv_cache_memory: ByteSize = Field(
        default=512 * _MIB, description="Memory of the KV cache of one worker, in bytes."
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="How keys and values are kept, whatever model.dtype computes in; auto: as the weights "
        "are. Equal on all workers that hand over to each other.",
    )
    max_num_seqs: int = Field(default=64, ge=1, le=65536, description="Most sequences in the running batch.")
    max_num_batched_tokens: int = Field(
        default=256,
        ge=1,
        le=1_048_576,
        description="Token budget of one engine step, decodes and prefill chunks together.",
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
        gt=0,
        le=1e9,
        allow_inf_nan=False,
        description="With shortest_remaining: how many tokens shorter a prompt counts for each second it has "
        "waited, so that long prompts do not starve.",
    )
    long_prefill_token_threshold: int = Field(
        default=0,
        ge=0,
        description="Most tokens of one prompt in a step while other prompts wait, so that a long one leaves "
        "them a share; 0: no limit.",
    )
    watermark: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        allow_inf_nan=False,
        description="Share of the KV blocks that new requests leave free for running ones to grow into: "
        "fewer are preempted.",
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


class KvTransferConfig(Section):
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


class WorkerConfig(Section):
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
