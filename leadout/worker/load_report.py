"""What a worker publishes about its load, gathered from its engine, its ledger and its transport."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.members import LinkReport, LoadReport, WorkerState
from engine.step_result import EngineLoad
from kv_transfer.handoff_ledger import HandoffLedger
from kv_transfer.transport import PeerInfo


def load_report(
    load: EngineLoad, state: WorkerState, ledger: HandoffLedger, peers: Sequence[PeerInfo]
) -> LoadReport:
    """What a worker publishes of itself."""
    return LoadReport(
        state=state,
        running=load.running,
        waiting=load.waiting,
        waiting_for_remote_kv=load.waiting_for_remote_kv,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        kv_blocks_total=load.kv_blocks_total,
        kv_blocks_free=load.kv_blocks_free,
        kv_blocks_cached=load.kv_blocks_cached,
        kv_blocks_reserved=load.kv_blocks_reserved,
        kv_blocks_pinned=load.kv_blocks_held,
        kv_blocks_quarantined=load.kv_blocks_quarantined,
        handoffs_active=len(ledger),
        handoffs={state.value: count for state, count in ledger.counts().items() if count},
        links=tuple(
            LinkReport(peer=info.peer.worker_id, probe_gbps=info.probe_gbps, gbps=info.link_gbps)
            for info in peers
        ),
        num_preemptions=load.num_preemptions,
        step_ms=load.step_ms,
        prompt_tokens_total=load.prompt_tokens_total,
        generation_tokens_total=load.generation_tokens_total,
    )
