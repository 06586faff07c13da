"""Decoding speed: tokens per second of generate() against others, and what each depth method adds to a step.

    python benchmarks/decoding.py [--rounds 7] [--threads 1] [--prompt 32] [--new 64] [--part both] [--json FILE]

The plain model (d=512, 12 blocks, 8 heads, SwiGLU 1376, vocabulary 8192, tied, float32) decodes greedily at
batch 1 and 8 beside transformers' LlamaForCausalLM.generate() and, where litgpt is installed, litgpt's own
greedy loop, all of the same shape. litgpt and transformers ask for different versions of one library, so it
needs an environment of its own: pip install litgpt torch, then this script there with --part litgpt.

Each row is a pair that runs one after the other in every round of one process, the order turning; the plain
model also runs against itself (A/A). Reported: the median over rounds of (their time / our time), its range,
and our tokens per second. CPU time of the process is the figure to trust on a shared machine. Depth methods
run beside the additive one on the same tokens: their time / additive's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

import twoaxis

SHAPE = {"vocab": 8192, "d": 512, "blocks": 12, "heads": 8, "hidden": 1376}
TINY = {"vocab": 256, "d": 32, "blocks": 3, "heads": 2, "hidden": 48}
VARIANTS = ["attnres(block_sublayers=3)", "ddl(value_dim=4)", "lime(kind='dynamic')"]
Step = Callable[[torch.Tensor], None]


def ours(shape: dict[str, int], new: int, depth: str = "additive") -> Step:
    model = twoaxis.Decoder(
        twoaxis.ModelConfig(
            vocab_size=shape["vocab"], d_model=shape["d"], n_blocks=shape["blocks"], n_heads=shape["heads"],
            sequence=["attention", f"mlp(hidden={shape['hidden']})"], depth=depth,
        )
    ).eval()  # fmt: skip
    return lambda tokens: _check(twoaxis.generate(model, tokens, new), tokens, new)


def llama(shape: dict[str, int], new: int) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape["vocab"], hidden_size=shape["d"], num_hidden_layers=shape["blocks"],
            num_attention_heads=shape["heads"], intermediate_size=shape["hidden"], tie_word_embeddings=True,
            attn_implementation="sdpa", bos_token_id=None, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones(1, 1, dtype=torch.long)
    return lambda tokens: _check(
        model.generate(tokens, attention_mask=mask.expand_as(tokens), **options), tokens, new
    )


def litgpt(shape: dict[str, int], new: int) -> Step:
    """litgpt's GPT and key-value cache, by its documented calls; its generate() takes one row at a time."""
    from litgpt import GPT, Config

    model = GPT(
        Config(
            name="benchmark", block_size=4096, vocab_size=shape["vocab"], padded_vocab_size=shape["vocab"],
            n_layer=shape["blocks"], n_head=shape["heads"], n_embd=shape["d"], bias=False, rotary_percentage=1.0,
            parallel_residual=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
            intermediate_size=shape["hidden"],
        )
    ).eval()  # fmt: skip

    @torch.no_grad()
    def decode(tokens: torch.Tensor) -> None:
        batch, length = tokens.shape
        model.max_seq_length = length + new
        model.set_kv_cache(batch_size=batch)
        unread, at, out = tokens, torch.arange(length), [tokens]
        for i in range(new):
            out.append(model(unread, input_pos=at)[:, -1:].argmax(-1))
            unread, at = out[-1], torch.tensor([length + i])
        model.clear_kv_cache()
        _check(torch.cat(out, 1), tokens, new)

    return decode


def _check(made: torch.Tensor, tokens: torch.Tensor, new: int) -> None:
    if made.shape != (len(tokens), tokens.shape[1] + new):
        raise RuntimeError(f"made {tuple(made.shape)} from {tuple(tokens.shape)} and {new} new tokens")


def seconds(step: Step, tokens: torch.Tensor) -> tuple[float, float]:
    """CPU and wall seconds of decoding once."""
    cpu, wall = time.process_time(), time.perf_counter()
    step(tokens)
    return time.process_time() - cpu, time.perf_counter() - wall


def compare(
    label: str, other: Step, plain: Step, tokens: torch.Tensor, rounds: int, new: int
) -> dict[str, object]:
    """One row: the other's time over ours, in interleaved rounds; round 0 warms up."""
    times: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for number in range(rounds + 1):
        if number % 2:
            b = seconds(plain, tokens)
            a = seconds(other, tokens)
        else:
            a = seconds(other, tokens)
            b = seconds(plain, tokens)
        if number:
            times.append((a, b))
    row: dict[str, object] = {"row": label, "batch": len(tokens)}
    for index, kind in enumerate(("cpu", "wall")):
        ratios = [a[index] / b[index] for a, b in times]
        row[f"{kind} ratio"] = [round(f(ratios), 3) for f in (statistics.median, min, max)]
    ours_seconds = statistics.median(b[0] for _, b in times)
    row["additive tokens per cpu second"] = round(new * len(tokens) / ours_seconds, 1)
    print(json.dumps(row), flush=True)
    return row


def depths() -> list[str]:
    """Every depth method that takes plain blocks, with its defaults, and some variants."""
    return [
        d
        for d in (*twoaxis.methods("depth"), *VARIANTS)
        if d != "additive" and d.split("(")[0] in twoaxis.methods("depth")
    ]


def rows(args: argparse.Namespace, shape: dict[str, int]) -> list[dict[str, object]]:
    found, new = [], args.new
    for batch in (1, 8):
        tokens = torch.randint(0, shape["vocab"], (batch, args.prompt))
        plain = ours(shape, new)
        others: dict[str, Step] = {"A/A": ours(shape, new)}
        if args.part in ("both", "peers") and find_spec("transformers"):
            others["transformers / twoaxis"] = llama(shape, new)
        if args.part in ("both", "peers", "litgpt") and find_spec("litgpt"):
            others["litgpt / twoaxis"] = litgpt(shape, new)
        for label, step in others.items():
            found.append(compare(label, step, plain, tokens, args.rounds, new))
        if args.part in ("both", "depths"):
            for depth in depths():
                step = ours(shape, new, depth)
                found.append(compare(f"{depth} / additive", step, plain, tokens, args.rounds, new))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--part", choices=["both", "peers", "litgpt", "depths"], default="both")
    parser.add_argument("--tiny", action="store_true", help="a toy size, to see that the script runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = TINY if args.tiny else SHAPE
    report = {
        "shape": shape, "prompt": args.prompt, "new": args.new, "rounds": args.rounds, "threads": args.threads,
        "torch": torch.__version__, "ratios are": "median, min, max of rounds", "rows": rows(args, shape),
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
