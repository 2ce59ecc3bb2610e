"""Settings of the scheduler for tests; a test replaces those that it is about."""

from __future__ import annotations

from engine.scheduler.config import SchedulerConfig

SCHEDULER_CONFIG = SchedulerConfig(
    max_num_batched_tokens=2048,
    max_num_seqs=64,
    max_num_waiting=4096,
    long_prefill_token_threshold=0,
    prefill_policy="shortest_remaining",
    ageing_tokens_per_second=500.0,
    watermark=0.01,
)
