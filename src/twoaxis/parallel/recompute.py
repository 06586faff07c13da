"""What it would take not to send earlier states at all: the receiving stage computes them again from the tokens."""

from __future__ import annotations

from dataclasses import dataclass

from twoaxis.parallel.boundary import boundaries
from twoaxis.parallel.plan import Link, Plan, as_sent
from twoaxis.types import Shape


@dataclass(frozen=True)
class Recompute:
    """The price over one link. states: the earlier states that would stay away, of `saved_bytes` per micro-batch.

    blocks: how many blocks, from the first, the receiver runs again. parameters: those it would hold besides its
    own, their gradients to be summed over ranks. flops: of its products, forward, for one micro-batch; backward
    is twice that. impossible: why it cannot be done; "" if it can.
    """

    states: tuple[str, ...]
    saved_bytes: int
    blocks: int
    parameters: int
    flops: int
    impossible: str

    def text(self) -> str:
        """In a line."""
        if self.impossible:
            return f"impossible: {self.impossible}"
        blocks = "block 0" if self.blocks == 1 else f"blocks 0 to {self.blocks - 1}"
        return (
            f"{len(self.states)} states, {self.saved_bytes:,} bytes less for {blocks} again: "
            f"{self.parameters:,} parameters more, {self.flops:,} FLOPs forward"
        )


def recompute(plan: Plan, link: Link) -> Recompute:
    """The price of recomputing the states that an earlier block than the last before the link has made.

    The state that the last block leaves has to be sent: to compute it again is to have no pipeline.
    """
    cfg, depth = plan.cfg, link.boundary.depth
    model, every, _ = boundaries(cfg, plan.batch_size, plan.seq_len)
    made = {name: b.depth for b in reversed(every[: depth + 1]) for name in b.specs}
    states = tuple(n for n in every[depth].specs if model.stream.unchanging(n) and made[n] < depth)
    blocks = max((made[name] for name in states), default=0)
    saved = sum(as_sent(every[depth].specs[name], link.dtype).nbytes for name in states)
    if cfg.dropout:
        why = f"dropout={cfg.dropout} draws other numbers the second time"
    else:
        why = "" if states else "the state has no entry of an earlier block, only what the last one leaves"
    needed = ("embedding.", *(f"blocks.{b}." for b in range(blocks)))
    new = [
        p for n, p in model.named_parameters() if n.startswith(needed) and n not in plan.held[link.ranks[1]]
    ]
    return Recompute(states, saved, blocks, sum(p.numel() for p in new), _flops(plan, blocks), why)


def _flops(plan: Plan, blocks: int) -> int:
    """Of the cores of the first blocks, forward."""
    cfg, layout, depth = plan.cfg, plan.cfg.layout(), plan.cfg.depth_config()
    shape = Shape(layout=layout, batch_size=plan.batch_size, seq_len=plan.seq_len)
    total = 0
    for block, cores in enumerate(cfg.block_configs()[:blocks]):
        for index, core in enumerate(cores):
            total += core.cost_as_built(
                shape, block, depth.core_options_at(layout, block, index)
            ).flops_forward
    return total
