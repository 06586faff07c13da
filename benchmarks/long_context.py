"""Long context: a model of short windows alone on one row of 8k to 64k tokens, forward and training step.

    python benchmarks/long_context.py [--longest 65536] [--threads 1] [--json FILE]

Two blocks of short_swa (w=64) and an MLP at d=64. For each length: the scores computed (from the block plan, and
how many of them a window needs), the bytes kept for backward, the largest memory of the process, and the seconds
of a forward and of a training step (forward, loss, backward). What counts is how they grow: each column also as
a ratio to the length before. Linear is 2 where the length doubles.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from torch import Tensor

import twoaxis
from twoaxis.ops import visible_pairs
from twoaxis.ops.backends.plan import block_plan

WINDOW, SIZE = 64, {"vocab_size": 256, "d_model": 64, "n_blocks": 2, "n_heads": 2}


def kept_bytes(model: twoaxis.Decoder, tokens: Tensor) -> tuple[int, Tensor]:
    """Bytes that the forward keeps for backward, each storage once, parameters left out; and the loss."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model.loss(tokens, tokens)
    return sum(kept.values()), loss


def row(model: twoaxis.Decoder, length: int) -> dict[str, float]:
    tokens = torch.randint(256, (1, length))
    start = time.process_time()
    with torch.no_grad():
        model(tokens, last=1)
    middle = time.process_time()
    kept, loss = kept_bytes(model, tokens)
    loss.backward()
    end = time.process_time()
    model.zero_grad()
    computed = sum(block.scores for block in block_plan(length, WINDOW))
    return {
        "tokens": length,
        "scores per head": computed,
        "scores / visible pairs": round(computed / visible_pairs(length, WINDOW), 3),
        "kept MiB": round(kept / 2**20, 1),
        "peak MiB of the process": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10),
        "forward cpu s": round(middle - start, 3),
        "step cpu s": round(end - middle, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--longest", type=int, default=65536)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    cfg = twoaxis.ModelConfig(**SIZE, sequence=[f"short_swa(window={WINDOW})", "mlp"])
    model = twoaxis.Decoder(cfg)
    row(model, 1024)  # warm-up
    rows: list[dict[str, float]] = []
    length = args.longest // 8
    while length <= args.longest:
        found = row(model, length)
        for name in ("scores per head", "kept MiB", "forward cpu s", "step cpu s") if rows else ():
            found[f"{name}, ratio"] = round(found[name] / rows[-1][name], 3)
        rows.append(found)
        print(json.dumps(found), flush=True)
        length *= 2
    report = {
        "model": {**SIZE, "sequence": cfg.sequence, "parameters": twoaxis.cost(cfg, 1, 1).parameters},
        "threads": args.threads, "torch": torch.__version__, "rows": rows,
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
