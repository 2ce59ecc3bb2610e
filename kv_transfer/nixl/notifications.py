"""Notifications as they travel over NIXL: one byte that tells payloads from wake-ups, then the payload."""

from __future__ import annotations

from typing import Any

from kv_transfer.nixl.agent import agent_name_of

_WAKE_UP, _PAYLOAD = b"\x00", b"\x01"


def send_wake_up(agent: Any, agent_name: str) -> None:
    """Make an idle peer poll often enough to be connected to: whatever arrives does that."""
    agent.send_notif(agent_name, _WAKE_UP)


def send_payload(agent: Any, agent_name: str, payload: bytes) -> None:
    """Hand a notification to the network. Raises what NIXL raises."""
    agent.send_notif(agent_name, _PAYLOAD + payload)


def receive_payloads(agent: Any) -> dict[str, list[bytes]]:
    """Progress the network once. What has arrived by sender; an empty list where that was a wake-up."""
    arrived: dict[str | bytes, list[bytes]] = agent.get_new_notifs()
    return {
        agent_name_of(sender): [message[1:] for message in messages if message[:1] == _PAYLOAD]
        for sender, messages in arrived.items()
    }
