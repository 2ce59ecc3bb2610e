"""Paged KV cache bookkeeping: which block belongs to whom, and which prefix it holds. No tensors here."""
