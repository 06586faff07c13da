"""Training memory of every depth method over `additive`: saved bytes, and how far a process really grows.

    python benchmarks/memory.py [--blocks 6 12 24 48] [--methods attnres ...] [--json FILE]

For each method and depth a process of its own builds the model (d=128, 4 heads, T=128, batch 4, float32, vocabulary
256), takes one step so that everything is loaded, and then

    saved bytes   runs a step and counts, between forward and backward, every storage that hooks see saved or an
                  operator holds on its node, once, parameters left out (`verify.saved`), on TWOAXIS_BACKEND
    peak growth   runs another one and reports by how much the peak resident size exceeds the size before it

glibc is told to return freed blocks at once, so that the peak is what lives. Ratios are to `additive` at the same
depth.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

RETURNS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
METHODS = (
    "additive", "attnres", "attnres(block_sublayers=3)", "hyper_connections", "mhc", "ddl", "ddl(value_dim=4)",
    "denseformer", "dca", "muddformer", "delta_attnres",
)  # fmt: skip


def measure(method: str, blocks: int) -> None:
    """In a process of its own: print the two numbers."""
    import torch

    import twoaxis
    from twoaxis.ops import choice
    from twoaxis.verify.saved import saved_bytes

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "d_model": 128, "n_heads": 4}
    model = twoaxis.Decoder(twoaxis.ModelConfig(n_blocks=blocks, depth=method, **sizes))
    tokens = torch.randint(256, (4, 129))
    given, wanted = tokens[:, :-1], tokens[:, 1:].contiguous()
    model.loss(given, wanted).backward()  # gradients exist from here on
    saved = saved_bytes(model, given, wanted, backend=choice.requested())
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    model.loss(given, wanted).backward()
    print(json.dumps({"saved_bytes": saved, "peak_growth_bytes": resident("VmHWM") - before}))


def resident(field: str) -> int:
    """Bytes, by the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return measure(args.one[0], int(args.one[1]))
    rows = []
    for blocks in args.blocks:
        plain: dict[str, int] = {}
        for method in dict.fromkeys(("additive", *args.methods)):
            command = [sys.executable, __file__, "--one", method, str(blocks)]
            done = subprocess.run(
                command, env=os.environ | RETURNS, capture_output=True, text=True, check=True
            )
            found = json.loads(done.stdout.splitlines()[-1])
            plain = plain or found
            ratios = {f"{k} over additive": round(v / plain[k], 3) for k, v in found.items()}
            rows.append({"blocks": blocks, "method": method, **found, **ratios})
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        report = {
            "command": " ".join(["python", "benchmarks/memory.py", *sys.argv[1:]]),
            "machine": platform.machine(), "shape": "d=128, 4 heads, T=128, batch 4, float32, vocabulary 256",
            "backend": os.environ.get("TWOAXIS_BACKEND", "auto"), "allocator": "returns freed blocks at once",
            "rows": rows,
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
