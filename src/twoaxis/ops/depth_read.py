"""The read over depth: per token, a weighted sum of states (arXiv 2603.16039, 2603.15031, 2607.27230)."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from . import choice, few_tokens
from .checks import Bias, Normalize, ReadOptions, check_read, source_dtype
from .first_order import first_order
from .known_read import known_read
from .native.depth_read import NativeRead, covers
from .native.few_tokens import scored as native_step
from .precision import compute_dtype, few, full_precision
from .pulled import pulled
from .token_read import Options, TokenRead


@overload
def depth_read(
    query: Tensor,
    sources: Sequence[Tensor],
    *,
    return_weights: Literal[False] = ...,
    **options: Unpack[ReadOptions],
) -> Tensor: ...
@overload
def depth_read(
    query: Tensor, sources: Sequence[Tensor], *, return_weights: Literal[True], **options: Unpack[ReadOptions]
) -> tuple[Tensor, Tensor]: ...
def depth_read(
    query: Tensor,
    sources: Sequence[Tensor],
    *,
    key_gain: Tensor | None = None,
    key_norm_eps: float | None = 1e-6,
    scale: float = 1.0,
    normalize: Normalize = "softmax",
    heads: int = 1,
    output_gain: Tensor | None = None,
    output_eps: float | None = None,
    bias: Bias | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """sum_i a_i v_i with a = normalize_i(scale <query, key_gain * rms(v_i)> + bias_i), per token.

    Sources are read in place and never stacked. Runs in at least float32, cast once to the sources' dtype.
    For backward it keeps the sources and, per token and source, one number per head and one for the key norm; inside
    the decoder's own loop a source's gradient is summed once for all its reads (`ops.pulled`).

    Projected reads need no projected sources: a key W_K^T v scores as <W_K q, v>, so pass the absorbed query
    W_K q with key_norm_eps=None and apply W_V once to the result.

    Args:
        query: (d,), the same for all tokens, or one per token, (..., d).
        sources: tuple of n tensors (..., d) of one shape.
        key_gain: (d,) gain of the key norm.
        key_norm_eps: epsilon of the key RMSNorm over the full d; None scores the raw sources.
        scale: of the logits, before the bias.
        normalize: over the sources: "softmax", "sigmoid" (each alone) or "none" (the logits are the weights).
        heads: slices of d with their own weights; the key norm comes before the split.
        output_gain, output_eps: the RMSNorm that follows the read, folded in.
        bias: (n,) or one scalar or (...) tensor per source; -inf hides a source. A token whose sources are
            all hidden reads 0.
        return_weights: also return a, (..., n) or (..., heads, n) float32 (float64), differentiable.

    Raises:
        InputError: for shapes that do not fit, heads that do not divide d, an unknown `normalize`.
    """
    options = Options(key_norm_eps, scale, normalize, heads, output_eps, return_weights)
    result: tuple[Tensor, Tensor] | None = None
    if bias is None or isinstance(bias, Tensor):  # the kernel takes nothing that is refused below
        rows = None if bias is None else bias.reshape(len(bias), -1)
        result = native_step(options, query, key_gain, output_gain, rows, sources)
    if result is None and (equation := choice.compiled("depth_read", query, *sources)) is not None:
        own: Tensor | tuple[Tensor, Tensor] = equation(
            query, tuple(sources), key_gain=key_gain, key_norm_eps=key_norm_eps, scale=scale, normalize=normalize,
            heads=heads, output_gain=output_gain, output_eps=output_eps, bias=bias, return_weights=return_weights,
        )  # fmt: skip
        return own
    if result is None and bias is None:
        result = known_read(options, query, key_gain, output_gain, sources)
    if result is None:
        check_read(query, sources, key_gain, normalize, heads, output_gain, output_eps, bias)
        result = _read(options, query, sources, key_gain, output_gain, bias)
    if not return_weights:
        return result[0]
    # from (n, tokens, heads)
    weights = result[1].movedim(0, -1).reshape(*sources[0].shape[:-1], heads, len(sources))
    return result[0], weights.squeeze(-2) if heads == 1 else weights


def _read(
    options: Options,
    query: Tensor,
    sources: Sequence[Tensor],
    key_gain: Tensor | None,
    output_gain: Tensor | None,
    bias: Bias | None,
) -> tuple[Tensor, Tensor]:
    """The read and its weights (n, N, H) by what covers them."""
    rows = None if bias is None else _bias_rows(bias, sources[0])
    if few(sources):
        found = None if rows is None else native_step(options, query, key_gain, output_gain, rows, sources)
        return found or few_tokens.depth_read(options, query, key_gain, output_gain, rows, sources)
    library = None
    if covers(options, sources):
        library = choice.kernel("depth_read", sources, (query, key_gain, output_gain, rows))
    result: tuple[Tensor, Tensor]
    pull, handles = pulled(tuple(sources))
    if library is not None:
        result = NativeRead.apply(library, pull, options, query, key_gain, output_gain, rows, *handles)
    else:
        result = _DepthRead.apply(pull, options, query, key_gain, output_gain, rows, *handles)
    return result


class _DepthRead(torch.autograd.Function):
    """(read, weights (n, N, H) or None) of N tokens; backward recomputes all but dots and norm factors."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:  # torch.compile counts parameters
        pull, o, query, key_gain, output_gain, bias, *sources = args
        with full_precision(sources[0]):
            read = TokenRead(o, query, key_gain, output_gain, bias, sources)
            out = read.empty(source_dtype(sources))
            dots = torch.empty(len(sources), len(out), o.heads, dtype=read.dtype, device=out.device)
            norms = dots.new_ones(len(sources), len(out), 1) if o.eps is not None else dots.new_ones(1, 1, 1)
            weights = torch.empty_like(dots) if o.return_weights else None
            for t in read.chunks:
                xs = read.take(t)
                read.score(xs, t, dots, norms)
                a = read.weights(dots[:, t], read.rows(norms, t), t)
                if o.output_eps is None and out.dtype == read.dtype:
                    read.mix(xs, a, out[t])
                else:
                    out[t] = read.normed(read.mix(xs, a))
                if weights is not None:
                    weights[:, t] = a
        ctx.o, ctx.pull = o, pull
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key_gain, output_gain, bias, dots, norms, *sources)
        return out.view(sources[0].shape), weights

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor | None, dweights: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key_gain, output_gain, bias, dots, norms, *sources = ctx.saved_tensors
        with full_precision(sources[0]):
            read = TokenRead(ctx.o, query, key_gain, output_gain, bias, sources)
            wanted = [want and ctx.pull is None for want in ctx.needs_input_grad[6:]]
            dsources = [read.empty(x.dtype) if want else None for x, want in zip(sources, wanted)]
            dkeyed = torch.zeros_like(read.keyed)
            dbias = None if bias is None else torch.zeros_like(dots[..., 0])
            dgain = None if read.output_gain is None else torch.zeros_like(read.output_gain)
            left = None if ctx.pull is None else read.left(dots)
            for t in read.chunks:
                xs, factors = read.take(t), read.rows(norms, t)
                a = read.weights(dots[:, t], factors, t)
                dmix = read.output_gradient(xs, a, dout, t, dgain)
                da = torch.stack([read.dot(x.to(read.dtype), dmix) for x in xs])
                if dweights is not None:
                    da += dweights[:, t]
                ds = read.logit_gradient(a, da, t)
                if dbias is not None:
                    dbias[:, t] = ds.sum(-1)
                c, inward = read.source_gradients(xs, t, a, ds, dots[:, t], factors, dmix, dkeyed, dsources)
                if left is not None:
                    left.g[t], left.weights[:, t], left.steps[:, t], left.backs[:, t] = dmix, a, c, inward
        if left is not None:
            ctx.pull.leave(left)
        dquery, dkey_gain = read.split_keyed(dkeyed, query, key_gain)
        if dbias is not None and bias.shape[1] == 1:
            dbias = dbias.sum(1, keepdim=True)
        shaped = (None if d is None else d.view(x.shape) for d, x in zip(dsources, sources))
        return None, None, dquery, dkey_gain, _like(dgain, output_gain), _like(dbias, bias), *shaped


def _bias_rows(bias: Bias, source: Tensor) -> Tensor:
    """(n, 1) from a bias per source, (n, N) from biases per source and token."""
    dtype, device, lead = compute_dtype(source), source.device, source.shape[:-1]
    if isinstance(bias, Tensor) and bias.ndim == 1:
        return bias.unsqueeze(1)
    rows = [torch.as_tensor(b, dtype=dtype, device=device).expand(lead).reshape(-1) for b in bias]
    return torch.stack(rows)


def _like(d: Tensor | None, x: Tensor | None) -> Tensor | None:
    return None if d is None or x is None else d.to(x.dtype)
