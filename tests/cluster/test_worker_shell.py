"""What a worker tells its routers, and when it gives one up: real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq

from cluster.load import KvLoad, LoadReport, QueueLoad
from cluster.members import Members
from cluster.messages import Cancel, Drain, KvEvents, SetRole, Subscribe
from cluster.sequence_spec import RequestKey
from tests.cluster.shell_harness import LEASE_S, Harness, block, router_record, until


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    harness.address = await harness.shell.bind("tcp://127.0.0.1:0")
    yield harness
    for router in harness.routers:
        router.connection.close()
    await harness.shell.close()


async def test_close_ends_everything(harness: Harness) -> None:
    router = await harness.subscribed()
    await harness.shell.close()
    assert not harness.shell.send(router.name, Cancel(key=RequestKey("r", 1)))
    assert harness.shell.dropped_messages["undeliverable"] == 1
    harness.shell.publish_load(LoadReport())


# --- messages ----------------------------------------------------------------------------------------------


async def test_the_role_gets_what_is_not_for_the_shell(harness: Harness) -> None:
    router = harness.router("r7", incarnation=3)
    cancel = Cancel(key=RequestKey("a", 1))
    router.connection.send(Subscribe())
    router.connection.send(cancel)
    await until(lambda: bool(harness.messages), "the message")
    assert harness.messages == [("r7", 3, cancel)]
    assert harness.shell.send("r7", cancel)
    await until(lambda: cancel in router.received, "the answer")


async def test_stale_and_undeliverable_messages_are_counted(harness: Harness) -> None:
    old = await harness.subscribed(incarnation=1)
    await harness.subscribed(incarnation=2)
    old.connection.send(Cancel(key=RequestKey("a", 1)))
    await until(lambda: harness.shell.dropped_messages["old_incarnation"] == 1, "the stale message")
    assert harness.messages == []
    assert not harness.shell.send("nobody", Cancel(key=RequestKey("a", 1)))
    assert harness.shell.dropped_messages == {"old_incarnation": 1, "malformed": 0, "undeliverable": 1}


async def test_malformed_messages_are_counted(harness: Harness) -> None:
    context = zmq.Context.instance()
    with context.socket(zmq.DEALER) as stranger:
        stranger.connect(harness.address)
        stranger.send(b"no message at all")
        await until(lambda: harness.shell.dropped_messages["malformed"] == 1, "the malformed message")
    assert harness.shell.dropped_messages == {"old_incarnation": 0, "malformed": 1, "undeliverable": 0}
    assert harness.malformed == []


async def test_whose_request_a_malformed_message_is_about_is_told(harness: Harness) -> None:
    with zmq.Context.instance().socket(zmq.DEALER) as router:
        router.connect(harness.address)
        request = {"type": "generate", "key": RequestKey("r", 2), "spec": {"prompt_token_ids": "no list"}}
        router.send(msgspec.msgpack.encode(["router-0", 1, request]))
        await until(lambda: bool(harness.malformed), "the malformed request")
    ((peer, incarnation, message),) = harness.malformed
    assert (peer, incarnation) == ("router-0", 1)
    assert (message.kind, message.key) == ("generate", RequestKey("r", 2))


async def test_an_order_to_change_the_role_is_the_host_s_affair(harness: Harness) -> None:
    router = harness.router()
    router.connection.send(SetRole(role="both"))
    await harness.heard(router)
    assert (harness.roles, harness.messages) == (["both"], [])


async def test_an_order_to_drain_is_the_host_s_affair(harness: Harness) -> None:
    router = harness.router()
    await harness.heard(router)
    assert harness.num_drains == 0
    router.connection.send(Drain())
    await harness.heard(router)
    assert harness.num_drains == 1
    assert harness.messages == [], "the role does not get it as well"
    await harness.subscribed("r1")  # the shell goes on: what runs is finished first


# --- events and loads --------------------------------------------------------------------------------------


async def test_a_subscriber_gets_a_snapshot_and_then_every_change(harness: Harness) -> None:
    router = await harness.subscribed()
    harness.shell.publish_kv_events([block(1), block(2)], [])
    harness.shell.publish_kv_events([block(3)], [block(1)])
    await harness.arrived(router)
    assert router.kv_events == [
        KvEvents(sequence=0, snapshot=True),
        KvEvents(sequence=1, stored=[block(1), block(2)]),
        KvEvents(sequence=2, stored=[block(3)], removed=[block(1)]),
    ]


async def test_a_late_subscriber_gets_the_whole_cache_in_the_order_stored(harness: Harness) -> None:
    harness.shell.publish_kv_events([block(number) for number in (5, 1, 9)], [])
    harness.shell.publish_kv_events([block(7)], [block(1), block(100)])
    harness.shell.publish_kv_events([block(1)], [])
    router = await harness.subscribed()
    assert router.kv_events == [
        KvEvents(sequence=3, stored=[block(5), block(9), block(7), block(1)], snapshot=True)
    ]
    harness.shell.publish_kv_events([], [block(5)])
    await harness.arrived(router)
    assert router.kv_events[1] == KvEvents(sequence=4, removed=[block(5)])


async def test_no_change_is_no_event(harness: Harness) -> None:
    router = await harness.subscribed()
    harness.shell.publish_kv_events([], [])
    harness.shell.publish_kv_events([block(1)], [])
    await harness.arrived(router)
    assert [event.sequence for event in router.kv_events] == [0, 1]


async def test_a_renewal_gets_a_snapshot_only_if_it_asks(harness: Harness) -> None:
    router = await harness.subscribed()
    await harness.renew(router)
    await harness.arrived(router)
    assert len(router.kv_events) == 1
    await harness.renew(router, snapshot=True)
    await harness.arrived(router)
    assert [event.snapshot for event in router.kv_events] == [True, True]


async def test_an_unknown_router_gets_a_snapshot_even_if_it_does_not_ask(harness: Harness) -> None:
    """The worker may have given it up in between."""
    router = harness.router()
    await harness.renew(router, snapshot=False)
    await harness.arrived(router)
    assert [event.snapshot for event in router.kv_events] == [True]


async def test_loads_go_to_subscribers_only(harness: Harness) -> None:
    one, two = await harness.subscribed("r1"), await harness.subscribed("r2")
    stranger = harness.router("r3")
    await harness.heard(stranger)
    load = LoadReport(state="ready", queue=QueueLoad(running=3), kv=KvLoad(blocks_free=17))
    harness.shell.publish_load(load)
    harness.shell.publish_kv_events([block(1)], [])
    for router in (one, two, stranger):
        await harness.arrived(router)
    assert one.loads == two.loads == [load]
    assert stranger.received == []


async def test_a_new_subscriber_is_told_the_last_load_at_once(harness: Harness) -> None:
    """Until the next report it could plan nothing on this worker."""
    await harness.subscribed("r1")
    harness.shell.publish_load(LoadReport(state="starting"))
    load = LoadReport(state="ready", queue=QueueLoad(running=2))
    harness.shell.publish_load(load)
    late = await harness.subscribed("r2")
    await harness.arrived(late)
    assert late.loads == [load]
    await harness.renew(late)
    await harness.arrived(late)
    assert late.loads == [load], "a renewal waits for the next report like everybody"
    await harness.renew(late, snapshot=True)  # it has lost sight of the worker meanwhile
    await harness.arrived(late)
    assert late.loads == [load, load]


async def test_there_is_no_load_before_the_first_report(harness: Harness) -> None:
    router = await harness.subscribed()
    await harness.arrived(router)
    assert router.loads == []


async def test_a_gone_router_does_not_keep_others_from_being_told(harness: Harness) -> None:
    gone, there = await harness.subscribed("r1"), await harness.subscribed("r2")
    gone.connection.close()
    await until(lambda: not harness.shell.send("r1", Cancel(key=RequestKey("a", 1))), "its disconnection")
    harness.shell.publish_kv_events([block(1)], [])
    await harness.arrived(there)
    assert there.kv_events[-1].stored == [block(1)]


# --- lost routers ------------------------------------------------------------------------------------------


async def test_a_silent_unregistered_router_is_lost_after_the_lease(harness: Harness) -> None:
    router = await harness.subscribed(incarnation=4)
    harness.clock.advance(LEASE_S)
    harness.shell.drop_lost_routers()
    assert harness.lost == [], "the lease is not over yet"
    harness.shell.publish_load(LoadReport())
    harness.clock.advance(0.1)
    harness.shell.drop_lost_routers()
    harness.shell.drop_lost_routers()
    assert harness.lost == [("r0", 4)], "told once"
    harness.shell.publish_load(LoadReport())
    harness.shell.publish_kv_events([block(1)], [])
    await harness.heard(router)
    await harness.arrived(router)
    assert len(router.loads) == 1
    assert len(router.kv_events) == 1


async def test_the_role_can_still_answer_a_router_when_it_hears_of_the_loss(harness: Harness) -> None:
    """It ends the router's requests, and the router, should it live after all, must learn of that."""
    router = await harness.subscribed()
    harness.answer_to_the_lost = Cancel(key=RequestKey("a", 1), reason="your lease is over")
    harness.clock.advance(LEASE_S + 1)
    harness.shell.drop_lost_routers()
    assert harness.lost == [("r0", 1)]
    assert not harness.shell.send("r0", Cancel(key=RequestKey("b", 1))), "then the route is forgotten"
    await until(lambda: harness.answer_to_the_lost in router.received, "the answer")


async def test_publishing_gives_nobody_up(harness: Harness) -> None:
    """Losses come with the tick that the host keeps, however long engine steps and reports take."""
    router = await harness.subscribed()
    harness.clock.advance(LEASE_S + 1)
    harness.shell.publish_load(LoadReport())
    harness.shell.publish_kv_events([block(1)], [])
    await harness.arrived(router)
    assert harness.lost == []
    assert (len(router.loads), len(router.kv_events)) == (1, 2)


async def test_a_lost_router_may_subscribe_again(harness: Harness) -> None:
    router = await harness.subscribed()
    harness.clock.advance(LEASE_S + 1)
    harness.shell.drop_lost_routers()
    harness.shell.publish_kv_events([block(1)], [])
    await harness.renew(router)
    await harness.arrived(router)
    assert router.kv_events[-1] == KvEvents(sequence=1, stored=[block(1)], snapshot=True)
    harness.shell.drop_lost_routers()
    assert len(harness.lost) == 1


async def test_a_router_that_renews_is_kept(harness: Harness) -> None:
    router = await harness.subscribed()
    for _ in range(4):
        harness.clock.advance(LEASE_S - 1)
        await harness.renew(router)
        harness.shell.drop_lost_routers()
        harness.shell.publish_load(LoadReport())
    await harness.arrived(router)
    assert harness.lost == []
    assert len(router.loads) == 4


async def test_a_registered_router_is_kept_though_silent(harness: Harness) -> None:
    await harness.subscribed()
    harness.shell.take_over(Members(routers=(router_record(),)))
    harness.clock.advance(LEASE_S * 10)
    harness.shell.drop_lost_routers()
    assert harness.lost == []
    harness.shell.take_over(Members())
    harness.shell.drop_lost_routers()
    assert harness.lost == [("r0", 1)], "its registration was all that kept it"


async def test_the_registration_of_another_incarnation_keeps_nobody(harness: Harness) -> None:
    await harness.subscribed(incarnation=1)
    others = (router_record(incarnation=2), router_record("other", incarnation=1))
    harness.shell.take_over(Members(routers=others))
    harness.clock.advance(LEASE_S + 1)
    harness.shell.drop_lost_routers()
    assert harness.lost == [("r0", 1)]


async def test_a_restarted_router_replaces_the_old_one_at_once(harness: Harness) -> None:
    old = await harness.subscribed(incarnation=1)
    new = harness.router(incarnation=2)
    await harness.renew(new, snapshot=False)
    assert harness.lost == [("r0", 1)]
    harness.shell.publish_load(LoadReport())
    await harness.arrived(new)
    assert [event.snapshot for event in new.kv_events] == [True], "it knows nothing of its predecessor's"
    assert len(new.loads) == 1
    assert old.loads == []


async def test_only_the_silent_one_is_lost(harness: Harness) -> None:
    await harness.subscribed("silent")
    active = await harness.subscribed("active")
    harness.clock.advance(LEASE_S + 1)
    await harness.renew(active)
    harness.shell.drop_lost_routers()
    assert harness.lost == [("silent", 1)]
    harness.shell.publish_load(LoadReport())
    await harness.arrived(active)
    assert len(active.loads) == 1
