"""Claims in circulation about the two axes, none with a source: what our counts, and what is published, say.

Counts are made when asked, on a decoder of 24 blocks of 1024; what only training could tell is said to be untested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from twoaxis import spec
from twoaxis.cost.evidence import Result, evidence
from twoaxis.cost.rows import Point
from twoaxis.cost.sizes import sizes, with_methods
from twoaxis.cost.total import cost
from twoaxis.model.config import ModelConfig
from twoaxis.types import Cost

Verdict = Literal["holds", "does not hold", "depends", "untested"]
SMALL = 0.005  # "differences under 0.5 %"


@dataclass(frozen=True)
class Claim:
    """A claim, what can be said of it, and the numbers that say so. counted: numbers made here."""

    claim: str
    verdict: Verdict
    says: str
    counted: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def claims() -> list[Claim]:
    """All of them, with the counts made now."""
    return [make() for make in MAKERS]


def _model(depth: str = "additive", *before: str, **changes: Any) -> ModelConfig:
    return replace(with_methods(sizes()["medium"].model, depth, *before), **changes)


def _count(model: ModelConfig, seq_len: int = 1024) -> Cost:
    return cost(model, 1, seq_len)


def _windows() -> Claim:
    full, four, base = (
        _count(_model(d)).flops_forward for d in ("depth_window", "depth_window(window_blocks=4)", "additive")
    )
    short = _published("attnres(window_sources=8)")
    return Claim(
        "A depth window of 3 to 5 suffices.",
        "untested",
        f"A window of 4 takes {four / base - 1:.1%} more FLOPs forward and all states {full / base - 1:.1%}, most of "
        f"it the projections, which no window makes smaller. The one published test speaks against short windows: "
        f"{short.words()}.",
        {"window_4": four / base - 1, "full": full / base - 1},
    )


def _quantised() -> Claim:
    wide, half, eighth = (
        _count(_model("attnres", history=how)).boundary_bytes["full"] for how in ("full", "float16", "int8")
    )
    return Claim(
        "Store the history in fp16 or int8.",
        "depends",
        f"For full AttnRes history='float16' sends {half / wide:.2f} and history='int8' {eighth / wide:.2f} times "
        "the bytes of float32; between tokens there is no history to store (see below). What it does to quality "
        "is untested.",
        {"float16": half / wide, "int8": eighth / wide},
    )


def _initial() -> Claim:
    names = spec.methods("depth")
    exact = [n for n in names if spec.method("depth", n).Config().standard_start() != "no"]
    return Claim(
        "Initialise mixing weights at 1e-3.",
        "does not hold",
        f"{len(exact)} of {len(names)} depth methods start as the standard Transformer with the values that "
        "their papers name, mostly exact zeros or ones; mHC at exact zero never separates its streams and needs "
        "random ones.",
        {"start_standard": len(exact), "methods": len(names)},
    )


def _warm_up() -> Claim:
    steps = {
        "ddl": 2000,
        "denseformer": 2000,
        "dca": 1000,
        "delta_attnres": 1000,
        "value_residual": 120,
        "canon": 8000,
    }
    long = [name for name, count in steps.items() if count >= 5000]
    return Claim(
        "Warm up for 5000 steps or more.",
        "does not hold",
        "Warm-up in the methods' own recipes: "
        + ", ".join(f"{name} {count}" for name, count in steps.items())
        + f"; {len(long)} of {len(steps)} reach 5000 (arXiv 2601.00417, 2402.02622, 2502.06785, 2605.18855, "
        "2410.17897, 2512.17351).",
        {"recipes": len(steps), "of_5000_or_more": len(long)},
    )


def _clip() -> Claim:
    return Claim(
        "Clip gradients at 1 to 2.",
        "untested",
        "It is what recipes do (DDL 1.0, Canon 1.0, ELC-BERT 2.0), as for any Transformer; no method was "
        "compared without.",
        {},
    )


def _adapt() -> Claim:
    per_token = [
        _count(_model("depth_window(window_blocks=4)"), t).by_part["depth"].flops_forward / t
        for t in (512, 4096)
    ]
    return Claim(
        "Adapt K to the remaining context.",
        "does not hold",
        f"A depth read costs a token {per_token[0]:,.0f} FLOPs in a context of 512 and {per_token[1]:,.0f} in one of "
        "4096: K and the context do not compete for anything.",
        {"flops_512": per_token[0], "flops_4096": per_token[1]},
    )


def _between_tokens() -> Claim:
    base = _count(_model()).decode_state_bytes
    names = ("attnres", "denseformer", "elc_bert", "dca", "muddformer", "depth_window", "delta_attnres")
    extra = {name: _count(_model(name)).decode_state_bytes - base for name in names}
    return Claim(
        "Cache layer outputs between tokens.",
        "does not hold",
        "Reads along depth look at the same token alone, so its history can go when it is done. Bytes that decoding "
        "keeps beside keys and values: "
        + ", ".join(f"{name} {value}" for name, value in extra.items())
        + ".",
        {name: float(value) for name, value in extra.items()},
    )


def _heads() -> Claim:
    one, four = (_count(_model(f"attnres(heads={h})")) for h in (1, 4))
    return Claim(
        "Compute depth heads in parallel.",
        "holds",
        f"Four heads of a read that splits the width take {four.flops_forward / one.flops_forward:.3f} times the FLOPs "
        "of one and read the same sources, in one kernel.",
        {"flops_ratio": four.flops_forward / one.flops_forward},
    )


def _both() -> Claim:
    points = (Point(), Point("ddl"), Point("additive", ("short_swa",)), Point("ddl", ("short_swa",)))
    base, depth, sequence, both = (_count(_model(p.depth, *p.before)) for p in points)
    apart = (depth.flops - base.flops) + (sequence.flops - base.flops)
    share = (both.flops - base.flops) / apart
    return Claim(
        "Never use sequence-local and depth-local methods together.",
        "untested",
        f"Nothing in the costs forbids it: DDL with ShortSWA adds {share:.2f} times the FLOPs that the two add apart "
        "(the third sublayer has a write too). Nobody has published how their gains add up.",
        {"of_the_sum": share},
    )


def _quadratic() -> Claim:
    model = replace(_model("depth_window(window_blocks=4)"), sequence=["short_swa(window=64)", "mlp"])
    saved = [_count(model, t).saved_bytes or 0 for t in (2048, 4096)]
    return Claim(
        "A hybrid's memory is quadratic above 2048 tokens.",
        "does not hold",
        f"A window of 64 with a depth window of 4 keeps {saved[1] / saved[0]:.3f} times as much for the backward pass "
        "at 4096 tokens as at 2048. Only a masked T x T attention is quadratic.",
        {"ratio": saved[1] / saved[0]},
    )


def _differences() -> Claim:
    gains = [
        r.gain for r in evidence() if r.gain is not None and not r.about_price and abs(r.baseline or 0) > 1e-9
    ]
    large = [g for g in gains if abs(g) > SMALL]
    return Claim(
        "Methods differ by at most 0.5 %.",
        "does not hold",
        f"{len(large)} of {len(gains)} published results differ from their baseline by more than 0.5 % of it "
        "(perplexities and scores more easily than losses); most are of one run.",
        {"larger": len(large), "results": len(gains)},
    )


def _saving() -> Claim:
    model = sizes()["llama-1b"].model
    said: list[str] = []
    counted: dict[str, float] = {}
    for t in (2048, 32768):
        base = cost(model, 1, t).flops
        added = cost(with_methods(model, "additive", "short_swa(window=64)"), 1, t).flops / base - 1
        instead = [
            s.replace("attention", "short_swa(window=64)") for s in model.sequence if isinstance(s, str)
        ]
        replaced = cost(replace(model, sequence=instead), 1, t).flops / base - 1
        said.append(f"at {t} tokens {added:+.1%} beside full attention, {replaced:+.1%} instead of it")
        counted |= {f"beside_{t}": added, f"instead_{t}": replaced}
    return Claim(
        "The sequence axis saves 20 to 30 % of training cost.",
        "depends",
        f"FLOPs of a 1B model with a window of 64: {'; '.join(said)}. Algorithm 1 puts it beside, which never saves.",
        counted,
    )


def _best() -> Claim:
    return Claim(
        "DDL with ShortSWA has the best quality for its cost.",
        "untested",
        "No published number exists for the pair, nor for ShortSWA alone; twoaxis compare --depth additive ddl "
        "--sequence attention,mlp 'short_swa(window=64),attention,mlp' --match flops --seeds 3 would tell.",
        {},
    )


def _published(method: str) -> Result:
    return next(r for r in evidence() if r.method == method)


MAKERS: tuple[Callable[[], Claim], ...] = (
    *(_windows, _quantised, _initial, _warm_up, _clip, _adapt, _between_tokens),
    *(_heads, _both, _quadratic, _differences, _saving, _best),
)
