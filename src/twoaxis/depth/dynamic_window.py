"""Dynamic depth window: each token decides how far back over the block states it reads.

K_t = 1 + (K_l - 1) sigmoid(u_l . rms(h(l)) + c_l),   K_l = min(K_max, l + 1)               per block and token
m_z = clip((R + K_t - 1 - z) / R, 0, 1)                      of the state z blocks ago; m_0 = 1; R is the ramp
a_j = m_{l-j} exp(s_j) / sum_i m_{l-i} exp(s_i),  s_j = q . k_j / sqrt(D),   z_t = sum_j a_j v_j

 h(l-K+1) .. h(l-1) ─ m ──┐
 h(l) ──┬── K_t ───── read z_l ── W_O ──┐         the read and its place are those of depth_window,
        └───────────────────────────────+── block l+1 ── h(l+1)            with log m added to the scores

The soft window is that of adaptive spans (arXiv 1905.07799), with depth in the place of tokens. In the form
"gates" a token reads on as long as gates are open: m_z = g_1 g_2 .. g_z,  g_i = sigmoid(u_i . rms(h(l)) + c_i).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth.connection import State, Stream
from twoaxis.depth.dynamic_window_trace import DynamicWindowTrace
from twoaxis.depth.window_read import WindowRead
from twoaxis.depth.window_rule import Logits, States, added
from twoaxis.depth.windowed import Windowed, WindowedConfig, WindowedStream
from twoaxis.errors import InputError
from twoaxis.ops import rms
from twoaxis.ops.choice import transformed
from twoaxis.ops.native.few_tokens import unwatched
from twoaxis.ops.native.gates_step import soft_window
from twoaxis.ops.precision import compute_dtype, full_precision
from twoaxis.ops.reference_steps import Chooser
from twoaxis.types import Context, Coordinates, Layout, Reads, TensorSpec

OPEN = 30.0  # sigmoid(OPEN) is 1 in float32


@spec.register("depth", "dynamic_window")
class DynamicWindow(Windowed):
    """read: norm(x = h + W_O z), z over the last K_t states, at a block's first sublayer, else norm(x); write: x + y.

    state: that of depth_window and {"share": K_t / K_max (B, T), its mean over the blocks that choose, which is
    complete after the last}. The first block sees the embeddings alone and chooses nothing.
    """

    equation = (
        "x = h(l) + sum_j m_j exp(s_j) v_j / sum_i m_i exp(s_i), m_j = clip((R + K_t - 1 - (l - j)) / R)"
    )
    source = "arXiv 2603.16039, soft window of arXiv 1905.07799"

    class Config(WindowedConfig):
        """The options of `WindowedConfig`, and these.

        window_blocks: K_max, 2 or more. form: "soft" learns a window K_t with a soft edge, "gates" a gate for
        each step back. ramp_blocks: R, the width of the soft edge; K_max + R - 1 states are seen at most.
        """

        loss_term: ClassVar[str] = "window_share"

        window_blocks: int = 4
        form: Literal["soft", "gates"] = "soft"
        ramp_blocks: int = 1

        def check(self) -> None:
            if self.window_blocks < 2 or self.ramp_blocks < 1:
                raise InputError(
                    f"dynamic_window(window_blocks={self.window_blocks}, ramp_blocks={self.ramp_blocks}): allowed "
                    "is a window_blocks of 2 or more, there is nothing to choose from below, and a ramp_blocks of 1 "
                    "or more"
                )
            if self.form == "gates" and self.ramp_blocks != 1:
                raise InputError("dynamic_window(form='gates'): gates have no ramp; leave ramp_blocks out")
            super().check()

        @property
        def reach(self) -> int:
            return self.window_blocks + self.ramp_blocks - 1

        def choices(self, depth: int) -> int:
            """How many numbers the read after `depth` blocks makes of each token to choose its window."""
            return self.n_sources(depth) - 1 if self.form == "gates" else min(depth, 1)

        def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
            return {**super().state_spec(layout, depth, tensor), "share": TensorSpec(tensor.shape[:2])}

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="stream",
                weights="QK",
                normalizer="softmax",
                sharing="network" if self.shared else "per block",
                injection=self.injection,
                reads_per_block=1,
                short_swa=f"extended: window = 1 .. {self.window_blocks} over depth, chosen by content",
            )

        def read_parameters(self, counts: list[int], d: int) -> int:
            choices = sum(self.choices(depth) for depth in range(len(counts)))
            return super().read_parameters(counts, d) + choices * (d + 1)

        def read_flops(self, n: int, d: int) -> int:
            """Of one token's read of n states; choosing is 2 d for K_t or for each gate."""
            return super().read_flops(n, d) + 2 * d * self.choices(n - 1)

    def __init__(
        self, cfg: Any, layout: Layout, block: int, index: int, shared: WindowRead | None = None
    ) -> None:
        super().__init__(cfg, layout, block, index, shared)
        chooses = self.opens and block > 0
        made = SoftWindow if cfg.form == "soft" else Gates
        self.chooser = made(cfg, layout, block) if chooses else None
        self.part = 1 / (cfg.window_blocks * max(layout.n_blocks - 1, 1))  # of K_t in the network's mean

    def chosen(self, state: State, ctx: Context) -> tuple[States, Logits, Tensor | None]:
        """The states that some token reads, their logits, and K_t (B, T)."""
        states, logits = self.visible(state, ctx)
        if self.chooser is None:
            return states, logits, None
        if logits is None and (found := self.chooser.step(states[-1], len(states))) is not None:
            return states[-len(found[1]) :], found[1], found[0]  # type: ignore[return-value]
        K, masks = self.chooser(states[-1], len(states))
        if logits is not None:
            logits = logits[-len(masks) :]
        return states[-len(masks) :], added(logits, masks[::-1]), K

    def read_depth(self, state: State, ctx: Context | None = None) -> Tensor:
        assert self.window_read is not None
        states, logits, _ = self.chosen(state, ctx or Context())
        return self.window_read(states, logits, None if ctx is None else ctx.cache)

    def expected_depth(self, state: State, ctx: Context) -> Tensor | None:
        """K_t (B, T); with gates 1 + g_1 + g_1 g_2 + .."""
        return self.chosen(state, ctx)[-1]

    def read_widest(self) -> None:
        if self.chooser is not None:
            nn.init.constant_(self.chooser.bias, OPEN)

    def read(self, state: State, ctx: Context) -> tuple[Reads, tuple[Tensor, Tensor]]:
        if not self.opens:
            reads, x = super().read(state, ctx)
            return reads, (x, state["share"])
        assert self.window_read is not None
        if self.chooser is None or unwatched(self.chooser):
            choice = None if self.chooser is None else self.chooser.choice(self.part)
            if (found := self.step(state, ctx, choice)) is not None:
                return Reads(found[1]), (found[0], state["share"] if found[2] is None else found[2])
        states, logits, K = self.chosen(state, ctx)
        x = self.window_read.inject(states[-1], self.window_read(states, logits, ctx.cache))
        share = state["share"] if K is None else state["share"] + self.part * K
        return Reads(self.norm(x)), (x, share)

    def write(self, state: State, carry: tuple[Tensor, Tensor], y: Tensor, ctx: Context) -> State:
        x, share = carry
        return {**super().write(state, x, y, ctx), "share": share}

    @classmethod
    def ends(cls, cfg: Any, layout: Layout, shared: WindowRead | None) -> Stream:
        return DynamicStream(cfg, layout, shared)


class SoftWindow(nn.Module):
    """K_t and the logarithms of m_0, m_1, ..; u (d,) and c start at zero, so K_t in the middle."""

    def __init__(self, cfg: Any, layout: Layout, block: int) -> None:
        super().__init__()
        self.ramp, self.eps = cfg.ramp_blocks, layout.norm_eps
        self.most, choices = min(cfg.window_blocks, block + 1), cfg.choices(block)
        self.weight = nn.Parameter(torch.zeros(choices, layout.d_model))
        self.bias = nn.Parameter(torch.zeros(choices))

    def scores(self, h: Tensor) -> Tensor:
        """u . rms(h) + c, (B, T, choices), in at least float32."""
        dtype = compute_dtype(h)
        return F.linear(rms(h.to(dtype), self.eps), self.weight.to(dtype), self.bias.to(dtype))

    def choice(self, part: float) -> Chooser:
        """For a kernel that does the whole read."""
        return Chooser(self.weight, self.bias, self.most, self.ramp, part)

    def step(self, h: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
        """K (B, T) and log m (n or fewer, B, T), the oldest state first, in a step of decoding; None: by `forward`."""
        found = soft_window(h, self.weight, self.bias, n, self.most, self.ramp, self.eps)
        if found is None:
            return None
        K, logs = found
        return K, logs[n - self.seen(max(K.flatten().tolist()), n) :]

    def seen(self, widest: float, n: int) -> int:
        """Of n states those that some window of at most `widest` reaches."""
        return min(n, math.ceil(self.ramp + widest - 1)) if math.isfinite(widest) else n

    def forward(self, h: Tensor, n: int) -> tuple[Tensor, list[Tensor]]:
        """K (B, T) and log m (B, T) of ages 0 .. at most n - 1: those beyond every token's window are left out.

        Leaving them out reads a number off the device; under torch.compile and torch.func's transforms, and on meta
        tensors, all n stay.
        """
        R = self.ramp
        with full_precision(h):
            K = 1 + (self.most - 1) * self.scores(h).squeeze(-1).sigmoid()
            traced = torch.compiler.is_compiling() or transformed()
            if K.numel() and K.device.type != "meta" and not traced:
                n = self.seen(K.detach().max().item(), n)
            return K, [K.new_zeros(()), *(_log((R + K - 1 - z) / R) for z in range(1, n))]


def _log(m: Tensor) -> Tensor:
    """The logarithm of m clipped to 0 .. 1; -inf where it is 0, with no gradient."""
    hidden = m <= 0
    return m.clamp(max=1).masked_fill(hidden, 1).log().masked_fill(hidden, -torch.inf)


class Gates(SoftWindow):
    """K_t and the logarithms of 1, g_1, g_1 g_2, ..; u_i (d,) and c_i start at zero, so g_i at 1/2."""

    def choice(self, part: float) -> Chooser:
        return Chooser(self.weight, self.bias, self.most, 0, part)

    def step(self, h: Tensor, n: int) -> None:
        """No kernel for them alone."""

    def forward(self, h: Tensor, n: int) -> tuple[Tensor, list[Tensor]]:
        """K = sum_z m_z (B, T), and log m (B, T) of ages 0 .. n - 1."""
        with full_precision(h):
            logs = F.logsigmoid(self.scores(h)[..., : n - 1]).cumsum(-1)
            return 1 + logs.exp().sum(-1), [logs.new_zeros(()), *logs.unbind(-1)]


class DynamicStream(WindowedStream):
    """The stream of depth_window, with the share of the windows that tokens have read."""

    def open(self, x: Tensor, ctx: Context) -> State:
        share = x.new_zeros(x.shape[:2], dtype=compute_dtype(x))
        return {**super().open(x, ctx), "share": share}

    def loss_term(self, state: State) -> Tensor:
        """The mean of K_t / K_max over the blocks that choose, (B, T)."""
        share: Tensor = state["share"]
        return share


DynamicWindow.Config.trace = DynamicWindowTrace
