"""`twoaxis methods`: what is registered on both axes, with options, coordinates and cost at a size."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from twoaxis.errors import InputError

if TYPE_CHECKING:
    from twoaxis.model import ModelConfig
    from twoaxis.spec import Axis


@dataclass
class Args:
    """List the methods of both axes: equation, source, options, coordinates, and cost at a size."""

    axis: Literal["all", "depth", "sequence"] = "all"
    """Which axis to list."""
    d_model: int = 512
    """Width of the model at which costs are given."""
    n_blocks: int = 12
    """Blocks of that model, each an attention and an mlp."""
    n_heads: int = 8
    """Heads of its attention."""
    seq_len: int = 512
    """Tokens of the one sequence at which costs are given."""
    json: bool = False
    """Print JSON instead of tables."""
    markdown: bool = False
    """Print the map of both axes as Markdown instead: the tables of docs/methods/index.md."""
    figures: Path | None = None
    """Write a figure of who reads whom for each method of both axes to this folder instead, as SVG."""


def run(args: Args) -> int:
    """Print the list, or the map, or write the figures; 0."""
    if args.json + args.markdown + (args.figures is not None) > 1:
        raise InputError("--json, --markdown and --figures: allowed is one of them")
    if args.markdown:
        from twoaxis.study.map import tables

        print(tables(), end="")
        return 0
    if args.figures is not None:
        return _write(args.figures)
    from twoaxis import ModelConfig, methods

    cfg = ModelConfig(d_model=args.d_model, n_blocks=args.n_blocks, n_heads=args.n_heads)
    if args.seq_len < 1:
        raise InputError(f"--seq-len {args.seq_len}: allowed is 1 or more")
    axes: tuple[Axis, ...] = ("depth", "sequence") if args.axis == "all" else (args.axis,)
    listed = {axis: [describe(axis, name, cfg, args.seq_len) for name in methods(axis)] for axis in axes}
    size = {name: getattr(args, name) for name in ("d_model", "n_blocks", "n_heads", "seq_len")}
    if args.json:
        print(json.dumps({"size": size, **listed}, indent=2))
    else:
        _show(listed, ", ".join(f"{name}={value}" for name, value in size.items()))
    return 0


def describe(axis: Axis, name: str, cfg: ModelConfig, seq_len: int) -> dict[str, Any]:
    """All that is known of a method with its default options, as plain data.

    A depth method's numbers are those of the model with it minus those of the standard model; a core's are
    its own in one block.
    """
    from twoaxis import spec
    from twoaxis.cost import cost
    from twoaxis.types import Shape

    method = spec.method(axis, name)
    config = method.Config()
    numbers: dict[str, Any]
    if axis == "depth":
        total, standard = (
            cost(dataclasses.replace(cfg, depth=depth), 1, seq_len) for depth in (name, "additive")
        )
        numbers = {
            "extra_parameters": total.parameters - standard.parameters,
            "boundary_bytes_per_token": {k: v / seq_len for k, v in total.boundary_bytes.items()},
            "history_bytes_per_token": _history_bytes(dataclasses.replace(cfg, depth=name)),
            "standard_start": config.standard_start(),
            "decode_state_bytes": total.decode_state_bytes - standard.decode_state_bytes,
        }
    else:
        own = config.cost(Shape(layout=cfg.layout(), batch_size=1, seq_len=seq_len))
        numbers = {
            "parameters_per_sublayer": own.parameters,
            "separate_qkv_inputs": config.accepts_qkv,
            "decode_state_bytes": own.decode_state_bytes,
        }
    return {
        "name": name,
        "equation": method.equation,
        "source": method.source,
        "options": [
            {"name": option, "allowed": allowed, "default": default}
            for option, (allowed, default) in spec.options(method.Config).items()
        ],
        "coordinates": dataclasses.asdict(config.coordinates()),
        **numbers,
    }


def _write(folder: Path) -> int:
    """Every figure, as a file of its own."""
    from twoaxis.data.files import write_atomically
    from twoaxis.study.figures import figures

    made = figures()
    try:
        for name, svg in made.items():
            write_atomically(folder / name, [svg.encode()])
    except OSError as error:
        raise InputError(
            f"--figures {folder}: cannot write there ({error.strerror}); name a folder"
        ) from None
    print(f"wrote {len(made)} figures to {folder}")
    return 0


def _history_bytes(cfg: ModelConfig) -> dict[str, float]:
    """Bytes of one token's state at the largest block boundary, for each way to keep the history; empty: none."""
    from twoaxis.cost import cost
    from twoaxis.depth.stored import STORED_DTYPES

    if not cfg.depth_config().keeps_history:
        return {}
    found = {}
    for history in ("full", *STORED_DTYPES, "window(4)", "block_sums(3)"):
        kind, _, count = history.rstrip(")").partition("(")
        if not count or cfg.depth_config().history_options(kind, int(count)):
            found[history] = float(
                cost(dataclasses.replace(cfg, history=history), 1, 1).boundary_bytes["full"]
            )
    return found


def _show(listed: dict[Any, list[dict[str, Any]]], size: str) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    for axis, rows in listed.items():
        console.print(_table(axis, rows, size))
        for row in rows:
            options = ", ".join(f"{o['name']}={o['default']!r} ({o['allowed']})" for o in row["options"])
            place = ", ".join(f"{k.replace('_', ' ')}: {v}" for k, v in row["coordinates"].items())
            kept = ", ".join(f"{k} {v:,.0f}" for k, v in row.get("history_bytes_per_token", {}).items())
            history = [f"history, bytes per token at a block boundary: {kept}"] if kept else []
            console.print(f"{row['name']}    {row['source']}", style="bold")
            for line in (row["equation"], f"options: {options or 'none'}", place, *history):
                console.print(textwrap.indent(textwrap.fill(line, console.width - 4), "    "))
        console.print()


def _table(axis: str, rows: list[dict[str, Any]], size: str) -> Any:
    from rich.table import Table

    table = Table(title=f"{axis} axis at {size}, float32", title_justify="left", title_style="bold")
    table.add_column("method", no_wrap=True)
    if axis == "depth":
        columns = ("parameters over additive", "bytes per token at a block boundary", "decode bytes")
    else:
        columns = ("parameters of a sublayer", "separate q, k, v inputs", "decode bytes")
    for column in columns:
        table.add_column(column, justify="right")
    if axis == "depth":
        table.add_column("starts as the standard Transformer")
    for row in rows:
        decode = f"{row['decode_state_bytes']:,}"
        if axis == "depth":
            sent = ", ".join(f"{k} {v:,.0f}" for k, v in row["boundary_bytes_per_token"].items())
            table.add_row(row["name"], f"{row['extra_parameters']:,}", sent, decode, row["standard_start"])
        else:
            takes = "yes" if row["separate_qkv_inputs"] else "no"
            table.add_row(row["name"], f"{row['parameters_per_sublayer']:,}", takes, decode)
    return table
