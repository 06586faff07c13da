"""What the operators accept: every refusal in one line, before any tensor work."""

from collections.abc import Sequence
from functools import reduce
from numbers import Integral
from typing import Literal, TypedDict

import torch
from torch import Tensor

from ..errors import InputError

Normalize = Literal["softmax", "sigmoid", "none"]
Bias = Tensor | Sequence[Tensor | float]
Weights = Tensor | Sequence[Tensor]


class ReadOptions(TypedDict, total=False):
    """The options of `depth_read` that do not change what it returns."""

    key_gain: Tensor | None
    key_norm_eps: float | None
    scale: float
    normalize: Normalize
    heads: int
    output_gain: Tensor | None
    output_eps: float | None
    bias: Bias | None


def check_read(
    query: Tensor,
    sources: Sequence[Tensor],
    key_gain: Tensor | None,
    normalize: str,
    heads: int,
    output_gain: Tensor | None,
    output_eps: float | None,
    bias: Bias | None,
) -> None:
    """Refuse inputs that `depth_read` does not define."""
    shape = _check_sources(sources)
    if query.shape != shape[-1:] and query.shape != shape:
        raise InputError(
            f"query {shape_of(query)}: give (d,) = ({shape[-1]},) or one per token, {tuple(shape)}"
        )
    for name, gain in (("key_gain", key_gain), ("output_gain", output_gain)):
        if gain is not None and gain.shape != shape[-1:]:
            raise InputError(f"{name} {shape_of(gain)}: give one gain per feature, shape ({shape[-1]},)")
    if normalize not in ("softmax", "sigmoid", "none"):
        raise InputError(f"normalize={normalize!r}: give 'softmax', 'sigmoid' or 'none'")
    if isinstance(heads, bool) or not isinstance(heads, Integral) or heads < 1 or shape[-1] % heads:
        raise InputError(f"heads={heads!r}: give an integer >= 1 that divides d={shape[-1]}")
    if output_gain is not None and output_eps is None:
        raise InputError(
            "output_gain without output_eps: the gain belongs to the folded norm, give its output_eps too"
        )
    if bias is not None and len(bias) != len(sources):
        raise InputError(f"bias has {len(bias)} entries for {len(sources)} sources: give one per source")
    for b in bias if bias is not None else ():
        if isinstance(b, Tensor) and b.ndim and b.shape != shape[:-1]:
            raise InputError(
                f"a bias of shape {shape_of(b)}: give a scalar or one per token, {tuple(shape[:-1])}"
            )


def check_mix(sources: Sequence[Tensor], weights: Weights) -> list[Tensor]:
    """Refuse what `mix` does not define; returns one weight per source, each broadcastable against it."""
    shape = _check_sources(sources)
    n, d = len(sources), shape[-1]
    if isinstance(weights, Tensor):
        if weights.shape not in ((n,), (n, d)):
            raise InputError(
                f"weights {shape_of(weights)}: give (n,) = ({n},), (n, d) = ({n}, {d}) or one tensor per source"
            )
        return list(weights.unbind(0))
    if len(weights) != n:
        raise InputError(f"{len(weights)} weights for {n} sources: give one per source")
    return [_token_weight(w, shape) for w in weights]


def _token_weight(w: Tensor, shape: torch.Size) -> Tensor:
    if w.ndim == 0 or w.shape == (*shape[:-1], 1):
        return w if len(shape) > 1 else w.reshape(())
    if w.shape == shape[:-1]:
        return w.unsqueeze(-1)
    raise InputError(
        f"weight {shape_of(w)} for sources {tuple(shape)}: give a scalar, {tuple(shape[:-1])} or (..., 1)"
    )


def check_token_mix(sources: Sequence[Tensor], weights: Tensor) -> None:
    """Refuse what `token_mix` does not define."""
    shape = _check_sources(sources)
    if (
        weights.ndim < 2
        or weights.shape[:-2] != shape[:-1]
        or weights.shape[-1] != len(sources)
        or not weights.shape[-2]
    ):
        raise InputError(
            f"weights {shape_of(weights)} for {len(sources)} sources {tuple(shape)}: give (..., O, n), O >= 1"
        )


def check_head_mix(sources: Sequence[Tensor], weight: Tensor, widths: Sequence[int]) -> None:
    """Refuse what `head_mix` does not define."""
    if isinstance(sources, Tensor):
        raise InputError("sources: give a tuple of (..., D, H_m), not a stacked tensor")
    if not isinstance(widths, Sequence) or any(type(width) is not int or width < 1 for width in widths):
        raise InputError(f"widths {widths!r}: give a tuple of integers above 0")
    if not sources or any(x.ndim < 2 or x.shape[:-1] != sources[0].shape[:-1] for x in sources):
        shapes = ", ".join(str(shape_of(x)) for x in sources)
        raise InputError(f"sources {shapes or 'none'}: give at least one, (..., D, H_m), alike but for H_m")
    for x in sources:
        check_floating("a source", x)
    heads, D = sum(x.shape[-1] for x in sources), sources[0].shape[-2]
    if weight.ndim != 2 or weight.shape[1] != heads:
        raise InputError(f"weight {shape_of(weight)} for sources of {heads} heads in all: give (H, {heads})")
    if sum(widths) != D:
        raise InputError(f"widths {tuple(widths)} of heads of {D}: give parts that make {D}")


def check_rewrite(state: Tensor, direction: Tensor, value: Tensor, gate: Tensor) -> bool:
    """Refuse what `delta_rewrite` does not define; returns True for an expanded state (..., d, m)."""
    check_floating("state", state)
    lead, expanded = direction.shape[:-1], state.ndim == direction.ndim + 1
    if (
        direction.ndim == 0
        or state.shape[: direction.ndim] != direction.shape
        or state.ndim > direction.ndim + 1
    ):
        raise InputError(
            f"state {shape_of(state)}, direction {shape_of(direction)}: give (..., d) or (..., d, m) and (..., d)"
        )
    allowed = [(*lead, state.shape[-1])] if expanded else [tuple(lead), (*lead, 1)]
    if tuple(value.shape) not in allowed:
        raise InputError(
            f"value {shape_of(value)} for state {shape_of(state)}: give {' or '.join(map(str, allowed))}"
        )
    if tuple(gate.shape) not in (tuple(lead), (*lead, 1)):
        raise InputError(
            f"gate {shape_of(gate)}: give one gate in (0, 2) per token, {tuple(lead)} or {(*lead, 1)}"
        )
    return expanded


def source_dtype(sources: Sequence[Tensor]) -> torch.dtype:
    """The dtype that holds all sources: results are cast to it once."""
    return reduce(torch.promote_types, (x.dtype for x in sources))


def check_streams(
    streams: Tensor,
    *,
    matrix: Tensor | None = None,
    joint: Tensor | None = None,
    weights: Tensor | None = None,
    mixing: Tensor | None = None,
    branch: Tensor | None = None,
    gain: Tensor | None = None,
) -> None:
    """Refuse what does not fit streams (..., n, d)."""
    check_floating("streams", streams)
    if streams.ndim < 3:
        raise InputError(
            f"streams {shape_of(streams)}: give (..., n, d) with at least one dimension of tokens"
        )
    *lead, n, d = streams.shape
    for name, x, says, last in (
        ("weights", weights, "(..., n)", (n,)),
        ("mixing", mixing, "(..., n, n)", (n, n)),
        ("branch", branch, "(..., d)", (d,)),
    ):
        if x is None:
            continue
        own, dims = x.shape[: x.ndim - len(last)], x.shape[x.ndim - len(last) :]
        repeats = name != "branch" and len(own) == len(lead) and all(a in (1, b) for a, b in zip(own, lead))
        if tuple(dims) != last or not (repeats or list(own) == lead):
            raise InputError(f"{name} {shape_of(x)} for streams {shape_of(streams)}: give {says}")
    if matrix is not None and (matrix.ndim != 2 or matrix.shape[0] != d):
        raise InputError(f"matrix {shape_of(matrix)} for streams {shape_of(streams)}: give (d, c)")
    if joint is not None and (joint.ndim != 2 or joint.shape[0] != n * d):
        raise InputError(f"matrix {shape_of(joint)} for streams {shape_of(streams)}: give (n d, c)")
    if gain is not None and gain.shape != (d,):
        raise InputError(f"gain {shape_of(gain)} for streams {shape_of(streams)}: give (d,)")


def _check_sources(sources: Sequence[Tensor]) -> torch.Size:
    if isinstance(sources, Tensor) or len(sources) == 0:
        raise InputError("sources: give a tuple of at least one (..., d) tensor, not a stacked tensor")
    shape = sources[0].shape
    if any(x.shape != shape for x in sources) or not shape:
        raise InputError(
            f"sources of shapes {[shape_of(x) for x in sources]}: give tensors of one shape (..., d)"
        )
    if not all(x.dtype.is_floating_point for x in sources):
        dtypes = ", ".join(str(x.dtype) for x in sources)
        raise InputError(f"sources of {dtypes}: give floating-point dtypes; cast before")
    return shape


def check_floating(name: str, x: Tensor) -> None:
    """Results are cast to the dtype of what is given: in integers they would be rounded."""
    if not x.dtype.is_floating_point:
        raise InputError(f"{name} {x.dtype}: give a floating-point dtype; cast before")


def shape_of(x: Tensor) -> tuple[int, ...]:
    """As messages show it."""
    return tuple(x.shape)
