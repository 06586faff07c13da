"""Operators against their plain forms, torch's own kernels and the machine's copy limit.

    python benchmarks/operators.py [--rounds 5] [--only depth streams sums window full linear] [--tokens 2048 8192]
        [--dtype float32] [--json FILE]

One thread. In every round each contender runs once, in turning order, the first one twice (the A/A row); a warm-up
round does not count. Reported: the median over rounds of CPU time, and of its ratio to that of the first contender in
the same round, with the range. glibc is told to keep memory, for all contenders (the script starts itself again with
MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ raised); otherwise page faults of fresh tensors hide the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from operator_cases import Run, cases

KEEP = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "OMP_NUM_THREADS": "1",
}


def measure(runs: dict[str, Run], rounds: int) -> dict[str, dict[str, object]]:
    first = next(iter(runs))
    runs = {**runs, f"{first} again": runs[first]}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):  # round 0 warms up
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            start = time.process_time()
            runs[name]()
            if number:
                times[name].append(time.process_time() - start)
    rows = {}
    for name, found in times.items():
        ratios = [a / b for a, b in zip(found, times[first], strict=True)]
        spread = [round(f(ratios), 2) for f in (statistics.median, min, max)]
        rows[name] = {"ms": round(statistics.median(found) * 1e3, 2), f"over {first}": spread}
    return rows


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["depth", "streams", "sums", "window", "full"])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[2048, 8192], help="lengths of the window's rows"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if any(os.environ.get(k) != v for k, v in KEEP.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = {
        "command": " ".join(["python", "benchmarks/operators.py", *sys.argv[1:]]),
        "processor": processor(), "torch": torch.__version__, "kernels": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg(), "allocator": "keeps memory", "threads": 1, "time": "CPU time of the process",
        "rounds": args.rounds, "dtype": args.dtype, "ratios are": "median, min, max", "cases": {},
    }  # fmt: skip
    for name, runs in cases(args.only, args.tokens, getattr(torch, args.dtype)):
        report["cases"][name] = measure(runs, args.rounds)  # type: ignore[index]
        print(name, json.dumps(report["cases"][name], indent=1), flush=True)  # type: ignore[index]
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
