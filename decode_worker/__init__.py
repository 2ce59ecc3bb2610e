"""Reserves KV blocks, receives the prompt's KV cache, and generates the answer."""
