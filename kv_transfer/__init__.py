"""Moves KV-cache blocks between workers: transports, the descriptors they use, and the handoff ledger."""
