"""How long ``leadout serve`` takes until it is ready, and which process spends how much CPU time on it.

    python -m benchmarks.start_time --runs 5

Each run is preceded by one ``import torch`` in a process of its own: no start is shorter than that. Printed
are the medians, their ratio, and the same as JSON. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict

import psutil

from tests.integration.running_cluster import RunningCluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    arguments = parser.parse_args()
    torch_s, ready_s = [], []
    cpu_s: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.runs):
        torch_s.append(_import_torch())
        began_at = time.monotonic()
        cluster = RunningCluster(prefill=arguments.prefill, decode=arguments.decode)
        ready_s.append(time.monotonic() - began_at)
        for name, pid in {"launcher": cluster.process.pid, **cluster.pids()}.items():
            times = psutil.Process(pid).cpu_times()
            cpu_s[name].append(times.user + times.system)
        cluster.process.send_signal(signal.SIGINT)
        cluster.stop()
    result = {
        "runs": arguments.runs,
        "cores": psutil.cpu_count(),
        "load_average": round(psutil.getloadavg()[0], 2),
        "ready_s": round(statistics.median(ready_s), 2),
        "import_torch_s": round(statistics.median(torch_s), 2),
        "ratio": round(statistics.median(ready_s) / statistics.median(torch_s), 2),
        "cpu_s": {name: round(statistics.median(values), 2) for name, values in cpu_s.items()},
    }
    print(f"ready after {result['ready_s']} s, {result['ratio']} times `import torch`")
    for name, seconds in result["cpu_s"].items():
        print(f"  {name:12} {seconds:6.2f} s of CPU")
    print(json.dumps(result))


def _import_torch() -> float:
    began_at = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began_at


if __name__ == "__main__":
    main()
