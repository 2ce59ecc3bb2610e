"""Runs prompts through an engine and streams their KV cache to a decode worker as chunks complete."""
