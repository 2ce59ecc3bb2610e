"""KV transfer over NIXL."""
