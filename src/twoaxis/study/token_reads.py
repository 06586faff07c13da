"""Who reads whom along the sequence: which tokens a mixer's output depends on, by gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from twoaxis import spec
from twoaxis.model.init import init_core
from twoaxis.sequence import SequenceConfig
from twoaxis.study.links import HEADS, WIDTH, Links, Sizes, at_a_point, leaf, marks
from twoaxis.types import Context, Layout, Reads

TOKENS, WINDOW = 12, 4


def token_links(method: str | spec.Config) -> list[Links]:
    """The links of a mixer over twelve tokens; a preset has one for each core of its block.

    Windows are cut to four tokens, so that there is something to see.
    """
    cfg: SequenceConfig = spec.parse_spec("sequence", method)
    made = cfg.over([])
    return [_links(_small(core)) for core in ([cfg] if made is None else made)]


def _links(cfg: SequenceConfig) -> Links:
    """The links of one core: a row for each token's output, a column for each token of the input."""
    names = tuple(str(t) for t in range(TOKENS))
    rows = zip(_rows(cfg, random=False), _rows(cfg, random=True), strict=True)
    return Links(cfg.spec(), names, names, tuple(marks(names, start, anywhere) for start, anywhere in rows))


def _rows(cfg: SequenceConfig, random: bool) -> list[Sizes]:
    """Every row of a fresh core, or of one at a random point."""
    layout = Layout(d_model=WIDTH, blocks=((cfg.spec(),),), n_heads=HEADS, n_kv_heads=HEADS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        core = spec.method("sequence", cfg.name)(cfg, layout, 0)
        init_core(core, layout)
        u = leaf(TOKENS)
        y = at_a_point(core, random).eval()(Reads(u), Context())
        return [_sizes(y[:, t], u) for t in range(TOKENS)]


def _sizes(y: Tensor, u: Tensor) -> Sizes:
    (grad,) = torch.autograd.grad(y, u, torch.randn_like(y), retain_graph=True)
    return {str(t): float(size) for t, size in enumerate(grad[0].norm(dim=-1))}


def _small(cfg: SequenceConfig) -> SequenceConfig:
    """The core with windows of a few tokens, those of cores inside it too."""
    changed: dict[str, Any] = {}
    if isinstance(getattr(cfg, "window", None), int):
        changed["window"] = WINDOW
    if cfg.specs_field is not None and hasattr(cfg, "parts"):
        changed[cfg.specs_field] = tuple(_small(part).spec() for part in cfg.parts())
    return replace(cfg, **changed)
