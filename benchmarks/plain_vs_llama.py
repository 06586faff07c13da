"""Training steps of a plain twoaxis model against Hugging Face's LlamaForCausalLM of the same shape.

    python benchmarks/plain_vs_llama.py [--rounds 5] [--threads 1] [--batch 4] [--seq-len 512]
                                       [--precision both] [--json FILE]

d=512, 12 blocks, 8 heads, SwiGLU 1376, vocabulary 8192 (tied), T=512; float32 and bf16 autocast. Both models, the
twoaxis model a second time (A/A) and one with TWOAXIS_BACKEND=plain run one step after the other in every round of one
process; the order turns every round. A step is forward, loss, backward and fused AdamW. CPU time of the process is the
figure to trust on a shared machine; wall time stands beside it. Reported: median over rounds of (Llama's time / ours),
and the range. glibc is told to keep memory, for all (the script starts itself again with its variables raised).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from operators import KEEP, processor
from transformers import LlamaConfig, LlamaForCausalLM

import twoaxis
from twoaxis.ops import choice

SHAPE = {"vocab": 8192, "d": 512, "blocks": 12, "heads": 8, "hidden": 1376}


def ours() -> torch.nn.Module:
    return twoaxis.Decoder(
        twoaxis.ModelConfig(
            vocab_size=SHAPE["vocab"], d_model=SHAPE["d"], n_blocks=SHAPE["blocks"], n_heads=SHAPE["heads"],
            sequence=["attention", f"mlp(hidden={SHAPE['hidden']})"],
        )
    )  # fmt: skip


def llama() -> torch.nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SHAPE["vocab"], hidden_size=SHAPE["d"], num_hidden_layers=SHAPE["blocks"],
            num_attention_heads=SHAPE["heads"], intermediate_size=SHAPE["hidden"], tie_word_embeddings=True,
            attn_implementation="sdpa", use_cache=False,
        )
    )  # fmt: skip


def stepper(
    model: torch.nn.Module, is_llama: bool, tokens: torch.Tensor, autocast: bool, backend: str = "auto"
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100

    def step() -> None:
        with choice.requesting(backend):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(tokens, labels=tokens).loss if is_llama else model.loss(tokens, targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(autocast: bool, rounds: int, batch: int, seq_len: int) -> dict[str, object]:
    torch.manual_seed(0)
    tokens = torch.randint(0, SHAPE["vocab"], (batch, seq_len))
    steps = {
        "llama": stepper(llama(), True, tokens, autocast),
        "twoaxis": stepper(ours(), False, tokens, autocast),
        "twoaxis again": stepper(ours(), False, tokens, autocast),
        "plain": stepper(ours(), False, tokens, autocast, "plain"),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(rounds + 1):  # round 0 warms up
        order = list(steps) if number % 2 else list(steps)[::-1]
        for name in order:
            gc.collect()
            cpu, wall = time.process_time(), time.perf_counter()
            steps[name]()
            if number:
                times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    row: dict[str, object] = {
        "precision": "bf16 autocast" if autocast else "float32",
        "batch": batch,
        "seq_len": seq_len,
    }
    for kind, index in (("cpu", 0), ("wall", 1)):
        for label, top, bottom in (
            ("llama/twoaxis", "llama", "twoaxis"),
            ("llama/plain backend", "llama", "plain"),
            ("A/A", "twoaxis again", "twoaxis"),
        ):
            ratios = [a[index] / b[index] for a, b in zip(times[top], times[bottom], strict=True)]
            row[f"{label} {kind}"] = [round(f(ratios), 3) for f in (statistics.median, min, max)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512, help="fewer where bf16 products are slow")
    parser.add_argument("--precision", choices=["float32", "autocast", "both"], default="both")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if any(os.environ.get(k) != v for k, v in KEEP.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP)
    torch.set_num_threads(args.threads)
    wanted = {"float32": [False], "autocast": [True], "both": [False, True]}[args.precision]
    rows = [measure(autocast, args.rounds, args.batch, args.seq_len) for autocast in wanted]
    report = {
        "shape": SHAPE, "rounds": args.rounds, "threads": args.threads, "torch": torch.__version__,
        "transformers": transformers.__version__, "machine": platform.machine(), "processor": processor(),
        "command": " ".join(["python", "benchmarks/plain_vs_llama.py", *sys.argv[1:]]), "load": os.getloadavg()[0],
        "ratios are": "median, min, max",
        "rows": rows,
    }  # fmt: skip
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
