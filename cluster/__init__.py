"""What all processes agree on: configuration, messages, RPC, registry, block hashes, telemetry."""
