"""The kernels of a decoding step: what each computes on a few tokens without gradients, and the equation of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from twoaxis.norm import RMSNorm
from twoaxis.ops import delta_rewrite, depth_read, gated_mix, reference, reference_steps
from twoaxis.ops.native import delta_step, few_tokens, gates_step, streams_step, window_step

Outputs = Sequence[Tensor]


@dataclass(frozen=True)
class Step:
    """An operator whose steps a kernel takes. run: as asked for, None where nothing does; exact: the equation."""

    operator: str
    kernel: str
    inputs: tuple[Tensor, ...]  # float64
    run: Callable[..., Outputs | None]
    exact: Callable[..., Outputs | None]
    one_thread: bool = field(default=False, kw_only=True)  # with more, torch's products are the better ones

    def error(self, dtype: torch.dtype) -> float:
        """Largest difference from the equation in float64, relative to max(1, largest entry)."""
        inputs = [x.to(dtype) for x in self.inputs]
        with torch.no_grad():
            found, exact = self.run(*inputs), self.exact(*(x.double() for x in inputs))
        if found is None or exact is None:
            return float("inf")
        pairs = zip(found, exact, strict=True)
        return max(((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)


def steps() -> Iterator[Step]:
    """One for each kind of call. Sizes are odd."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)

    sources, n = [(3, 1, 33)] * 7, 7
    yield Step(
        "depth_read step",
        "few_tokens",
        randn((33,), (33,), (33,), *sources),
        lambda q, key, out, *xs: [depth_read(q, xs, key_gain=key, output_gain=out, output_eps=1e-6)],
        lambda q, key, out, *xs: [
            reference.depth_read(q, xs, key_gain=key, output_gain=out, output_eps=1e-6)
        ],
    )
    yield Step(
        "gated_mix step",
        "few_tokens",
        randn((3, n, 33), (3, 33), *sources),
        lambda b, w, *xs: gated_mix(xs, b, w),
        lambda b, w, *xs: reference.gated_mix(xs, b, w),
    )

    def made(fast: bool, *inputs: Tensor) -> Outputs | None:
        x, down, up, bias, *xs = inputs
        if not fast:
            return reference_steps.made_mix(xs, x, up, bias, eps=1e-6, down=down)
        found = few_tokens.made(tuple(xs), x, up, bias, eps=1e-6, down=down)
        return None if found is None else found[0]

    def rows(query: Tensor, *rows: Tensor) -> Outputs | None:
        if query.dtype == torch.float64:
            keys, values = zip(*(row.split((8, 25), -1) for row in rows))
            weights = reference.depth_read(query, keys, key_norm_eps=None, return_weights=True)[1]
            return reference.token_mix(values, weights.unsqueeze(-2))
        read = few_tokens.rows_read(query, rows, 8, 1.0)
        return None if read is None else [read]

    yield Step("rows_read step", "few_tokens", randn((3, 1, 8), *sources), rows, rows)
    shapes = [(3, 1, 33), (20, 33), (4 * n, 20), (4, n), *sources]
    yield Step("made_mix step", "few_tokens", randn(*shapes), partial(made, True), partial(made, False))
    yield Step(
        "delta_rewrite step",
        "delta_rewrite",
        randn((3, 1, 33, 4), (3, 1, 33), (3, 1, 4), (3, 1, 1)),
        lambda X, h, v, beta: [delta_rewrite(X, h, v, beta, 1e-5)],
        lambda X, h, v, beta: [reference.delta_rewrite(X, h, v, beta, 1e-5)],
    )
    yield from _of_methods(randn)


def _of_methods(randn: Callable[..., tuple[Tensor, ...]]) -> Iterator[Step]:
    """Kernels that compute what one method reads."""

    def delta(read: Callable[..., Outputs | None], *inputs: Tensor) -> Outputs | None:
        X, kernel, taps, gain, g, g0, W, b = inputs
        return read(X, kernel, taps, gain, (g, g0), (W, b), eps=1e-6, scale=4.0, raw=True)

    shapes = [(3, 1, 33, 4), (33, 4), (4,), (33,), (1, 33), (1,), (4, 33), (4,)]
    reads = (delta_step.read, reference_steps.delta_read)
    yield Step("ddl step", "delta_step", randn(*shapes), *(partial(delta, read) for read in reads))

    def mhc(read: Callable[..., Outputs | None], X: Tensor, phi: Tensor, *rest: Tensor) -> Outputs | None:
        options = {"norm_eps": 1e-6, "output_eps": 1e-6, "write_scale": 2.0}
        return read(X, phi / 10, *rest, iterations=20, rows_last=True, **options)

    shapes = [(3, 1, 4, 33), (132, 24), (3,), (24,), (33,)]
    steps_of = (streams_step.mhc_read, reference_steps.mhc_read)
    yield Step("mhc step", "streams_step", randn(*shapes), *(partial(mhc, read) for read in steps_of))
    yield from _gates(randn)

    def hyper(read: Callable[..., Outputs | None], *inputs: Tensor) -> Outputs | None:
        X, fixed, W, s_alpha, s_beta, gain = inputs
        return read(X, fixed, W, (s_alpha, s_beta), gain, tanh=True, norm_eps=1e-6, output_eps=1e-6)

    shapes = [(3, 1, 4, 33), (4, 6), (33, 6), (), (), (33,)]
    both = (streams_step.hyper_read, reference_steps.hyper_read)
    yield Step("hyper step", "streams_step", randn(*shapes), *(partial(hyper, read) for read in both))


def _gates(randn: Callable[..., tuple[Tensor, ...]]) -> Iterator[Step]:
    def window(choose: Callable[..., Outputs | None], *inputs: Tensor) -> Outputs | None:
        found = choose(*inputs, 5, 4, 2, 1e-6)
        return None if found is None else [found[0], found[1].exp()]  # a share near 0 has any logarithm

    def axis(gate: Callable[..., Tensor | None], *inputs: Tensor) -> Outputs | None:
        found = gate(*inputs, 1e-6)
        return None if found is None else [found]

    windows = (gates_step.soft_window, reference_steps.soft_window)
    shapes: list[tuple[int, ...]] = [(3, 1, 33), (1, 33), (1,)]
    yield Step("soft_window step", "gates_step", randn(*shapes), *(partial(window, f) for f in windows))
    yield from _window_reads(randn)
    axes = (gates_step.axis_gate, reference_steps.axis_gate)
    shapes = [(3, 1, 33), (3, 1, 33), (3, 66), (3,)]
    yield Step("axis_gate step", "gates_step", randn(*shapes), *(partial(axis, f) for f in axes))


def _window_reads(randn: Callable[..., tuple[Tensor, ...]]) -> Iterator[Step]:
    """Of two heads with a bias and W_O, in a soft window."""

    def read(fast: bool, *inputs: Tensor) -> Outputs | None:
        A, W_V, W_O, bias, u, c, w, w_0, share, gain, *states = inputs
        p = reference_steps.Projections(A / 34, W_V / 6, W_O / 6, bias, 2, 0.25, 1e-6)
        chooser = reference_steps.Chooser(u, c, 3, 2, 0.1)
        if not fast:
            found = reference_steps.window_read(
                states,
                p,
                injection="gated",
                gate=(w, w_0),
                chooser=chooser,
                share=share,
                gain=gain,
                output_eps=1e-6,
            )
            return [x for x in found if x is not None]
        prepared, norm = window_step.prepare(p), RMSNorm(34, 1e-6)
        norm.weight.copy_(gain)
        if prepared is None:
            return None
        made = window_step.window_read(
            tuple(states), prepared, injection="gated", gate=(w, w_0), chooser=chooser, share=share, norm=norm
        )
        return None if made is None else [x for x in made if x is not None]

    matrices: list[tuple[int, ...]] = [(68, 34), (34, 34), (34, 34), (2, 4)]
    shapes = [*matrices, (1, 34), (1,), (1, 34), (1,), (3, 1), (34,), *[(3, 1, 34)] * 4]
    inputs = randn(*shapes)
    yield Step(
        "window_read step", "window_step", inputs, partial(read, True), partial(read, False), one_thread=True
    )
