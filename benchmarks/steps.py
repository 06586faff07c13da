"""Whole training steps: every depth method against our additive model and against Hugging Face's plain Llama.

    MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000 OMP_NUM_THREADS=1 \\
        python benchmarks/steps.py [--rows METHOD ...] [--llama] [--peers] [--blocks 12] [--width 512] [--batch 1] \\
        [--seq-len 512] [--precision bf16] [--rounds 5] \\
        [--code TEXT] --json FILE

A step is forward, loss, backward and fused AdamW. All models of a group stay in memory and run one step each in every
round of one process; the order turns every round and the first round is thrown away. Every group has the additive
model twice (A/A), with --llama LlamaForCausalLM of the same shape, and with --peers x-transformers' plain model and
its own form of each method that it has. CPU time of one thread; medians over rounds of
ratios within a round, and their range. The file is written after each group. A table in it is of one shape, code and
TWOAXIS_BACKEND: rows go to the one of this run, in place of its rows of the same name, and all others stay. --code
says what is measured, by default the commit. --peers without x-transformers is noted as "left out".
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from packages import still_left_out
from peers import peers

import twoaxis
from twoaxis.model import write_atomically
from twoaxis.ops import choice

NAMED = [  # beside every registered method with its defaults
    "attnres(block_sublayers=3)",
    "ddl(value_dim=4)",
    "dca(k=2)",
    "depth_window(window_blocks=2)",
]
Step = Callable[[], None]


def ours(depth: str, args: argparse.Namespace) -> torch.nn.Module:
    hidden = f"mlp(hidden={args.hidden})" if args.hidden else "mlp"
    return twoaxis.Decoder(
        twoaxis.ModelConfig(
            vocab_size=args.vocab,
            d_model=args.width,
            n_blocks=args.blocks,
            n_heads=args.heads,
            depth=depth,
            sequence=["attention", hidden],
        )
    )


def llama(args: argparse.Namespace) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocab,
            hidden_size=args.width,
            num_hidden_layers=args.blocks,
            num_attention_heads=args.heads,
            intermediate_size=args.hidden,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )


def stepper(model: torch.nn.Module, tokens: torch.Tensor, bf16: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            ours = hasattr(model, "loss")
            loss = model.loss(tokens, targets) if ours else model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rounds_of(steps: dict[str, Step], rounds: int) -> list[dict[str, float]]:
    """CPU seconds of each step in each round but the first."""
    found = []
    for number in range(rounds + 1):
        seconds = {}
        for name in list(steps)[:: 1 if number % 2 else -1]:
            gc.collect()
            start = time.process_time()
            steps[name]()
            seconds[name] = time.process_time() - start
        found.append(seconds)
    return found[1:]


def group_rows(names: list[str], args: argparse.Namespace) -> list[dict]:
    torch.manual_seed(0)
    tokens = torch.randint(0, args.vocab, (args.batch, args.seq_len))
    bf16 = args.precision == "bf16"
    models = {"additive": ours("additive", args), "additive, again": ours("additive", args)}
    models |= {"llama": llama(args)} if args.llama else {}
    models |= {name: ours(name, args) for name in names}
    models |= peers(names, args) if args.peers else {}
    seen = rounds_of({n: stepper(m, tokens, bf16) for n, m in models.items()}, args.rounds)
    rows = []
    for name in models:
        row: dict[str, object] = {"method": name, "group": names}
        bases = {"over additive": "additive", "share of llama": "llama"}
        if name.startswith("x-"):
            bases["over x-transformers"] = "x-transformers"
        for label, base in bases.items():
            if base in models and name != base:
                ratios = [s[name] / s[base] for s in seen]
                row[label] = [round(f(ratios), 3) for f in (median, min, max)]
        rows.append(row)
    return rows


def commit() -> str:
    """That of the checkout; outside of one the package's version."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return twoaxis.__version__


def table_of(tables: list[dict], settings: dict[str, object]) -> dict:
    """The first table of these settings; a new one, the last, if there is none."""
    for table in tables:
        if all(table.get(name) == value for name, value in settings.items()):
            return table
    tables.append({**settings, "rows": []})
    return tables[-1]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [n for n in twoaxis.methods("depth") if n != "additive"] + NAMED
    parser.add_argument("--rows", nargs="+", default=every, help="specs; by default every registered method")
    parser.add_argument("--llama", action="store_true")
    parser.add_argument("--peers", action="store_true")
    for name, value in (("blocks", 12), ("width", 512), ("heads", 8), ("hidden", 1376), ("vocab", 8192),
                        ("batch", 1), ("seq-len", 512), ("rounds", 5), ("group", 9), ("threads", 1)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", choices=["float32", "bf16"], default="bf16")
    parser.add_argument("--code", default=commit(), help="what is measured, such as a commit")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    others = ("rows", "json", "group", "llama", "peers", "rounds", "code")
    shape = {k: v for k, v in vars(args).items() if k not in others}
    tables = json.loads(args.json.read_text())["tables"] if args.json.exists() else []
    mine = table_of(tables, {"shape": shape, "code": args.code, "backend": choice.requested()})
    asked = mine.pop("left out", []) + ["x-transformers"] * args.peers
    for start in range(0, len(args.rows), args.group):
        names = args.rows[start : start + args.group]
        fresh = [{**row, "rounds": args.rounds} for row in group_rows(names, args)]
        mine["rows"] = [r for r in mine["rows"] if r["method"] not in names and r["group"] != names] + fresh
        mine.update(still_left_out(asked, [row["method"] for row in mine["rows"]]))
        report = {"torch": torch.__version__, "ratios are": "median, min, max", "tables": tables}
        write_atomically(args.json, (json.dumps(report, indent=1) + "\n").encode())
        for row in fresh:
            print(
                row["method"],
                {k: v for k, v in row.items() if isinstance(v, list) and k != "group"},
                flush=True,
            )


if __name__ == "__main__":
    main()
