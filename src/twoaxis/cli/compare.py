"""`twoaxis compare`: train a grid of methods on the same data and write an honest report."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from twoaxis.errors import InputError

if TYPE_CHECKING:
    from twoaxis.study import Study


@dataclass
class Args:
    """Train every depth method with every block on every seed, on the same data in the same order, and write
    a report with curves, costs and a verdict. Without arguments: six methods on Shakespeare, one seed.

    Finished runs are skipped when the same command is given again; an interrupted one goes on.
    """

    study: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[STUDY.yaml]")] = None
    """A study in YAML; the options below override what it says."""
    depth: tuple[str, ...] = ()
    """Depth methods, such as additive 'ddl(value_dim=4)'; the first row is the baseline."""
    sequence: tuple[str, ...] = ()
    """Blocks, each as sublayers with commas between: attention,mlp 'short_swa(window=16),attention,mlp'."""
    preset: tuple[str, ...] = ()
    """Further rows by name: standard, local_to_global, ddl_short_swa, local_to_global_short_conv,
    local_to_global_canon, canon."""
    seeds: tuple[int, ...] = ()
    """How many seeds, or two or more seeds themselves; three or more allow a ranking."""
    match: Literal["width", "parameters", "flops"] | None = None
    """What all rows share: the width, or a budget that their MLP widths are changed to meet."""
    threads: int | None = None
    """Threads of torch in every run; the preset takes 1, which is steady on a shared machine."""
    steps: int | None = None
    """Training steps of every run."""
    data: str | None = None
    """shakespeare, pydocs, or the path of a UTF-8 file or folder."""
    out: str | None = None
    """Folder of the comparison (default: runs/compare)."""
    json: bool = False
    """Print the results as JSON."""


def run(args: Args) -> int:
    """Compare; 1 if a run failed."""
    from twoaxis.cli.live import Live, Log
    from twoaxis.study import compare

    study = study_of(args)
    live = sys.stderr.isatty()
    with (Live if live else Log)(study) as listener:
        results = compare(study, on_event=listener, command=command_of(args))
    if args.json:
        print(json.dumps(results))
    else:
        from twoaxis.cli.report import show

        show(results, Path(study.out) / "report.html")
    return 1 if results["failed"] else 0


def study_of(args: Args) -> Study:
    """The study that the arguments describe."""
    from twoaxis.study import grid_of, named, preset, read_study, seeds_of, with_steps

    if args.study and not args.study.exists():
        raise InputError(f"no study file {args.study}; give a YAML file, or methods as --depth {args.study}")
    study = read_study(args.study) if args.study else preset()
    changes: dict[str, Any] = {}
    if args.depth or args.sequence or args.preset:
        grid = grid_of(args.depth, args.sequence) if args.depth or args.sequence else ()
        changes["rows"] = grid + named(args.preset)
    if args.seeds:
        changes["seeds"] = seeds_of(args.seeds[0] if len(args.seeds) == 1 else args.seeds)
    if args.match:
        changes["match"] = args.match
    if args.threads is not None:
        changes["threads"] = args.threads
    if args.out:
        changes["out"] = args.out
    training = study.training if args.steps is None else with_steps(study.training, args.steps)
    if args.data:
        training = dataclasses.replace(training, data=args.data)
    return dataclasses.replace(study, **changes, training=training)


def command_of(args: Args) -> str:
    """The command without where its result goes, and with the bare names of files."""
    words = ["twoaxis", "compare"]
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        if f.name in ("out", "json") or value is None or value == ():
            continue
        if f.name == "study":
            words.append(value.name)
            continue
        values = value if isinstance(value, tuple) else [Path(value).name if f.name == "data" else value]
        words += [f"--{f.name}", *map(str, values)]
    return shlex.join(words)
