"""Who reads whom along depth: what a method's reads and writes depend on, by gradients on a tiny network.

rows: every sublayer's read, every block's write, the end;   columns: the tensors of the state before the block

Each block is taken by itself. The tensors of the state before it are leaves, and so is every core's output: a
mark means "through the depth axis, in this block" and never through a core or an earlier block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth.connection import Connection, State
from twoaxis.depth.history import named_tensors
from twoaxis.study.links import HEADS, WIDTH, Links, Sizes, at_a_point, leaf, marks
from twoaxis.study.watch import Watch
from twoaxis.types import Context, Layout

BLOCKS = 4
OWN = "this block"  # the column of the outputs of the block's earlier sublayers


def depth_links(method: str | spec.Config) -> Links:
    """The links of a depth method in a network of four blocks of an attention and an mlp."""
    cfg = spec.parse_spec("depth", method)
    start, anywhere = _network(cfg, random=False), _network(cfg, random=True)
    names = dict.fromkeys(name for row in anywhere.values() for name in row if name != OWN)
    columns = (*names, OWN)
    rows = tuple(marks(columns, start[row], anywhere[row]) for row in anywhere)
    return Links(cfg.spec(), tuple(anywhere), columns, rows)


def _network(cfg: Any, random: bool) -> dict[str, Sizes]:
    """Every row of a fresh network, or of one at a random point."""
    blocks = (("attention", "mlp"),) * BLOCKS
    layout = Layout(d_model=WIDTH, blocks=blocks, n_heads=HEADS, n_kv_heads=HEADS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stream, connections = spec.method("depth", cfg.name).network(cfg, layout)
        at_a_point(nn.ModuleList([stream, *(c for made in connections for c in made)]), random)
        state, rows = _leaves(stream.open(leaf(2), Context())), dict[str, Sizes]()
        for block, made in enumerate(connections):
            watches = [Watch(cfg, layout, block, index, random) for index in range(len(made))]
            after = _run(made, watches, state)
            rows |= _rows(layout, block, state, watches, after)
            state = _leaves(after)
        return {**rows, "end": _sizes([stream.close(state, Context())], named_tensors(state), [])}


def _run(made: list[Connection], watches: list[Watch], state: State) -> State:
    """The state after one block."""
    for connection, watch in zip(made, watches, strict=True):
        state = connection(state, watch.core, Context())
    return state


def _rows(layout: Layout, block: int, state: State, watches: list[Watch], after: State) -> dict[str, Sizes]:
    """A row for each sublayer's read, and one for all that the block has put into the state."""
    before, outputs, rows = named_tensors(state), list[Tensor](), dict[str, Sizes]()
    for kind, watch in zip(layout.blocks[block], watches, strict=True):
        rows[f"{kind} {block + 1}"] = _sizes(watch.read, before, outputs)
        outputs.append(watch.output)
    kept = {id(t) for t in before.values()}
    written = [t for t in named_tensors(after).values() if id(t) not in kept]
    return {**rows, f"write {block + 1}": _sizes(written, before, outputs)}


def _sizes(read: list[Tensor], before: dict[str, Tensor], outputs: list[Tensor]) -> Sizes:
    """The size of each tensor's gradient, along a random direction of what was read."""
    inputs = [*before.values(), *outputs]
    depends = [t for t in read if t.requires_grad]
    sizes = [0.0] * len(inputs)
    if depends:
        along = [torch.randn_like(t) for t in depends]
        grads = torch.autograd.grad(depends, inputs, along, retain_graph=True, allow_unused=True)
        sizes = [0.0 if g is None else float(g.norm()) for g in grads]
    found = dict(zip(before, sizes))
    return {**found, OWN: max(sizes[len(before) :])} if outputs else found


def _leaves(state: State) -> State:
    return pytree.tree_map(lambda t: t.detach().requires_grad_(), state)
