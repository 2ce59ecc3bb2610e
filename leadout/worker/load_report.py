"""What a worker publishes about its load, gathered from its engine, its ledger and its transport."""

from __future__ import annotations

from cluster.load import LinkReport, Load, LoadReport, TransferCounters, WorkerState
from kv_transfer.handoff_ledger import HandoffLedger


def load_report(
    load: Load,
    state: WorkerState,
    ledger: HandoffLedger,
    links: tuple[LinkReport, ...],
    transfers: TransferCounters,
) -> LoadReport:
    """What a worker publishes of itself."""
    return LoadReport(
        queue=load.queue,
        kv=load.kv,
        steps=load.steps,
        state=state,
        handoffs={state.value: count for state, count in ledger.counts().items() if count},
        links=links,
        transfers=transfers,
    )
