"""Records, loads and a recording connection for the router's unit tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.kv_layout import KvLayout
from cluster.load import KvLoad, LoadReport, QueueLoad, WorkerState
from cluster.members import Members, ModelIdentity, TransportEndpoint, WorkerRecord
from cluster.messages import Envelope, Message
from router.state.cluster_state import ClusterState
from router.state.prompt_hashes import PromptHashes

BLOCK_SIZE = 4
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=BLOCK_SIZE, dtype="float32")


def model_identity(**fields: Any) -> ModelIdentity:
    values: dict[str, Any] = {
        "name": "test-model",
        "source": "test-model",
        "fingerprint": "f" * 64,
        "dtype": "float32",
        "max_model_len": 128,
        "vocab_size": 100_000,
        "eos_token_ids": (2,),
    }
    return ModelIdentity(**(values | fields))


def worker_record(worker_id: str, role: str = "decode", incarnation: int = 1, **fields: Any) -> WorkerRecord:
    values: dict[str, Any] = {
        "id": worker_id,
        "incarnation": incarnation,
        "role": role,
        "pid": 1,
        "host": "localhost",
        "address": "tcp://127.0.0.1:1",
        "metrics_address": "",
        "model": model_identity(),
        "kv_layout": LAYOUT,
        "endpoints": (
            TransportEndpoint(kind="nixl", agent_name=worker_id, metadata=b"", base_address=1, num_blocks=8),
        ),
    }
    return WorkerRecord(**(values | fields))


def members_of(*workers: WorkerRecord) -> Members:
    """What the registry lists."""
    return Members(workers=tuple(sorted(workers, key=lambda record: record.id)))


def load_report(state: WorkerState = "ready", *, num_blocks: int = 100, **queue: int) -> LoadReport:
    kv = KvLoad(blocks_total=num_blocks, blocks_free=num_blocks)
    return LoadReport(state=state, kv=kv, queue=QueueLoad(**queue))


def cluster_state(prompt: Sequence[int] = (), **workers: Mapping[str, Any]) -> ClusterState:
    """Workers by id that have reported. Their fields: see ``add_worker``."""
    state = ClusterState()
    for worker_id, fields in workers.items():
        add_worker(state, worker_id, prompt, **fields)
    return state


def add_worker(
    state: ClusterState,
    worker_id: str,
    prompt: Sequence[int] = (),
    *,
    role: str = "decode",
    reports: WorkerState = "ready",
    num_requests: int = 0,
    prefill_tokens: int = 0,
    blocks_total: int = 1000,
    blocks_free: int = 1000,
    max_model_len: int = 4096,
    cached_tokens: int = 0,
    is_reachable: bool = True,
    **record: Any,
) -> None:
    """``cached_tokens``: how much of ``prompt`` is in its prefix cache; ``record``: fields of its record."""
    model = record.pop("model", model_identity(max_model_len=max_model_len))
    view = state.add(worker_record(worker_id, role, model=model, **record))
    view.report(
        LoadReport(
            state=reports,
            kv=KvLoad(blocks_total=blocks_total, blocks_free=blocks_free),
            queue=QueueLoad(running=num_requests, waiting_prefill_tokens=prefill_tokens),
        )
    )
    view.set_reachable(is_reachable)
    hashes = PromptHashes(prompt).of(view.group)
    state.kv_index.store(view.slot, hashes[: cached_tokens // BLOCK_SIZE])


class RecordingConnection:
    """Stands for the network: keeps what was sent, and refuses when told to."""

    def __init__(
        self, record: WorkerRecord, on_message: Callable[[Envelope], None], disconnect: Callable[[], None]
    ) -> None:
        self.record = record
        self.on_message = on_message
        self.disconnect = disconnect  # what the network calls when the connection breaks
        self.sent: list[Message] = []
        self.is_closed = False
        self.is_full = False

    def send(self, message: Message) -> None:
        if self.is_full:
            raise RuntimeError("queue full")
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True

    def answer(self, message: Message, incarnation: int | None = None) -> None:
        """Deliver ``message`` as if the worker had sent it."""
        number = self.record.incarnation if incarnation is None else incarnation
        self.on_message(Envelope(self.record.id, number, message))

    def take(self, kind: type) -> list[Any]:
        """The sent messages of one kind, removed."""
        found = [message for message in self.sent if isinstance(message, kind)]
        self.sent = [message for message in self.sent if not isinstance(message, kind)]
        return found


class Connections:
    """Makes recording connections and keeps the newest per worker."""

    def __init__(self) -> None:
        self.by_worker: dict[str, RecordingConnection] = {}

    def __call__(
        self, record: WorkerRecord, on_message: Callable[[Envelope], None], disconnect: Callable[[], None]
    ) -> RecordingConnection:
        self.by_worker[record.id] = RecordingConnection(record, on_message, disconnect)
        return self.by_worker[record.id]

    def __getitem__(self, worker: str) -> RecordingConnection:
        return self.by_worker[worker]
