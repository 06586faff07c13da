"""`twoaxis train --pipeline-plan`: what would cross between the stages of a pipeline, without running it."""

from __future__ import annotations

import json
from typing import Any

from twoaxis.errors import InputError
from twoaxis.train import TrainConfig
from twoaxis.train.pipelined import plan_of
from twoaxis.train.timeline import tape_of_run, timeline


def show_plan(cfg: TrainConfig, as_json: bool) -> int:
    """Print the plan of the pipeline that `cfg` asks for."""
    if cfg.pipeline < 2:
        raise InputError(
            "--pipeline-plan plans a pipeline; say over how many processes, such as --pipeline 4"
        )
    told = described(cfg)
    print(json.dumps(told, indent=2) if as_json else _text(told))
    return 0


def described(cfg: TrainConfig) -> dict[str, Any]:
    """The plan as plain data: stages, and per boundary its tensors, bytes by transport and the price of none."""
    from twoaxis.parallel.recompute import recompute

    plan = plan_of(cfg)
    line = timeline(cfg, plan, tape_of_run(cfg))
    links = [
        {
            "after_stage": link.index,
            "after_blocks": link.boundary.depth,
            "ranks": list(link.ranks),
            "takes": link.takes,
            "bytes": link.nbytes,
            "tensors": [
                {"name": name, "shape": list(s.shape), "dtype": s.dtype, "bytes": s.nbytes}
                for name, s in link.sent.items()
            ],
            "recompute": recompute(plan, link).text(),
        }
        for link in plan.links
    ]
    stages = [
        {"stage": s.index, "rank": s.rank, "blocks": list(s.blocks), "from_cache": list(s.takes)}
        for s in plan.stages
    ]
    return {
        "depth": plan.cfg.depth,
        "micro_batch": [plan.batch_size, plan.seq_len],
        "schedule": cfg.pipeline_schedule,
        "transport": plan.transport,
        "bytes": plan.nbytes,
        "bubble": line.bubble,
        "live": list(line.live),
        "stages": stages,
        "boundaries": links,
    }


def _text(told: dict[str, Any]) -> str:
    rows, tokens = told["micro_batch"]
    lines = [
        f"{told['depth']}: {len(told['stages'])} stages, {told['schedule']}, micro-batches of {rows} x {tokens} tokens",
        f"bytes over all boundaries, one micro-batch forward (backward the same): {_bytes(told['bytes'])}",
        f"taken: {told['transport']}",
        f"simulated: ranks wait {told['bubble']:.1%} of a step (passes as long as their FLOPs, links no time) and hold "
        f"{', '.join(map(str, told['live']))} stage passes of micro-batches at the most",
    ]
    for stage, link in zip(told["stages"], [*told["boundaries"], None], strict=True):
        cached = f", from the cache: {', '.join(stage['from_cache'])}" if stage["from_cache"] else ""
        lines += ["", f"stage {stage['stage']} on rank {stage['rank']}: {_blocks(stage['blocks'])}{cached}"]
        if link is None:
            continue
        a, b = link["ranks"]
        lines.append(f"  rank {a} -> rank {b}, {link['takes']}: {_bytes(link['bytes'])}")
        lines += [
            f"    {t['name']:<24} {' x '.join(map(str, t['shape'])):<20} {t['dtype']:<9} {t['bytes']:>14,}"
            for t in link["tensors"]
        ]
        lines.append(f"    recomputing earlier states instead: {link['recompute']}")
    return "\n".join(lines)


def _blocks(blocks: list[int]) -> str:
    if not blocks:
        return "no block"
    return f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]} to {blocks[-1]}"


def _bytes(by_transport: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in by_transport.items())
