"""`twoaxis advise`: which method, where, at what price, for one model, machine and layout."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from twoaxis.cli.advice_table import console, show
from twoaxis.errors import InputError

if TYPE_CHECKING:
    from twoaxis.cost.hardware import Hardware


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
    execution: Literal["eager", "native", "fused"] | None = None
    """One kernel for each operation, the same with this package's kernels for CPUs, or the limit of a compiler; by
    default fused, native on a cpu."""
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
    if args.html is not None:
        _check_writable(args.html, "--html")
    found = advise(request, runs=args.runs, extra=args.evidence)
    if args.html is not None:
        from twoaxis.study.advice_page import write_page

        write_page(args.html, found)
    if args.json:
        print(json.dumps(plain(found), indent=1))
    else:
        show(found)
    return 0


def _request(args: Args) -> Any:
    from twoaxis.cost.advice import Request
    from twoaxis.cost.fork import check_goal
    from twoaxis.cost.load import Load
    from twoaxis.cost.mesh import Mesh
    from twoaxis.cost.sizes import size

    found, machine = size(args.model), _machine(args.hardware)
    on_host = not machine.asynchronous
    load = Load(
        batch_size=args.batch_size,
        seq_len=found.seq_len if args.seq_len is None else args.seq_len,
        micro_batches=args.micro_batches,
        dtype=args.dtype or _dtype(machine),
        decoding=args.phase == "decode",
        execution=args.execution or ("native" if on_host else "fused"),
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


def _check_writable(path: Path, option: str) -> None:
    """InputError, before anything is computed, for a file that could not be written."""
    folder = next(p for p in path.absolute().parents if os.path.exists(p))
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{option} {path} cannot be written; give a file in a folder where you may write")


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
    _check_writable(path, "--out")
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
    out = console()
    for claim in found:
        out.print(f"{claim.verdict:14} {claim.claim}", style="bold")
        out.print(f"               {claim.says}", soft_wrap=True)
    return 0
