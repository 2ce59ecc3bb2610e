"""What a worker publishes about its load, gathered from its engine, its ledger and its transport."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.load import LinkReport, Load, LoadReport, WorkerState
from kv_transfer.handoff_ledger import HandoffLedger
from kv_transfer.transport import PeerInfo


def load_report(
    load: Load, state: WorkerState, ledger: HandoffLedger, peers: Sequence[PeerInfo]
) -> LoadReport:
    """What a worker publishes of itself."""
    return LoadReport(
        queue=load.queue,
        kv=load.kv,
        steps=load.steps,
        state=state,
        handoffs={state.value: count for state, count in ledger.counts().items() if count},
        links=tuple(
            LinkReport(peer=info.peer.worker_id, probe_gbps=info.probe_gbps, gbps=info.link_gbps)
            for info in peers
        ),
    )
