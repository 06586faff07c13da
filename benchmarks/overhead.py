"""What every registered depth method adds to a training step of `additive`: time, saved bytes, peak memory.

    python benchmarks/overhead.py --json benchmarks/overhead.json [--methods ...] [--blocks 6 12 24 48] [--rounds N]
    python benchmarks/overhead.py --json benchmarks/overhead.json --table

d=128, 4 heads, T=128, batch 4, float32, vocabulary 256. Time: groups of models in one process, every model one step
(forward, loss, backward, fused AdamW) in each round, in turning order, with `additive` twice (A/A); CPU time of one
thread, the ratio to `additive` of the same round, median and range; 7, 5, 5 and 3 rounds by depth; glibc keeps
memory. Memory: a process for each row, see `memory.py`; glibc gives it back.

The file is written after each row, and rows that it has are not run again: stop and start as you like. A method that
registers itself joins. --table prints the rows as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

KEEP = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "OMP_NUM_THREADS": "1",
}
SHAPE = {
    "width": 128,
    "heads": 4,
    "seq_len": 128,
    "batch": 4,
    "precision": "float32",
    "vocab": 256,
    "hidden": 0,
}
ROUNDS = {6: 7, 12: 5, 24: 5, 48: 3}
Rows = dict[str, dict[str, Any]]  # "blocks method": what was measured


def settings() -> dict[str, Any]:
    """What all rows of a file share."""
    import torch

    backend = os.environ.get("TWOAXIS_BACKEND", "auto")
    return {"shape": SHAPE, "torch": torch.__version__, "backend": backend}


def rows_of(path: Path) -> Rows:
    """Those of the file, if there is one; one of other settings is refused."""
    if not path.exists():
        return {}
    report = json.loads(path.read_text())
    other = [f"{k} {report.get(k)}, not {v}" for k, v in settings().items() if report.get(k) != v]
    if other:
        sys.exit(f"{path} has rows of {'; '.join(other)}: name another file")
    rows: Rows = report["rows"]
    return rows


def write(path: Path, rows: Rows) -> None:
    """The whole file anew, at once."""
    from twoaxis.model import write_atomically

    report = {
        "command": "python benchmarks/overhead.py --json FILE", **settings(),
        "ratios are": "to additive: median, min, max", "rows": rows,
    }  # fmt: skip
    write_atomically(path, (json.dumps(report, indent=1) + "\n").encode())


def time_group(path: Path, rows: Rows, blocks: int, methods: list[str], rounds: int) -> None:
    """Rows of methods that take turns with `additive` and with another `additive`."""
    from steps import group_rows

    args = SimpleNamespace(**SHAPE, blocks=blocks, rounds=rounds, llama=False, peers=False)
    again, *found = group_rows(methods, args)[1:]
    load = os.getloadavg()[0]
    for row in found:
        rows.setdefault(f"{blocks} {row['method']}", {}).update(
            {
                "time": row["over additive"],
                "A/A": again["over additive"],
                "rounds": rounds,
                "load": round(load, 1),
            }
        )
        print(blocks, row["method"], row["over additive"], "A/A", again["over additive"], flush=True)
    write(path, rows)


def memory_of(blocks: int, method: str) -> dict[str, int]:
    """In a process of its own."""
    from memory import RETURNS

    command = [sys.executable, str(Path(__file__).with_name("memory.py")), "--one", method, str(blocks)]
    done = subprocess.run(command, env=os.environ | RETURNS, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(path: Path, blocks: int, methods: list[str], rounds: int, group: int) -> None:
    """What the file lacks at this depth."""
    rows = rows_of(path)
    for start in range(0, len(methods), group):
        wanted = [m for m in methods[start : start + group] if "time" not in rows.get(f"{blocks} {m}", {})]
        if wanted:
            time_group(path, rows, blocks, wanted, rounds)
    for method in ["additive", *methods]:
        row = rows.setdefault(f"{blocks} {method}", {})
        if "bytes" not in row:
            row["bytes"] = memory_of(blocks, method)
            write(path, rows)
        plain = rows[f"{blocks} additive"]["bytes"]
        row["memory"] = {name: round(n / plain[name], 3) for name, n in row["bytes"].items()}
        print(blocks, method, row["memory"], flush=True)
    write(path, rows)


def table(rows: Rows) -> str:
    """Markdown: a line for each method; time, saved bytes and peak memory over `additive` at each depth."""
    depths = sorted({int(key.split(" ")[0]) for key in rows})
    methods = dict.fromkeys(key.split(" ", 1)[1] for key in rows)
    lines = [
        "| method | " + " | ".join(f"{d} blocks" for d in depths) + " |",
        "|---" * (len(depths) + 1) + "|",
    ]
    for method in methods:
        cells = [cell(rows.get(f"{d} {method}", {})) for d in depths]
        if method != "additive":
            lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    again = [
        f"{d}: {min(r['A/A'][0] for r in timed)} to {max(r['A/A'][0] for r in timed)}"
        for d in depths
        if (timed := [r for key, r in rows.items() if key.startswith(f"{d} ") and "A/A" in r])
    ]
    return "\n".join([*lines, "", "A/A by depth: " + "; ".join(again)])


def cell(row: dict[str, Any]) -> str:
    """Time (its range); saved bytes, peak."""
    time = "**{:.2f}** ({:.2f} to {:.2f})".format(*row["time"]) if "time" in row else "-"
    memory = row.get("memory", {})
    parts = [f"{memory[n]:.2f}" if n in memory else "-" for n in ("saved_bytes", "peak_growth_bytes")]
    return f"{time}; {', '.join(parts)}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="only print what the file has")
    parser.add_argument(
        "--methods", nargs="+", help="specs; by default every registered method and a few options"
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=list(ROUNDS))
    parser.add_argument("--rounds", type=int, help="by default fewer the deeper")
    parser.add_argument("--group", type=int, default=6, help="methods timed together")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.table:
        return print(table(json.loads(args.json.read_text())["rows"]))
    if any(os.environ.get(k) != v for k, v in KEEP.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP)
    import torch
    from steps import NAMED

    import twoaxis

    torch.set_num_threads(1)
    every = [m for m in twoaxis.methods("depth") if m != "additive"] + [*NAMED, "attnres(block_sublayers=12)"]
    for blocks in args.blocks:
        rounds = args.rounds or ROUNDS.get(blocks, 3)
        measure(args.json, blocks, args.methods or every, rounds, args.group)
    return None


if __name__ == "__main__":
    main()
