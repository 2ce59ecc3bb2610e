"""Moves KV-cache blocks between workers: transports, the layout planner, and the handoff ledger."""
