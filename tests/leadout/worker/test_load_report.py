"""A worker's load report: every number from where it is known."""

from __future__ import annotations

from cluster.load import (
    KvLoad,
    LinkReport,
    Load,
    LoadReport,
    QueueLoad,
    StepLoad,
    StepSample,
    TransferCounters,
)
from cluster.members import Peer
from cluster.sequence_spec import RequestKey
from kv_transfer.handoff import HandoffEvent
from kv_transfer.handoff_ledger import HandoffLedger
from leadout.worker.load_report import load_report

PREFILL, DECODE = Peer("prefill-0", 1), Peer("decode-0", 1)


def ledger_with(**num_events: int) -> HandoffLedger:
    """A handoff per name, with so many of STREAM, SEAL and ACTIVATE behind it."""
    ledger = HandoffLedger()
    for number, (name, count) in enumerate(num_events.items()):
        ledger.open(key=RequestKey(name, 0), prefill=PREFILL, decode=DECODE, block_ids=(number + 1,), now=1.0)
        for event in (HandoffEvent.STREAM, HandoffEvent.SEAL, HandoffEvent.ACTIVATE)[:count]:
            ledger.transition(RequestKey(name, 0), event, now=2.0)
    return ledger


def test_the_engine_s_and_the_transport_s_load_is_taken_whole() -> None:
    load = Load(
        queue=QueueLoad(running=1, waiting=2),
        kv=KvLoad(blocks_total=5),
        steps=StepLoad(steps_total=7, recent=(StepSample(3, 40, 2, 12.5),)),
    )
    links = (LinkReport(peer="d1", probe_gbps=4.0, gbps=0.5),)
    transfers = TransferCounters(bytes_total=9)
    report = load_report(load, "ready", [HandoffLedger()], links, transfers)
    assert report == LoadReport(
        state="ready", queue=load.queue, kv=load.kv, steps=load.steps, links=links, transfers=transfers
    )


def test_handoffs_by_state() -> None:
    ledger = ledger_with(a=0, b=1, c=1, d=2, e=3)
    ledger.transition(RequestKey("c", 0), HandoffEvent.FENCE, now=3.0)
    report = load_report(Load(), "draining", [ledger], (), TransferCounters())
    assert report.handoffs == {"reserved": 1, "streaming": 1, "sealed": 1, "active": 1, "fencing": 1}
    ledger.transition(RequestKey("c", 0), HandoffEvent.FENCED, now=4.0)
    ledger.close(RequestKey("c", 0))
    report = load_report(Load(), "draining", [ledger], (), TransferCounters())
    assert report.handoffs == {"reserved": 1, "streaming": 1, "sealed": 1, "active": 1}
