"""Many random walks: ``python -m tests.simulation.long_run --steps 300000 --seed 1000``."""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter

import torch

from tests.simulation.walk import Walk

STEPS_PER_WALK = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=1000, help="of the first walk; the next ones count up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    counts: Counter[str] = Counter()
    began = time.monotonic()
    num_walks = -(-options.steps // STEPS_PER_WALK)
    for seed in range(options.seed, options.seed + num_walks):
        try:
            counts += Walk(seed).run(STEPS_PER_WALK)
        except BaseException:
            print(f"the walk with seed {seed} and {STEPS_PER_WALK} steps failed")
            raise
    print(f"{num_walks} walks, {num_walks * STEPS_PER_WALK:,} steps, {time.monotonic() - began:.0f} s")
    for what, count in sorted(counts.items()):
        print(f"{count:>9,}  {what}")


if __name__ == "__main__":
    main()
