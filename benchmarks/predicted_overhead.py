"""Predicted against measured: what every method adds to a training step over the standard model's.

    python benchmarks/predicted_overhead.py [--backend plain native] [--blocks 6 24] [--rounds 7]

Measured: forward and backward of one small batch, one thread, CPU time of the process (other jobs take none of it);
all methods take turns, A B C then C B A, and the standard model runs twice in each round (A/A): the spread of that
ratio is the noise. A method's overhead is the median over rounds of its time over the standard model's in the same
round; the first round is thrown away. Predicted: the roofline over the cost model, kernel by kernel, on the machine
as calibrated at the start of the run. The step is without the optimiser. dynamic_window reads all states it can,
which is what its cost counts.

Writes predicted_overhead.json and predicted_overhead.svg beside this file, keeping there what other runs showed: the
share of pairs of methods, further apart than twice the noise, whose order is predicted rightly, and the median error
as a share of the step.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import time
from pathlib import Path
from statistics import median, stdev
from typing import Any

import torch

import twoaxis
from twoaxis.cost.calibrate import calibrate
from twoaxis.cost.hardware import Hardware
from twoaxis.cost.load import Load
from twoaxis.cost.roofline import tape_of, times
from twoaxis.cost.works import Execution, works
from twoaxis.model import write_atomically
from twoaxis.ops.choice import requesting
from twoaxis.verify.cost import widest

BATCH, TOKENS, WIDTH, HEADS = 2, 128, 128, 4
LOCAL = ("short_swa(window=16)", "short_conv", "canon", "token_shift")  # before attention, in every block
AGAIN = "additive, again"
EXECUTIONS: dict[str, Execution] = {"plain": "eager", "native": "native"}


def configs(blocks: int) -> dict[str, twoaxis.ModelConfig]:
    """Every depth method, and every local mixer, by name."""

    def model(depth: str, *before: str) -> twoaxis.ModelConfig:
        sequence = [*before, "attention", "mlp"]
        return twoaxis.ModelConfig(
            d_model=WIDTH, n_blocks=blocks, n_heads=HEADS, depth=depth, sequence=sequence
        )

    found = {"additive": model("additive"), AGAIN: model("additive")}
    for name in [*twoaxis.methods("depth"), "ddl(value_dim=4)", "attnres(block_sublayers=3)"]:
        if name != "additive":
            found[name] = model(name)
    return found | {name: model("additive", name) for name in LOCAL}


def measured(models: dict[str, twoaxis.Decoder], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each round by method, in turns; the first round is a warm-up."""
    tokens = torch.randint(0, 256, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name in list(models)[:: 1 if turn % 2 == 0 else -1]:
            model = models[name]
            gc.collect()
            start = time.process_time()
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            if turn:
                seconds[name].append(time.process_time() - start)
            model.zero_grad(set_to_none=True)
    return seconds


def predicted(cfg: twoaxis.ModelConfig, machine: Hardware, backend: str) -> float:
    """Seconds of forward and backward, launches and work one after the other."""
    execution = EXECUTIONS[backend]
    load = Load(batch_size=BATCH, seq_len=TOKENS, dtype="float32", execution=execution)
    forward, backward = works(tape_of(cfg, load), execution)
    ahead, back = times(forward, machine, "float32"), times(backward, machine, "float32", cold=True)
    return ahead.on(machine) + back.on(machine)


def at(backend: str, blocks: int, rounds: int) -> dict[str, Any]:
    """What is measured with a backend at a depth: seconds of the standard model, overheads, noise."""
    torch.manual_seed(0)
    models = {name: widest(twoaxis.Decoder(cfg)) for name, cfg in configs(blocks).items()}
    with requesting(backend):
        seconds = measured(models, rounds)
    base = seconds["additive"]
    own = {n: median(a / b for a, b in zip(s, base, strict=True)) - 1 for n, s in seconds.items()}
    return {
        "backend": backend,
        "blocks": blocks,
        "rounds": rounds,
        "noise": stdev(a / b for a, b in zip(seconds[AGAIN], base, strict=True)),
        "additive_seconds": {"measured": median(base)},
        "methods": {n: {"measured": x} for n, x in own.items() if n not in ("additive", AGAIN)},
    }


def judged(table: dict[str, Any], machine: Hardware) -> dict[str, Any]:
    """The table with predictions for the machine, and what it says of them."""
    cfgs, own = configs(table["blocks"]), {n: row["measured"] for n, row in table["methods"].items()}
    guess = {n: predicted(cfgs[n], machine, table["backend"]) for n in ["additive", *own]}
    said = {n: s / guess["additive"] - 1 for n, s in guess.items()}
    errors = {n: abs(said[n] - own[n]) / (1 + own[n]) for n in own}
    own["additive"] = 0.0
    apart = [(a, b) for a, b in itertools.combinations(own, 2) if abs(own[a] - own[b]) > 2 * table["noise"]]
    right = sum((own[a] - own[b]) * (said[a] - said[b]) > 0 for a, b in apart)
    return table | {
        "pairs_apart": len(apart),
        "pairs_ordered": right / len(apart),
        "median_error_of_the_step": median(errors.values()),
        "additive_seconds": {**table["additive_seconds"], "predicted": guess["additive"]},
        "methods": {n: {"measured": own[n], "predicted": said[n]} for n in errors},
    }


def plot(tables: list[dict], side: int = 360, gap: int = 56) -> str:
    """Predicted against measured overhead, a square for each table, with the diagonal; methods on hover."""
    parts = []
    for i, table in enumerate(tables):
        points = table["methods"]
        top = 1.08 * max(v for p in points.values() for v in p.values())
        left, above = (gap + place * (side + gap) for place in (i % 2, i // 2))

        def x(v: float, left: int = left, top: float = top) -> float:
            return left + max(v, 0.0) / top * side

        def y(v: float, above: int = above, top: float = top) -> float:
            return above + side - max(v, 0.0) / top * side

        parts.append(
            f'<rect x="{left}" y="{above}" width="{side}" height="{side}" fill="none" stroke="#999"/>'
        )
        parts.append(
            f'<line x1="{x(0):.1f}" y1="{y(0):.1f}" x2="{x(top):.1f}" y2="{y(top):.1f}" stroke="#999"/>'
        )
        head = (
            f"{table['backend']}, {table['blocks']} blocks: {table['pairs_ordered']:.0%} of pairs in order, "
        )
        head += f"median error {table['median_error_of_the_step']:.0%} of the step"
        parts.append(f'<text x="{left}" y="{above - 12}">{head}</text>')
        parts.append(
            f'<text x="{left}" y="{above + side + 18}">measured overhead, to {top:.0%}; predicted upwards</text>'
        )
        for name, p in points.items():
            words = f"{name}: measured {p['measured']:+.1%}, predicted {p['predicted']:+.1%}"
            spot = f'cx="{x(p["measured"]):.1f}" cy="{y(p["predicted"]):.1f}"'
            parts.append(
                f'<circle {spot} r="4" fill="#0072b2" fill-opacity=".7"><title>{words}</title></circle>'
            )
            if max(p.values()) > 0.3 * top:
                parts.append(
                    f'<text x="{x(p["measured"]) + 6:.1f}" y="{y(p["predicted"]) - 5:.1f}" font-size="9">{name}</text>'
                )
    wide, high = (gap + n * (side + gap) for n in (min(2, len(tables)), -(-len(tables) // 2)))
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#333"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" {style}>{"".join(parts)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", nargs="+", default=list(EXECUTIONS), choices=list(EXECUTIONS))
    parser.add_argument("--blocks", type=int, nargs="+", default=[6, 24])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--predict", action="store_true", help="predict anew what was measured before")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(__file__).with_suffix(".json")
    about = json.loads(path.read_text()) if path.exists() else {"tables": []}
    if args.predict:
        report(about, about["tables"], Hardware.from_dict(about["machine"], str(path)))
        return
    machine = calibrate("cpu")
    for backend, blocks in itertools.product(args.backend, args.blocks):
        made = at(backend, blocks, args.rounds)
        others = [t for t in about["tables"] if (t["backend"], t["blocks"]) != (backend, blocks)]
        about = report(about, [*others, made], machine)


def report(about: dict[str, Any], tables: list[dict[str, Any]], machine: Hardware) -> dict[str, Any]:
    """Write and print all tables with predictions for a machine; what is written."""
    beside = Path(__file__)
    tables = sorted(
        (judged(t, machine) for t in tables),
        key=lambda t: (list(EXECUTIONS).index(t["backend"]), t["blocks"]),
    )
    written = {
        "what": "overhead of a training step (forward and backward) over additive, one thread, CPU time",
        "size": {"batch": BATCH, "tokens": TOKENS, "width": WIDTH, "heads": HEADS},
        "torch": torch.__version__,
        "processor": platform.machine(),
        "machine": {k: v for k, v in machine.to_dict().items() if v is not None and k != "sources"},
        "tables": tables,
    }
    write_atomically(beside.with_suffix(".json"), (json.dumps(written, indent=1) + "\n").encode())
    write_atomically(beside.with_suffix(".svg"), plot(tables).encode())
    for table in tables:
        print(
            f"{table['backend']}, {table['blocks']} blocks: "
            f"{table['pairs_ordered']:.1%} of {table['pairs_apart']} pairs in order, "
            f"median error {table['median_error_of_the_step']:.1%} of the step, noise {table['noise']:.1%}"
        )
        for name, p in table["methods"].items():
            print(f"  {name:30} measured {p['measured']:+7.1%}  predicted {p['predicted']:+7.1%}")
    return about | written


if __name__ == "__main__":
    main()
