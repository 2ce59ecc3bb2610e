"""What a worker publishes about its load, gathered from its engine, its ledgers and its transport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cluster.load import LinkReport, Load, LoadReport, TransferCounters, WorkerState
from kv_transfer.handoff_ledger import HandoffLedger


def load_report(
    load: Load,
    state: WorkerState,
    ledgers: Iterable[HandoffLedger],
    links: tuple[LinkReport, ...],
    transfers: TransferCounters,
    *,
    role_epoch: int = 0,
    num_leaving: int = 0,
) -> LoadReport:
    """What a worker publishes of itself; the fields are ``LoadReport``'s."""
    handoffs: Counter[str] = Counter()
    for ledger in ledgers:
        handoffs.update({state.value: count for state, count in ledger.counts().items() if count})
    return LoadReport(
        queue=load.queue,
        kv=load.kv,
        steps=load.steps,
        state=state,
        role_epoch=role_epoch,
        num_leaving=num_leaving,
        handoffs=dict(handoffs),
        links=links,
        transfers=transfers,
    )
