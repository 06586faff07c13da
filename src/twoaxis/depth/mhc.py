"""mHC: Hyper-Connections whose stream mixing is doubly stochastic, so that products of it stay bounded.

h = P X,   X' = H X + Q^T f(norm(h))                                             (arXiv 2512.24880)
P = sigmoid(P~), Q = 2 sigmoid(Q~), H = Sinkhorn(R~);   [P~|Q~|R~] = a (z phi) + b,  z = vec(X) / rms(vec(X))

 X (n streams) ──┬── P ── norm ── f ── Q ──┐
                 ├── H ────────────────────+── X'          X_0 = n copies of the embeddings, y = sum_s X_s
                 └── z phi: P, H, Q of this token

Row t of H says what new stream t is made of: sum_s H[t, s] X_s. Public kernels store comb = H^T.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth import ahead
from twoaxis.depth.connection import Connection, DepthConfig, State, Stream
from twoaxis.depth.hyper_connections import HyperStream, read_streams
from twoaxis.depth.mhc_coefficients import Coefficients
from twoaxis.depth.mhc_trace import MHCTrace
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import permutation_matrices, permutation_mix, sinkhorn, stream_read, stream_write
from twoaxis.ops.joint_take import mhc_take
from twoaxis.ops.native.stream_pass import Taking
from twoaxis.ops.precision import cast, few, full_precision
from twoaxis.ops.stream_take import Taken
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape, StandardStart, TensorSpec

Carry = tuple[Tensor, Tensor | None] | Taken  # Q and H; or of few tokens Q and H X
APART = 8.0  # how far below 0 the logits of all but the identity start (public code of 2601.05732)


@spec.register("depth", "mhc")
class MHC(Connection):
    """read: norm(P X); write: H X + Q^T y.

    state: (B, T, n, d). Columns of phi (n d, 2n + n^2 or 2n + n!), b and scales a are in the order read,
    write, mixing (row-major). Nothing is decayed. The network's first sublayer meets equal streams and, with
    a summed read-out, nobody sees what its last one mixes: neither has a mixing. Runs in at least float32.
    """

    equation = "X' = H X + Q^T f(norm(P X)), H = Sinkhorn(R~) or sum_p softmax(R~)_p Perm_p"
    source = "arXiv 2512.24880"

    class Config(DepthConfig):
        """streams: n, 4 in the paper.
        mixing: "sinkhorn", or "permutations" (mHC-lite, arXiv 2601.05732): exact, n! logits, n up to 5.
        iterations: of Sinkhorn, two normalisations each. last: whose sums are exact, H's "rows" (paper) or
        "columns". eps: added to P and inside Sinkhorn (1e-6 in public code); z has the model's norm_eps.
        dynamic: P, Q and H depend on the token.
        gates: of P and Q, "sigmoid" or "softmax" over the streams; Q is multiplied by write_scale.
        readout: "sum" of the streams, or the "head" sum_s (sigmoid(a (z phi)_s + b_s) + eps) X_s.
        start: "standard" has phi = 0, a = 0.01, H near the identity, and P prefer stream k mod n at sublayer
        k; "random" draws phi from N(0, init_std^2), with a = 1 and b = 0.
        """

        streams: int = 4
        mixing: Literal["sinkhorn", "permutations"] = "sinkhorn"
        iterations: int = 20
        last: Literal["rows", "columns"] = "rows"
        eps: float = 0.0
        dynamic: bool = True
        gates: Literal["sigmoid", "softmax"] = "sigmoid"
        write_scale: float = 2.0
        readout: Literal["sum", "head"] = "sum"
        start: Literal["standard", "random"] = "standard"

        def check(self) -> None:
            most = 5 if self.mixing == "permutations" else None
            ranges = {
                "streams": (
                    1 <= self.streams <= (most or self.streams),
                    f"1 to {most}" if most else "1 or more",
                ),
                "iterations": (self.iterations >= 0, "0 or more"),
                "eps": (self.eps >= 0, "0 or more"),
                "write_scale": (self.write_scale > 0, "a number above 0"),
            }
            for name, (fits, allowed) in ranges.items():
                if not fits:
                    raise InputError(f"mhc({name}={getattr(self, name)}): allowed is {allowed}")
            if self.mixing == "permutations" and (self.iterations, self.last) != (20, "rows"):
                raise InputError(
                    "mhc(mixing='permutations'): iterations and last are for Sinkhorn; leave them out"
                )
            if not self.dynamic and self.start == "random":
                says = "mhc(dynamic=False, start='random'): its streams would never separate; leave out start"
                raise InputError(says)

        @property
        def mixers(self) -> int:
            """How many numbers one mixing is made from."""
            return math.factorial(self.streams) if self.mixing == "permutations" else self.streams**2

        def sizes(self, layout: Layout, sublayer: int) -> list[int]:
            """How many coefficients read, write and mix at a sublayer; 0 where they could not matter: a
            mixing, or gates that sum to 1, of equal streams at the start or before a sum at the end."""
            opens = self.streams == 1 or sublayer == 0
            ends = self.streams == 1 or (sublayer == layout.n_sublayers - 1 and self.readout == "sum")
            shares = self.gates == "softmax"
            read, write = (0 if shares and idle else self.streams for idle in (opens, ends))
            return [read, write, 0 if opens or ends else self.mixers]

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="stream",
                weights="gated" if self.dynamic else "static",
                normalizer="doubly stochastic",
                injection="mix",
                reads_per_block=2,
                short_swa="no: layers are summed into n running streams, none is kept or compared",
            )

        def standard_start(self) -> StandardStart:
            """With equal streams H X = X, and the norm takes the scale of P X; Q must be 1."""
            q = self.write_scale * (0.5 if self.gates == "sigmoid" else 1 / self.streams)
            return "up to eps" if self.start == "standard" and q == 1.0 else "no"

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """Per token and sublayer 2 d n (n + 2) flops to read, mix and write, and 2 d n per coefficient
            (2 n^2 more for a permutation); a head is one more read. Twice that backward.
            """
            layout, n, d = shape.layout, self.streams, shape.layout.d_model
            sublayers, heads = layout.n_sublayers, int(self.readout == "head")
            groups = [self.sizes(layout, k) for k in range(sublayers)]
            sizes = [size for group in groups for size in group if size] + [n] * heads
            mixing = sum(group[2] > 0 for group in groups)
            fixed = 2 * d * n * sum(group[:2].count(0) for group in groups)  # gates without a gradient
            coefficients = sum(sizes)
            applied = 2 * d * n * (2 * sublayers + n * mixing + heads)
            learned = 2 * d * n * coefficients if self.dynamic else 0
            table = 2 * n * n * self.mixers * mixing if self.mixing == "permutations" else 0
            dynamic = n * d * coefficients + len(sizes) if self.dynamic else 0
            rows = shape.tokens if self.dynamic else 1
            flops = (applied + learned) * shape.tokens + table * rows
            streams = TensorSpec((shape.batch_size, shape.seq_len, n, d), layout.state_dtype)
            return Cost(
                parameters=(sublayers + 1) * d + coefficients + dynamic,
                flops_forward=flops,
                flops_backward=2 * flops - table * rows - fixed * shape.tokens,
                boundary_bytes={"full": streams.nbytes},
            )

    matrices: Tensor | None

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        n, k = cfg.streams, layout.sublayer(block, index)
        self.norm: nn.Module = RMSNorm(layout.d_model, layout.norm_eps)
        read, write, mixers = sizes = cfg.sizes(layout, k)
        self.coefficients = Coefficients(cfg, layout, sizes)
        table = permutation_matrices(n) if mixers and cfg.mixing == "permutations" else None
        self.register_buffer("matrices", table, persistent=False)
        if cfg.start == "standard":
            prefer = torch.full((n,), -1.0)
            prefer[k % n] = 1.0
            identity = torch.eye(n).flatten() if cfg.mixing == "sinkhorn" else torch.eye(cfg.mixers)[0]
            parts = (prefer[:read], torch.zeros(write), APART * (identity - 1)[:mixers])
            self.coefficients.start_at(torch.cat(parts))

    def gates(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """P, Q (B, T, n) and H (B, T, n, n), None for no mixing; B = T = 1 if they are static."""
        if (found := self.coefficients.gates(self.cfg, X)) is not None:
            return found
        P, Q, R = self.coefficients(X)
        H = self.mixing(R) if R.shape[-1] else None
        P = self.gate(P)
        return P + self.cfg.eps if self.cfg.eps else P, self.cfg.write_scale * self.gate(Q), H

    def gate(self, logits: Tensor) -> Tensor:
        """Shares of the streams, equal ones without logits; or a sigmoid for each."""
        if self.cfg.gates == "sigmoid":
            return logits.sigmoid()
        n = self.cfg.streams
        return logits.softmax(-1) if logits.shape[-1] else logits.new_full((1, 1, n), 1 / n)

    def mixing(self, R: Tensor) -> Tensor:
        """H (..., n, n) from its logits (..., n^2), or (..., n!) for permutations."""
        if self.matrices is not None:
            return permutation_mix(R, self.matrices)
        n, cfg = self.cfg.streams, self.cfg
        return sinkhorn(R.unflatten(-1, (n, n)), cfg.iterations, last=cfg.last, eps=cfg.eps)

    def taking(self, streams: int) -> Taking | None:
        """The read and the gates as one node; None: by `gates`."""
        return self.coefficients.taking(self.cfg, streams, self.norm)

    def take(self, X: Tensor) -> Taken | None:
        """All that the sublayer takes, made ahead or now; None: by `gates`."""
        taking = self.taking(X.shape[-2])
        return None if taking is None else mhc_take(X, taking, ahead.made(taking, X))

    def read(self, state: State, ctx: Context) -> tuple[Reads, Carry]:
        if (found := self.coefficients.step(self.cfg, state, self.norm)) is not None:
            return Reads(found[0]), found[1:]
        if (taken := self.take(state)) is not None:
            return Reads(taken.read), taken
        with full_precision(state):
            P, Q, H = self.gates(state)
            if few((state,)) and H is not None and P.shape[:2] == H.shape[:2] == state.shape[:2]:
                return self.read_few(cast(state, P.dtype), P, Q, H, state.dtype)
        return Reads(read_streams(state, P, self.norm)), (Q, H)

    def read_few(
        self, X: Tensor, P: Tensor, Q: Tensor, H: Tensor, dtype: torch.dtype
    ) -> tuple[Reads, tuple[Tensor, Tensor]]:
        """The read in the few tokens of a step: one product reads and mixes, and the streams are carried mixed."""
        n, tokens = self.cfg.streams, X.shape[0] * X.shape[1]
        weights = torch.cat((P.view(tokens, 1, n), H.view(tokens, n, n)), 1)
        mixed = torch.bmm(weights, X.view(tokens, n, -1))  # (N, 1 + n, d)
        h = cast(mixed[:, 0], dtype).view(*X.shape[:2], -1)
        return Reads(self.norm(h)), (Q.view(tokens, n, 1), mixed[:, 1:])

    def write(self, state: State, carry: Carry, y: Tensor, ctx: Context) -> State:
        if isinstance(carry, Taken):
            return ahead.write(self, carry, state, y)
        Q, H = carry
        if H is None or H.ndim > 3:
            return stream_write(state, H, Q, y)
        with full_precision(state):  # X was mixed by the read
            o = cast(y, Q.dtype).view(len(Q), 1, -1)
            return cast(torch.addcmul(H, Q, o).view(state.shape), state.dtype)

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return MHCStream(cfg, layout)


class MHCStream(HyperStream):
    """Opens with n copies of the embeddings, closes with the final norm of the summed or weighed streams."""

    def __init__(self, cfg: Any, layout: Layout) -> None:
        super().__init__(cfg, layout)
        self.eps = cfg.eps
        self.head = Coefficients(cfg, layout, [cfg.streams]) if cfg.readout == "head" else None

    def readout(self, state: State) -> Tensor:
        """y (B, T, d), before the final norm."""
        if self.head is None:
            return super().readout(state)
        return stream_read(state, self.shares(state))

    def shares(self, state: Tensor) -> Tensor:
        """What the head takes of each stream, (B, T, n) or (1, 1, n)."""
        assert self.head is not None
        with full_precision(state):
            return self.head(state)[0].sigmoid() + self.eps

    def close(self, state: State, ctx: Context) -> Tensor:
        if self.head is None:
            return super().close(state, ctx)
        return read_streams(state, self.shares(state), self.norm)


MHC.Config.trace = MHCTrace
