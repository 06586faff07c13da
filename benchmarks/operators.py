"""Operators against their plain forms, torch's own kernels and the machine's copy limit.

    python benchmarks/operators.py [--rounds 5] [--only limits depth known token_mix gated streams sums window
        full linear adamw]
        [--tokens 2048 8192] [--dtype float32] [--threads 1 2] [--json FILE] [--table]

In every round each contender runs once, in turning order, the first one twice (the A/A row); a warm-up round does not
count. Reported: the median over rounds of the time, and of its ratio to that of the first contender in the same round,
with the range. The time is the process's CPU time with one thread; with `--threads 1 2` also the wall time with two.
The file is written after each case and keeps the cases that an earlier run of the same dtype has put there (a file of
another dtype is refused); --table measures nothing and prints it. Packages that are not installed are noted as
"left out" of a case. glibc is told to keep memory, for all contenders (the script starts itself again with
MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ raised); otherwise page faults of fresh tensors hide the arithmetic.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gated_cases import gated
from mix_cases import token_mixes
from operator_cases import Run, cases
from packages import still_left_out
from stream_cases import passes
from update_cases import updates

from twoaxis.model import write_atomically

KEEP = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
}
USUAL = ["limits", "depth", "streams", "sums", "window", "full"]
KINDS = [*USUAL, "known", "token_mix", "gated", "linear", "adamw"]
CLOCKS = {1: ("CPU time, one thread", time.process_time), 2: ("wall time, two threads", time.perf_counter)}


def measure(
    given: dict[str, Run | None], rounds: int, clock: Callable[[], float]
) -> dict[str, dict[str, object]]:
    """Of each contender that is there: the median in ms, and of its ratios to the first one."""
    runs = {name: run for name, run in given.items() if run is not None}
    first = next(iter(runs))
    runs[f"{first} again"] = runs[first]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):  # round 0 warms up
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            start = clock()
            runs[name]()
            if number:
                times[name].append(clock() - start)
    rows = {}
    for name, found in times.items():
        ratios = [a / b for a, b in zip(found, times[first], strict=True)]
        spread = [round(f(ratios), 2) for f in (statistics.median, min, max)]
        rows[name] = {"ms": round(statistics.median(found) * 1e3, 2), f"over {first}": spread}
    return rows


def table(report: dict[str, Any]) -> str:
    """A file's cases as rows: what the first contender takes, and the others over it; of a limit, its share."""
    clocks = [
        label for label, _ in CLOCKS.values() if any(label in case for case in report["cases"].values())
    ]
    lines = ["| | " + " | ".join(f"{c}: ours, ms | over ours" for c in clocks) + " | load |"]
    lines.append("|---" * (2 * len(clocks) + 2) + "|")
    for name, case in report["cases"].items():
        cells = [name]
        for clock in clocks:
            rows = case.get(clock, {})
            first = next(iter(rows), None)
            others = [_over(who, row, f"over {first}") for who, row in rows.items() if who != first]
            others += [f"{who} not installed" for who in case.get("left out", []) if first]
            cells += [str(rows[first]["ms"]) if first else "", ", ".join(others)]
        load = f"{case['load']:.0f}" if "load" in case else ""
        lines.append("| " + " | ".join([*cells, load]) + " |")
    return "\n".join(lines)


def _over(who: str, row: dict[str, Any], key: str) -> str:
    """The median; the range too of the first contender run again, which is the noise."""
    median, least, largest = row[key]
    return (
        f"again {median:.2f} ({least:.2f} to {largest:.2f})"
        if who.endswith(" again")
        else f"{who} {median:.2f}"
    )


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
    parser.add_argument("--only", nargs="+", choices=KINDS, default=USUAL)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[2048, 8192], help="lengths of the window's rows"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, nargs="+", choices=sorted(CLOCKS), default=[1])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true", help="print the file of --json as Markdown")
    args = parser.parse_args()
    if args.table:
        if args.json is None or not args.json.is_file():
            parser.error("--table prints the file that --json names: name one that is there")
        print(table(json.loads(args.json.read_text())))
        return
    wanted = KEEP | {"OMP_NUM_THREADS": str(max(args.threads))}
    if any(os.environ.get(k) != v for k, v in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)
    torch.manual_seed(0)
    command = " ".join(["python", "benchmarks/operators.py", *sys.argv[1:]])
    report = {
        "processor": processor(), "torch": torch.__version__, "kernels": torch.backends.cpu.get_cpu_capability(),
        "allocator": "glibc keeps memory: MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ raised, for all",
        "dtype": args.dtype, "ratios are": "median, min, max", "cases": {},
    }  # fmt: skip
    if args.json and args.json.exists():
        before = json.loads(args.json.read_text())
        if before["dtype"] != args.dtype:
            parser.error(
                f"{args.json} has cases of {before['dtype']}, not of {args.dtype}: name another file"
            )
        report["cases"] = before["cases"]
    dtype = getattr(torch, args.dtype)
    of_updates = updates(dtype) if "adamw" in args.only else ()
    of_gates = gated(dtype) if "gated" in args.only else ()
    of_mixes = token_mixes(dtype) if "token_mix" in args.only else ()
    of_streams = passes(dtype) if "streams" in args.only else ()
    chained = itertools.chain(
        cases(args.only, args.tokens, dtype), of_streams, of_gates, of_mixes, of_updates
    )
    for name, runs in chained:
        case: dict[str, object] = {"command": command, "rounds": args.rounds, "load": os.getloadavg()[0]}
        case |= still_left_out(list(runs), [name for name, run in runs.items() if run is not None])
        for threads in args.threads:
            label, clock = CLOCKS[threads]
            torch.set_num_threads(threads)
            case[label] = measure(runs, args.rounds, clock)
        report["cases"][name] = case  # type: ignore[index]
        print(name, json.dumps(case, indent=1), flush=True)
        if args.json:
            write_atomically(args.json, (json.dumps(report, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
