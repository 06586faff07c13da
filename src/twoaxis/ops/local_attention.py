"""The one operator: causal attention over a window of an ordered axis, tokens or layers (2603.16039)."""

import torch
from torch import Tensor

from ..errors import InputError
from . import choice, reference
from .backends import blocked, flash, flex, sdpa
from .backends.plan import kept_keys
from .native import local_attention as native
from .precision import BF16_UNITS
from .token_checks import check_attention

BACKENDS = ("auto", "reference", "blocked", "native", "sdpa", "flex", "flash", "varlen")
_SMALL = 64  # up to so many keys in all a masked SDPA call is no slower than blocks


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    *,
    scale: float | None = None,
    segments: Tensor | None = None,
    sink_logits: Tensor | None = None,
    sink_tokens: int = 0,
    position_bias: Tensor | None = None,
    reach: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """o_t = sum_s p_ts v_s with p_t = softmax_s(scale q_t . k_s) over the visible keys s = t-window+1 .. t.

    Shapes: q (B, H, Tq, D); k, v (B, Hkv, Tk, D), Hkv divides H: query head h reads key head h // (H / Hkv).
    The queries are the last Tq of the Tk positions: Tq = 1 against a cache is a decode step, and the window
    still applies. Returns (B, H, Tq, D) in q's dtype; scores and softmax run in at least float32.

    Args:
        window: positions a query sees, its own included; None is full causal.
        scale: of the scores; D^-0.5 by default.
        segments: (B, Tk) integer ids; a query sees only keys of its own id. Ids below 0 are padding: such
            keys are seen by nobody, such queries give exactly 0 and get gradient 0.
        sink_logits: (H,) logits that join the softmax denominator, unscaled and without a value.
        sink_tokens: the first so many tokens of a query's segment stay visible beyond the window, counted
            once inside it. Segments must then not be interleaved.
        position_bias: (H, window), added to the scores by distance; not to sink tokens beyond the window.
        reach: (Tq,) or (B, Tq), a window of each query's own where that is shorter than `window`: with
            position % w + 1 nobody sees beyond the chunk of w tokens that it stands in.
        backend: "auto", or one of
            "reference": dense mask, differentiable twice;
            "blocked": every option, O(T window) work, saves only its inputs; first-order gradients;
            "native": the C++ kernel, on a CPU in float32 or bfloat16, without sink_tokens, position_bias and reach;
            "sdpa": torch's kernels, with segments and sink_tokens only; a window costs a (Tq, Tk) mask.
            "flex": FlexAttention, with segments or sink_tokens; on a CPU without gradients;
            "flash", "varlen": flash-attention, torch.nn.attention.varlen: with segments only, on a GPU in
            float16 or bfloat16.
            auto takes native where it has the options (unless TWOAXIS_BACKEND says otherwise) and there are more
            than 64 keys and several queries; else sdpa for full attention, one query or at most 64 keys if it has
            every option asked for (but not to train in bfloat16 on a CPU without units for it); else flash or varlen
            for a bare window where they run; else blocked. Under `torch.func`'s transforms and in forward mode
            the reference stands in for blocked, and in forward mode for sdpa.

    Raises:
        InputError: for a window that is not a positive integer or None, for shapes, dtypes or head counts
            that do not fit, and for a backend that lacks an option.
    """
    window = check_attention(q, k, v, window, segments, sink_logits, sink_tokens, position_bias, reach)
    backend = choose(backend, q, k, v, window, segments, sink_logits, sink_tokens, position_bias, reach)
    if backend == "reference" or _lacking(backend):
        return reference.local_attention(
            q, k, v, window, scale=scale, segments=segments, sink_logits=sink_logits, sink_tokens=sink_tokens,
            position_bias=position_bias, reach=reach,
        )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if backend == "native":
        library = choice.kernel("local_attention", (q, k, v), (segments, sink_logits), required=True)
        if library is not None:  # None under a tracer, which would see no kernel
            return native.attend(library, q, k, v, window, scale, segments, sink_logits)
    if backend == "sdpa":
        out = sdpa.attend(q, k, v, window, scale, segments, sink_tokens)
    elif backend == "flex":
        _only(backend, sink_tokens == 0 or segments is None, "sink_tokens together with segments")
        out = flex.attend(q, k, v, window, scale, segments, sink_tokens)
    elif backend in ("flash", "varlen"):
        _only(backend, sink_tokens == 0, "sink_tokens")
        out = flash.attend(q, k, v, window, scale, segments, backend)
    else:
        out = blocked.attend(q, k, v, window, scale, segments, sink_logits, sink_tokens, position_bias, reach)
    if segments is None:
        return out
    padded = segments[:, k.shape[2] - q.shape[2] :] < 0
    return out.masked_fill(padded[:, None, :, None], 0.0)


def choose(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    segments: Tensor | None = None,
    sink_logits: Tensor | None = None,
    sink_tokens: int = 0,
    position_bias: Tensor | None = None,
    reach: Tensor | None = None,
) -> str:
    """The backend that computes a checked call: `backend` itself, or what "auto" takes."""
    if backend not in BACKENDS:
        raise InputError(f"backend={backend!r}: give one of {', '.join(BACKENDS)}")
    covered = native.covers(q, sink_tokens, position_bias, reach)
    plain = sink_logits is None and position_bias is None and reach is None
    if backend == "native":
        _only(backend, covered, "sink_tokens, position_bias or reach, and no heads of more than 256")
    elif backend not in ("auto", "reference", "blocked"):
        _only(backend, plain, "sink_logits, position_bias or reach")
    if backend != "auto":
        return backend
    worth = covered and native.pays(q, k, window)
    library = choice.kernel("local_attention", (q, k, v), (segments, sink_logits)) if worth else None
    if library is not None and not native.bested(library, q, k, window):
        return "native"
    Tq, Tk = q.shape[2], k.shape[2]
    searched = segments is not None and sink_tokens > 0  # sdpa would look for sinks in the whole row
    small = not searched and (Tq == 1 or kept_keys(Tq, Tk, window) <= _SMALL)
    if plain and (small or window is None or window >= Tk):
        return "sdpa" if small or not _taken_apart(q) else "blocked"
    if plain and segments is None and not sink_tokens and flash.fits(q):
        return next((name for name in ("flash", "varlen") if flash.find(name)), "blocked")
    return "blocked"


def _lacking(backend: str) -> bool:
    """Whether transforms ask for derivatives that a backend lacks: blocks have autograd's, torch's kernel none that go
    forward."""
    return choice.transformed() if backend == "blocked" else backend == "sdpa" and choice.forward_mode()


def _taken_apart(q: Tensor) -> bool:
    """Whether torch's kernel would make its gradients number by number, six times slower than blocks do."""
    emulated = q.is_cpu and q.dtype == torch.bfloat16 and not BF16_UNITS
    return emulated and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _only(backend: str, fits: bool, what: str) -> None:
    if not fits:
        raise InputError(f"backend={backend!r} has no {what}: use 'auto' or 'blocked'")
