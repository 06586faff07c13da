"""`twoaxis advise`: which method, where, at what price, for one model, machine and layout."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from twoaxis.errors import InputError

if TYPE_CHECKING:
    from twoaxis.cost.advise import Advice
    from twoaxis.cost.hardware import Hardware

WIDE = 200  # characters where there is no terminal to fit into


@dataclass
class Args:
    """Recommend a depth method and a local mixer: the paper's fork first, then what the budget, the machine and
    the layout change; with the price of every method, published evidence, and the strongest case against.
    """

    model: str = "llama-1b"
    """A size by name (tiny, small, medium, smol-135m, llama-1b, llama-8b, llama-70b), or a saved model's folder."""
    hardware: str = "h100"
    """A machine by name (h100, h200, a100, b200, mi300x, rtx4090, tpu-v5e, m3-max, cpu), `here` for this one as
    --measure stored it, or such a file."""
    mesh: str = ""
    """The parallel layout, as in dp=8,tp=2,pp=4,cp=1."""
    goal: str = "any"
    """What is wanted: shortcut, local-mixing, depth-retrieval, best-quality or any."""
    phase: Literal["train", "decode"] = "train"
    """Training steps, or decoding one token of each row after --seq-len tokens."""
    seq_len: int | None = None
    """Tokens of one sequence; by default the model's."""
    batch_size: int = 1
    """Sequences of one micro-batch on one model copy."""
    micro_batches: int = 8
    """Micro-batches of one step."""
    window: int = 64
    """Window of the local mixer, the own token counted."""
    budget: float = 0.15
    """How much longer a step may take than the standard model's, as a share."""
    dtype: str | None = None
    """Of weights and activations; by default bfloat16, or float32 where bfloat16 has no known or a lower rate."""
    execution: Literal["eager", "fused"] | None = None
    """One kernel for each operation, or the limit of a compiler; by default fused, eager on a cpu."""
    runs: Path | None = None
    """A comparison's folder, whose results count as own evidence."""
    evidence: Path | None = None
    """A YAML file of more published results, in the form of docs/guides/advise.md."""
    json: bool = False
    """Print JSON instead of words and a table."""
    html: Path | None = None
    """Also write a page with plots here."""
    measure: bool = False
    """Measure this machine instead, and store it (in well under a minute)."""
    device: str = "cpu"
    """What --measure measures: cpu, cuda, mps."""
    out: Path | None = None
    """Where --measure stores the machine; by default the user's cache, found again as `--hardware here`."""
    claims: bool = False
    """Print the claims in circulation instead, with what counts say of them."""


def run(args: Args) -> int:
    """Advise, measure or list the claims; 0."""
    if args.claims:
        return _claims(args)
    if args.measure:
        return _measure(args)
    from twoaxis.cost.advise import advise, plain

    request = _request(args)
    found = advise(request, runs=args.runs, extra=args.evidence)
    if args.html is not None:
        from twoaxis.study.advice_page import write_page

        write_page(args.html, found)
    if args.json:
        print(json.dumps(plain(found), indent=1))
    else:
        _show(found)
    return 0


def _request(args: Args) -> Any:
    from twoaxis.cost.advise import Request
    from twoaxis.cost.fork import check_goal
    from twoaxis.cost.mesh import Mesh
    from twoaxis.cost.roofline import Load
    from twoaxis.cost.sizes import size

    found, machine = size(args.model), _machine(args.hardware)
    on_host = not machine.asynchronous
    load = Load(
        batch_size=args.batch_size,
        seq_len=found.seq_len if args.seq_len is None else args.seq_len,
        micro_batches=args.micro_batches,
        dtype=args.dtype or _dtype(machine),
        decoding=args.phase == "decode",
        execution=args.execution or ("eager" if on_host else "fused"),
    )
    return Request(
        size=found,
        machine=machine,
        load=load,
        mesh=Mesh.parse(args.mesh),
        goal=check_goal(args.goal),
        window=args.window,
        budget=args.budget,
    )


def _dtype(machine: Hardware) -> str:
    rates = {name: machine.matrix_tflops.get(name) or 0.0 for name in ("bfloat16", "float32")}
    return max(rates, key=lambda name: rates[name])


def _machine(name: str) -> Hardware:
    from twoaxis.cost.hardware import hardware, read_machine

    if name != "here":
        return hardware(name)
    path = _stored()
    if not path.is_file():
        raise InputError("this machine has not been measured; run twoaxis advise --measure first")
    return read_machine(path)


def _stored() -> Path:
    from twoaxis.data.cache import cache_folder

    folder = cache_folder()
    if folder is None:
        raise InputError(
            "there is no home folder for a cache; give --out FILE, or set TWOAXIS_CACHE to a folder"
        )
    return folder / "machine.json"


def _measure(args: Args) -> int:
    from twoaxis.cost.calibrate import calibrate, store

    path = args.out or _stored()
    machine = calibrate(args.device)
    store(machine, path)
    if args.json:
        print(json.dumps(machine.to_dict(), indent=1))
        return 0
    print(f"float32 products    {1e3 * (machine.matrix_tflops['float32'] or 0):8.1f} GFLOP/s at best")
    print(f"bfloat16 products   {1e3 * (machine.matrix_tflops['bfloat16'] or 0):8.1f} GFLOP/s")
    for nbytes, rate in machine.copy_curve:
        print(f"copy of {nbytes / 2**21:8.3g} MiB {rate:8.1f} GB/s, read and written")
    print(f"softmax             {machine.softmax_gb_per_s:8.1f} GB/s, read and written")
    print(f"launch              {machine.launch_us:8.1f} us")
    print(f"stored in {path}: use it as --hardware {'here' if args.out is None else path}")
    return 0


def _claims(args: Args) -> int:
    from twoaxis.cost.claims import claims

    found = claims()
    if args.json:
        print(json.dumps([claim.to_dict() for claim in found], indent=1))
        return 0
    console = _console()
    for claim in found:
        console.print(f"{claim.verdict:14} {claim.claim}", style="bold")
        console.print(f"               {claim.says}", soft_wrap=True)
    return 0


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False, emoji=False)


def _show(advice: Advice) -> None:
    request, console = advice.request, _console()
    chosen = advice.choice
    lines = [advice.fork]
    for trial in advice.trials:
        said = "; ".join(o.words for o in trial.objections) or "taken"
        lines.append(f"  {trial.row.point.name} ({trial.row.overhead:+.1%}): {said}")
    console.print(
        f"{request.size.name} on {request.machine.title or request.machine.name}, {request.mesh}, "
        f"{request.load.seq_len} tokens, {'decoding' if request.load.decoding else 'training'}, goal: {request.goal}",
        style="bold",
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print(_table(advice))
    console.print(f"Recommendation: {chosen.point.name}, {chosen.overhead:+.1%} of a step", style="bold")
    console.print(f"The strongest case against it: {advice.against[0]}", soft_wrap=True)
    for line in advice.against[1:]:
        console.print(f"  also: {line}", soft_wrap=True)
    console.print(f"What would settle it: {advice.experiment}", soft_wrap=True)
    for note in advice.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _table(advice: Advice) -> Any:
    from rich import box
    from rich.table import Table

    from twoaxis.study.units import percent, si

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("method", overflow="fold")
    for name in (
        "parameters",
        "FLOPs",
        "step",
        "limited by",
        "GB a device",
        "decode state",
        "sent at a boundary",
    ):
        table.add_column(name, justify="right")
    table.add_column("standard start")
    table.add_column("evidence", overflow="fold")
    base = next(r for r in advice.rows if r.point.name == "additive")
    for row in advice.rows:
        one = row.to_dict()
        held = f"{1e-9 * one['device_bytes']:.3g}" + ("" if row.fits else " (too much)")
        table.add_row(
            row.point.name,
            f"{si(row.cost.parameters)} ({percent(row.cost.parameters / base.cost.parameters - 1)})",
            f"{si(row.cost.flops)} ({percent(row.cost.flops / base.cost.flops - 1)})",
            percent(row.overhead),
            row.step.bound,
            held + (", recomputing" if row.checkpointing else ""),
            f"{si(row.cost.decode_state_bytes)}B",
            f"{si(row.step.sent_bytes)}B" if row.step.sent_bytes else "-",
            row.start,
            _evidence(row),
        )
    return table


def _evidence(row: Any) -> str:
    """The weightiest published result in short, how many there are, and own results."""
    from twoaxis.cost.evidence import strongest

    numbers = [r for r in row.evidence if r.gain is not None and not r.about_price]
    said = [r["words"] for r in row.own]
    top = strongest(numbers)
    if top is not None:
        size = ", ".join(x for x in (top.parameters, top.tokens) if x)
        mark = " (contested)" if top.contested else ""
        said.append(
            f"{top.metric} {top.value:g} vs {top.baseline:g}, {size or 'size not stated'}, {top.source}{mark}"
        )
        said += [f"and {len(numbers) - 1} more"] if len(numbers) > 1 else []
    return "; ".join(said) or "none"
