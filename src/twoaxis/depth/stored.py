"""A tensor that is kept in fewer bits than it is computed in: what a history is made of, if one asks.

int8, per token:  s = max |x| / 127,   q = round(x / s),   x~ = s q,   |x - x~| <= s / 2
bfloat16, float16:  x~ = x rounded

To autograd x~ is x: its gradient goes straight through, in x's dtype. Operators see x~ and save q and s for backward,
so that training memory shrinks too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from twoaxis.errors import InputError
from twoaxis.ops.choice import transformed

STORED_DTYPES = ("bfloat16", "float16", "int8")
LARGEST = 127  # of int8; -128 is not used, so that signs are alike
aten = torch.ops.aten
COPIES = {aten.detach.default, aten.alias.default, aten.clone.default}
VIEWS = {  # these cut the parts, so that what operators save for backward stays small
    *(aten.view.default, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.transpose.int),
    *(aten.split.Tensor, aten.split_with_sizes.default),
}


class Stored(Tensor):
    """Outwardly a tensor (B, T, ...) of the dtype it was made from, inwardly `held` like it and, for int8, `scale`
    (B, T, 1, ...), a number per token. Every operator but a copy and a view reads its value and gives plain tensors.
    """

    held: Tensor
    scale: Tensor | None

    @staticmethod
    def __new__(cls, held: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Stored:
        made: Stored = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=dtype, device=held.device
        )
        return made

    def __init__(self, held: Tensor, scale: Tensor | None, dtype: torch.dtype) -> None:
        self.held, self.scale = held, scale

    def value(self) -> Tensor:
        """x~, a plain tensor without gradient; operators on this tensor have one."""
        return self.held.to(self.dtype) if self.scale is None else (self.held * self.scale).to(self.dtype)

    def parts(self) -> dict[str, Tensor]:
        """The plain tensors inside, by the end of their name: "" and, for int8, ".scale"."""
        return {"": self.held} if self.scale is None else {"": self.held, ".scale": self.scale}

    def rebuilt(self, change: Callable[[Tensor], Tensor]) -> Stored:
        """The same with every part changed, such as sent elsewhere."""
        return Stored(change(self.held), None if self.scale is None else change(self.scale), self.dtype)

    def viewed(self, view: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A view of it, or several: held and scale alike; of its value where tokens and features are merged."""
        held = view(self.held, *args, **kwargs)
        try:
            scale = None if self.scale is None else view(self.scale.expand_as(self.held), *args, **kwargs)
        except RuntimeError:
            return view(self.value(), *args, **kwargs)
        if isinstance(held, Tensor):
            return Stored(held, scale, self.dtype)
        scales = [None] * len(held) if scale is None else scale
        return [Stored(h, s, self.dtype) for h, s in zip(held, scales, strict=True)]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Stored({str(self.held.dtype)[6:]}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return (["held"] if self.scale is None else ["held", "scale"]), self.dtype

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Stored:
        return Stored(parts["held"], parts.get("scale"), dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in COPIES and not kwargs:
            return args[0].rebuilt(func)
        if func in VIEWS:
            return args[0].viewed(func, *args[1:], **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(Stored, Stored.value, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Store(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: str) -> Tensor:
        if dtype != "int8":
            return Stored(x.to(getattr(torch, dtype)), None, x.dtype)
        scale_dtype = torch.promote_types(x.dtype, torch.float32)
        tokens = x.to(scale_dtype).flatten(2)
        largest = tokens.abs().amax(-1) if tokens.shape[-1] else tokens.sum(-1)
        scale = (largest / LARGEST).reshape(*x.shape[:2], *(1 for _ in x.shape[2:]))
        q = (x / torch.where(scale == 0, 1, scale)).round().clamp(-LARGEST, LARGEST)
        return Stored(q.to(torch.int8), scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def store(x: Tensor, dtype: str) -> Tensor:
    """x (B, T, ...) kept as `dtype`, one of STORED_DTYPES; or x itself for "full".

    Raises InputError under `torch.func`'s transforms and in forward mode, which do not see what is inside.
    """
    if dtype == "full":
        return x
    if transformed():
        raise InputError(
            f"history={dtype!r} under torch.func's transforms or in forward mode: use history='full'"
        )
    kept: Tensor = _Store.apply(x, dtype)
    return kept


def plain_parts(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that a tensor is made of, by the end of their name; itself for most."""
    return tensor.parts() if isinstance(tensor, Stored) else {"": tensor}
