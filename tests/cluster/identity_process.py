"""A process that prints its identity and lives until its standard input closes."""

from __future__ import annotations

import sys

from cluster.process_identity import own_process

if __name__ == "__main__":
    print(own_process(), flush=True)
    sys.stdin.read()
