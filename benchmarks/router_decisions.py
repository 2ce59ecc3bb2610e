"""What a router's decision costs, by the number of workers and the length of the prompt.

    python -m benchmarks.router_decisions --workers 16 100 1000 --tokens 8192 100000 --runs 5

Half of the workers take prefills, the other half requests. Each holds other prefixes of the same family of
prompts, of lengths that are all different, which is as bad as prefix hits can be; and has its own load.
Printed are medians over the runs, each of which is the mean of many decisions, and the slowest run:

- ``hash``: the prompt's block hashes, once per request;
- ``plan``: the decision;
- ``account``: what a dispatch and its end change in the workers' rows;
- ``report``: one load report;
- ``poll``: the registry's list, asked for and taken over while nothing has changed (CPU of this process);
- ``change``: a list with one worker more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable

import msgspec

from cluster.config.settings import RegistryConfig, RouterConfig
from cluster.kv_layout import KvLayout
from cluster.load import KvLoad, LoadReport, QueueLoad
from cluster.members import Members, ModelIdentity, TransportEndpoint, WorkerRecord
from cluster.messages import Message
from cluster.registry import Registry
from cluster.sequence_spec import RequestKey
from leadout.local.embedded_registry import EmbeddedRegistry
from router.cluster_view import ClusterView
from router.policy.longest_prefix import LongestPrefixPolicy
from router.policy.plan import RequestSnapshot
from router.services import policy_settings
from router.state.prompt_hashes import PromptHashes

BLOCK_SIZE = 16
MODEL = "model"
MAX_MODEL_LEN = 131_072
NUM_PREFIXES = 8
COLUMNS = ("hash", "plan", "account", "report", "poll", "change")


class Nowhere:
    """A connection that takes everything: this is about deciding."""

    def send(self, message: Message) -> None:
        """See cluster.network.Connection."""

    def close(self) -> None:
        """See cluster.network.Connection."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 100, 1000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 100_000], help="of a prompt")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--decisions", type=int, default=300, help="in each run")
    options = parser.parse_args()
    print(f"{'workers':>8}{'tokens':>9}" + "".join(f"{name + ', µs':>20}" for name in COLUMNS))
    for num_workers in options.workers:
        for num_tokens in options.tokens:
            bench = DecisionBench(num_workers, num_tokens)
            runs = [bench.run(options.decisions) for _ in range(options.runs)]
            cells = [
                f"{statistics.median(run[name] for run in runs):,.1f} ({max(run[name] for run in runs):,.1f})"
                for name in COLUMNS
            ]
            print(f"{num_workers:>8}{num_tokens:>9}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


class DecisionBench:
    """A router's state with that many workers, all of which have reported."""

    def __init__(self, num_workers: int, num_tokens: int) -> None:
        self._rng = random.Random(0)
        self._num_tokens = num_tokens
        self._prefixes = [
            [self._rng.randrange(100_000) for _ in range(num_tokens)] for _ in range(NUM_PREFIXES)
        ]
        self._policy = LongestPrefixPolicy(policy_settings(RouterConfig()))
        self._view = ClusterView(
            connect=lambda record, on_message, on_disconnected: Nowhere(),
            on_tokens=lambda worker, batch: None,
            on_worker_lost=lambda worker: None,
            on_dropped=lambda reason: None,
        )
        self._records = [
            worker_record(f"worker-{index:04}", ("prefill", "decode")[index % 2])
            for index in range(num_workers)
        ]
        self._view.update(Members(workers=tuple(self._records)))
        state = self._view.state
        for view in state.workers:
            view.report(self._load_report())
            for prefix in self._rng.sample(self._prefixes, 2):
                hashes = PromptHashes(prefix).of(view.group)
                state.kv_index.store(view.slot, hashes[: self._rng.randrange(len(hashes))])

    def run(self, num_decisions: int) -> dict[str, float]:
        """The mean of each figure in µs."""
        state, views = self._view.state, self._view.state.workers
        prompts = [self._prompt() for _ in range(num_decisions)]
        hashes = [PromptHashes(prompt) for prompt in prompts]
        group = views[0].group
        figures = {"hash": mean_us(lambda index: hashes[index].of(group), min(50, num_decisions))}
        for one in hashes:
            one.of(group)
        requests = [RequestSnapshot(model=MODEL, hashes=one, num_tokens=self._num_tokens) for one in hashes]
        figures["plan"] = mean_us(
            lambda index: self._policy.plan(state, requests[index], now=0.0), num_decisions
        )
        keys = [RequestKey(f"request-{index}", 0) for index in range(num_decisions)]

        def account(index: int) -> None:
            decode, prefill = views[index % len(views)], views[-index % len(views)]
            decode.add_request(keys[index])
            prefill.add_prefill(keys[index], 1000)
            prefill.remove_prefill(keys[index])
            decode.remove_request(keys[index])

        figures["account"] = mean_us(account, num_decisions)
        reports = [self._load_report() for _ in range(num_decisions)]
        figures["report"] = mean_us(
            lambda index: views[index % len(views)].report(reports[index]), num_decisions
        )
        figures |= asyncio.run(self._membership())
        return figures

    async def _membership(self) -> dict[str, float]:
        """What following the registry costs this process."""
        server = EmbeddedRegistry()
        server.start()
        registry = Registry(RegistryConfig(url=server.url, lease_ms=60_000, heartbeat_ms=20_000))
        try:
            for record in self._records:
                await registry.renew(record)
            self._view.update(await registry.members())
            started = time.process_time()
            for _ in range(5):
                self._view.update(await registry.members())
            poll = (time.process_time() - started) / 5
        finally:
            await registry.close()
            server.stop()
        members = Members(workers=tuple(self._records))
        started = time.process_time()
        self._view.update(Members(workers=(*members.workers, worker_record("worker-new", "both"))))
        self._view.state.pool(MODEL)
        change = time.process_time() - started
        self._view.update(members)
        return {"poll": poll * 1e6, "change": change * 1e6}

    def _prompt(self) -> list[int]:
        """A known prefix of any length, and something new."""
        known = self._rng.choice(self._prefixes)[: self._rng.randrange(self._num_tokens)]
        return known + [self._rng.randrange(100_000) for _ in range(self._num_tokens - len(known))]

    def _load_report(self) -> LoadReport:
        free = self._rng.randrange(1_000, 20_000)
        queue = QueueLoad(running=self._rng.randrange(8), waiting_prefill_tokens=self._rng.randrange(20_000))
        return LoadReport(state="ready", kv=KvLoad(blocks_total=20_000, blocks_free=free), queue=queue)


def mean_us(function: Callable[[int], object], times: int) -> float:
    """What one call takes, in µs."""
    started = time.perf_counter()
    for index in range(times):
        function(index)
    return (time.perf_counter() - started) / times * 1e6


def worker_record(worker_id: str, role: str) -> WorkerRecord:
    """As a worker would register, with descriptors of the usual size."""
    layout = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=BLOCK_SIZE, dtype="bfloat16")
    endpoint = TransportEndpoint(
        kind="nixl", agent_name=worker_id, metadata=bytes(600), base_address=4096, num_blocks=20_000
    )
    model = ModelIdentity(
        name=MODEL,
        source=MODEL,
        fingerprint="f" * 64,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=100_000,
        eos_token_ids=(2,),
    )
    record = WorkerRecord(
        id=worker_id,
        incarnation=1,
        role="both",
        pid=1,
        host="host",
        address="tcp://192.0.2.1:5701",
        metrics_address="",
        model=model,
        kv_layout=layout,
        endpoints=(endpoint,),
    )
    return msgspec.structs.replace(record, role=role)


if __name__ == "__main__":
    main()
