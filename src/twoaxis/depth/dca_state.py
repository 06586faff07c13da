"""DeepCrossAttention's state between blocks: the branches read one by one, and the sum of those read as one.

{"sources": a history of h_i, "middle": h_1 + .. + h_j, which is named "middle.j"}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from twoaxis.depth.connection import State
from twoaxis.depth.history import History


@dataclass(frozen=True)
class Middle:
    """h_1 + .. + h_last, in a state under the name of `last`."""

    total: Tensor
    last: int


def _made(tensors: Any, last: Any) -> Middle:
    (total,) = tensors
    return Middle(total, last)


def _with_name(middle: Middle) -> tuple[list[tuple[Any, Any]], int]:
    return [(pytree.MappingKey(str(middle.last)), middle.total)], middle.last


pytree.register_pytree_node(
    Middle,
    lambda middle: ([middle.total], middle.last),
    _made,
    serialized_type_name="twoaxis.depth.dca.Middle",
    flatten_with_keys_fn=_with_name,
)


def sources_of(state: State) -> History:
    """What a read sees, oldest first: the embeddings, the pooled middle (index -1), the other branches."""
    history: History = state["sources"]
    middle: Middle | None = state.get("middle")
    if middle is None:
        return history
    (first, *others), (zero, *index) = history.sources, history.index
    return History((first, middle.total, *others), (zero, -1, *index))


def push(cfg: Any, state: State, branch: Tensor, number: int | None = None) -> State:
    """The state after a block: one more source; the oldest of the last k joins the middle.

    Everything is told by places, nothing by the block's number: to torch.compile deep blocks are alike.
    """
    history: History = state["sources"].push(branch, number)
    middle: Middle | None = state.get("middle")
    left = cfg.leaving(len(history), middle is not None)
    kept = {"sources": history.without(left)}
    if not left or cfg.middle == "drop":
        return kept
    parts = [*([middle.total] if middle else []), *history.sources[left.start : left.stop]]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return {**kept, "middle": Middle(total, history.index[left.stop - 1])}
