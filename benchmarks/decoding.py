"""Decoding speed: tokens per second of generate() against others, and what each depth method adds to a step.

    python benchmarks/decoding.py [--part peers|depths|both] [--only NAME ...] [--batch 1 8] [--rounds 5] [--new 32]
                                  [--litgpt PYTHON] [--json FILE]

The plain model (d=512, 12 blocks, 8 heads, SwiGLU 1376, vocabulary 8192, tied, float32) decodes greedily beside
transformers' LlamaForCausalLM.generate() and litgpt's own greedy loop, all of the same shape; depth methods
decode beside the additive one. litgpt and transformers ask for different versions of one library, so --litgpt
takes the Python of an environment that has litgpt and runs it there, as a process that takes turns with this one.

A round runs every row once, one after the other, there and back in turn; a row's figure is the median over rounds
of (its seconds / the plain model's in the same round), with quartiles. Seconds are CPU time of the one thread that
computes, which other jobs on the machine disturb least (not at all is impossible: they share its caches). The
plain model also runs as a row (A/A). --json adds to the rows of a file, so that it can be made in pieces: a row is
replaced by one of the same name, batch and settings (shape, prompt, new, torch); a row names those of its own in which
it differs from the file. Peers that are not installed are noted as "left out".
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packages import installed, say_left_out, still_left_out

SHAPE = {"vocab": 8192, "d": 512, "blocks": 12, "heads": 8, "hidden": 1376}
TINY = {"vocab": 256, "d": 32, "blocks": 3, "heads": 2, "hidden": 48}
VARIANTS = ["attnres(block_sublayers=3)", "ddl(value_dim=4)", "lime(kind='dynamic')"]
PEERS = ["transformers / twoaxis", "litgpt / twoaxis"]
SETTINGS = ("shape", "prompt", "new", "torch")
TOGETHER = 4  # models in memory beside the plain one
Step = Callable[[], float]  # decodes once; CPU seconds


def timed(decode: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, new: int) -> Step:
    def step() -> float:
        start = time.thread_time()
        made = decode(tokens)
        spent = time.thread_time() - start
        if made.shape != (len(tokens), tokens.shape[1] + new):
            raise RuntimeError(f"made {tuple(made.shape)} from {tuple(tokens.shape)} and {new} new tokens")
        return spent

    return step


def ours(shape: dict[str, int], tokens: torch.Tensor, new: int, depth: str = "additive") -> Step:
    import twoaxis

    model = twoaxis.Decoder(
        twoaxis.ModelConfig(
            vocab_size=shape["vocab"], d_model=shape["d"], n_blocks=shape["blocks"], n_heads=shape["heads"],
            sequence=["attention", f"mlp(hidden={shape['hidden']})"], depth=depth,
        )
    ).eval()  # fmt: skip
    return timed(lambda x: twoaxis.generate(model, x, new), tokens, new)


def llama(shape: dict[str, int], tokens: torch.Tensor, new: int) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape["vocab"], hidden_size=shape["d"], num_hidden_layers=shape["blocks"],
            num_attention_heads=shape["heads"], intermediate_size=shape["hidden"], tie_word_embeddings=True,
            attn_implementation="sdpa", bos_token_id=None, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(tokens)
    return timed(lambda x: model.generate(x, attention_mask=mask, **options), tokens, new)


def litgpt(shape: dict[str, int], tokens: torch.Tensor, new: int) -> Step:
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
    def decode(tokens: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        model.max_seq_length = length + new
        model.set_kv_cache(batch_size=batch)
        unread, at, out = tokens, torch.arange(length), [tokens]
        for i in range(new):
            out.append(model(unread, input_pos=at)[:, -1:].argmax(-1))
            unread, at = out[-1], torch.tensor([length + i])
        model.clear_kv_cache()
        return torch.cat(out, 1)

    return timed(decode, tokens, new)


def elsewhere(python: str, args: argparse.Namespace, batch: int) -> Step:
    """litgpt in a process of its own, which decodes when it is asked to and answers with its seconds."""
    command = [python, __file__, "--serve", "--batch", str(batch), "--prompt", str(args.prompt)]
    command += ["--new", str(args.new), *(["--tiny"] if args.tiny else [])]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step() -> float:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("go\n")
        child.stdin.flush()
        return float(child.stdout.readline())

    return step


def serve(shape: dict[str, int], args: argparse.Namespace) -> None:
    tokens = torch.randint(0, shape["vocab"], (args.batch[0], args.prompt))
    step = litgpt(shape, tokens, args.new)
    for _ in sys.stdin:
        print(step(), flush=True)


def race(steps: dict[str, Step], batch: int, rounds: int, new: int) -> list[dict[str, Any]]:
    """A row for each step but the first, the plain model; round 0 warms up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name in list(steps) if number % 2 else reversed(list(steps)):
            spent = steps[name]()
            if number:
                times[name].append(spent)
    plain = next(iter(times.values()))
    rows = []
    for name, own in list(times.items())[1:]:
        low, middle, high = statistics.quantiles([a / b for a, b in zip(own, plain, strict=True)], n=4)
        rows.append(
            {
                "row": name, "batch": batch, "ratio": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)],
                "rounds": rounds, "tokens per cpu second": round(new * batch / statistics.median(own), 1),
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def depths(only: list[str]) -> list[str]:
    """Every depth method that takes plain blocks, with its defaults, and some variants."""
    import twoaxis

    found = [*twoaxis.methods("depth"), *VARIANTS]
    return [d for d in found if d != "additive" and (not only or d in only)]


def rows(args: argparse.Namespace, shape: dict[str, int]) -> list[dict[str, Any]]:
    found = []
    for batch in args.batch:
        tokens = torch.randint(0, shape["vocab"], (batch, args.prompt))
        plain = ours(shape, tokens, args.new)
        if args.part in ("both", "peers"):
            steps = {"plain": plain, "A/A": ours(shape, tokens, args.new)}
            if installed("transformers"):
                steps["transformers / twoaxis"] = llama(shape, tokens, args.new)
            if args.litgpt:
                steps["litgpt / twoaxis"] = elsewhere(args.litgpt, args, batch)
            else:
                say_left_out("litgpt", "give --litgpt the Python of an environment that has it")
            found += race(steps, batch, args.rounds, args.new)
        if args.part in ("both", "depths"):
            names = depths(args.only)
            for some in (names[i : i + TOGETHER] for i in range(0, len(names), TOGETHER)):
                steps = {f"{d} / additive": ours(shape, tokens, args.new, d) for d in some}
                found += race({"plain": plain, **steps}, batch, args.rounds, args.new)
    return found


def label(row: dict[str, Any]) -> str:
    return f"{row['row']}, batch {row['batch']}"


def write(file: Path, report: dict[str, Any]) -> None:
    """The report's rows after those of the file that it does not have anew."""
    before = json.loads(file.read_text()) if file.exists() else {**report, "rows": []}
    own = {name: report[name] for name in SETTINGS if before.get(name) != report[name]}
    fresh = [{**row, **own} for row in report["rows"]]

    def identity(row: dict[str, Any]) -> list[Any]:
        return [row["row"], row["batch"], *(row.get(name, before.get(name)) for name in SETTINGS)]

    from twoaxis.model import write_atomically

    new = [identity(row) for row in fresh]
    rows = [*(row for row in before["rows"] if identity(row) not in new), *fresh]
    asked = before.pop("left out", []) + report.get("left out", [])
    written = {**before, **still_left_out(asked, list(map(label, rows))), "rows": rows}
    write_atomically(file, (json.dumps(written, indent=1) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--part", choices=["both", "peers", "depths"], default="both")
    parser.add_argument("--only", nargs="+", default=[], help="these depth methods alone")
    parser.add_argument("--litgpt", metavar="PYTHON", help="the Python of an environment with litgpt")
    parser.add_argument("--tiny", action="store_true", help="a toy size, to see that the script runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = TINY if args.tiny else SHAPE
    if args.serve:
        serve(shape, args)
        return
    report: dict[str, Any] = {
        "shape": shape, "prompt": args.prompt, "new": args.new, "threads": 1, "torch": torch.__version__,
        "ratio": "CPU seconds over the plain model's in the same round, median and quartiles of rounds",
        "rows": rows(args, shape),
    }  # fmt: skip
    if args.part != "depths":
        peers = [label({"row": name, "batch": batch}) for batch in args.batch for name in PEERS]
        report |= still_left_out(peers, list(map(label, report["rows"])))
    if args.json:
        write(args.json, report)


if __name__ == "__main__":
    main()
