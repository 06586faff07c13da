"""MUDDFormer: a block's queries, keys, values and residual each read a mix of all block outputs so far.

A = W2 gelu(W1 rms(X_i)) + a   per token;   Z^c = sum_{j<=i} A[c, j] X_j,   c in Q, K, V, R (arXiv 2502.12170)
x = Attn(norm_q(Z^Q), norm_k(Z^K), norm_v(Z^V)) + Z^R,   X_{i+1} = x + MLP(norm(x));   end: norm(Z^R)

 X_0 ──────┬─ Z^Q ─ norm_q ─┐
 X_1 ──────┼─ Z^K ─ norm_k ─┼─ Attn ─ + ── x ─┬─ norm ─ MLP ─ + ── X_{i+1}
 X_i ──┬───┼─ Z^V ─ norm_v ─┘         │       └───────────────┘
       A   └─ Z^R ────────────────────┘

Sources are whole streams and Z^R is the only skip. At W2 = 0 and a one-hot: the standard Transformer.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from twoaxis import spec
from twoaxis.depth.connection import Connection, NamedStream, State, Stream, qkv_index
from twoaxis.depth.history import History
from twoaxis.depth.muddformer_mix import DenseMix, MUDDConfig, dense_mix_trace
from twoaxis.depth.trace import Trace
from twoaxis.norm import RMSNorm
from twoaxis.tape import Array
from twoaxis.types import Context, Layout, Reads

DEEP = 24  # blocks from which the plain form has been seen to diverge


@spec.register("depth", "muddformer")
class MUDDFormer(Connection):
    """read: norm(Z^Q + the branch so far), K and V alike; write: add to the branch; last, X = Z^R + branch.

    state between blocks: {"sources": X_0 .. X_i}, after the last block also read by `close`; with
    `pre_post_norm` the sources are normed once and {"stream": X_i} goes beside. Inside a block also the ways
    and {"branch"}. The mix before a block belongs to the block's first connection; block 0 reads the
    embeddings on every way.
    """

    equation = "Z^c = sum_j (W2 gelu(W1 rms(X_i)) + a)_cj X_j, c in Q, K, V, R"
    source = "arXiv 2502.12170"

    class Config(MUDDConfig):
        """The options of `MUDDConfig`."""

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        d, eps = layout.d_model, layout.norm_eps
        self.closes = index == len(layout.blocks[block]) - 1
        self.ways = cfg.way_names if block else ("r",)
        takes = block > 0 and cfg.ways > 1 and index == qkv_index(layout, block, self.method_name)
        self.mix = (
            DenseMix(cfg, layout, len(cfg.kept(block)), len(self.ways)) if index == 0 and block else None
        )
        self.norm = RMSNorm(d, eps)
        self.key_norm = RMSNorm(d, eps) if takes and "k" in self.ways else None
        self.value_norm = RMSNorm(d, eps) if takes and "v" in self.ways else None
        self.takes, self.kept = takes, len(cfg.kept(block + 1))
        self.source_norm = RMSNorm(d, eps) if cfg.pre_post_norm and self.closes else None

    def read(self, state: State, ctx: Context) -> tuple[Reads, State]:
        if self.index == 0 and (found := self.step(state)) is not None:
            return found
        if self.index == 0:
            x = newest(state)
            mixed = (x,) if self.mix is None else self.mix(state["sources"].sources, x)
            state = {**state, **{f"way.{c}": z for c, z in zip(self.ways, mixed, strict=True)}}
        so_far = state.get("branch")

        def way(c: str) -> Tensor:
            z: Tensor = state[f"way.{c}"]
            return z if so_far is None else z + so_far

        query = self.norm(way("q" if self.takes and "q" in self.ways else "r"))
        key = None if self.key_norm is None else self.key_norm(way("k"))
        value = None if self.value_norm is None else self.value_norm(way("v"))
        if self.takes:  # the others read the residual way
            state = {n: t for n, t in state.items() if n not in ("way.q", "way.k", "way.v")}
        return Reads(query, key, value), state

    def step(self, state: State) -> tuple[Reads, State] | None:
        """The read where it is one call, norms included."""
        first = "q" if self.takes and "q" in self.ways else "r"
        norms = {first: self.norm, "k": self.key_norm, "v": self.value_norm}
        if self.mix is None:
            return None
        found = self.mix.step(state["sources"].sources, newest(state), [norms.get(c) for c in self.ways])
        if found is None:
            return None
        ways, normed = (dict(zip(self.ways, z, strict=True)) for z in found)
        later = {f"way.{c}": z for c, z in ways.items() if c == "r" or not self.takes}
        key = None if self.key_norm is None else normed["k"]
        value = None if self.value_norm is None else normed["v"]
        return Reads(normed[first], key, value), {**state, **later}

    def write(self, state: State, carry: State, y: Tensor, ctx: Context) -> State:
        y = y.to(carry["way.r"].dtype)
        branch = carry["branch"] + y if "branch" in carry else y
        if not self.closes:
            return {**carry, "branch": branch}
        state = pushed(carry["sources"], carry["way.r"] + branch, self.source_norm)
        return {**state, "sources": state["sources"].last(self.kept, sink=1)}

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return MUDDStream(cfg, layout)

    @classmethod
    def network(cls, cfg: Any, layout: Layout) -> tuple[Stream, list[list[Connection]]]:
        if layout.n_blocks >= DEEP and cfg.dynamic and not cfg.pre_post_norm:
            warnings.warn(
                f"muddformer has been reported to diverge at {DEEP} blocks; pre_post_norm=True cured it",
                stacklevel=2,
            )
        return super().network(cfg, layout)


def newest(state: State) -> Tensor:
    """X_i: beside the sources when those are normed."""
    x: Tensor = state["stream"] if "stream" in state else state["sources"].sources[-1]
    return x


def pushed(sources: History, x: Tensor, norm: RMSNorm | None) -> State:
    """The state at a block boundary."""
    if norm is None:
        return {"sources": sources.push(x, carried=True)}
    return {"sources": sources.push(norm(x)), "stream": x}


class MUDDStream(NamedStream):
    """Opens with the embeddings as X_0, closes with one more mix, of the R way alone, and the final norm."""

    def __init__(self, cfg: Any, layout: Layout) -> None:
        super().__init__(cfg, layout)
        self.mix = DenseMix(cfg, layout, len(cfg.kept(layout.n_blocks)), 1, last=True)
        self.source_norm = RMSNorm(layout.d_model, layout.norm_eps) if cfg.pre_post_norm else None

    def open(self, x: Tensor, ctx: Context) -> State:
        return pushed(History.empty(self.layout), x, self.source_norm)

    def mixture(self, state: State) -> Tensor:
        """Z^R (B, T, d), the read-out before the final norm."""
        (mixture,) = self.mix(state["sources"].sources, newest(state))
        return mixture

    def close(self, state: State, ctx: Context) -> Tensor:
        return self.norm(self.mixture(state))


class MUDDTrace(Trace):
    """The same in sizes alone."""

    cfg: MUDDConfig

    def open(self, x: Array) -> State:
        return self.pushed(self.sources(), x, 0)

    def pushed(self, sources: History, x: Array, index: int) -> State:
        """The state at a block boundary."""
        normed = self.cfg.pre_post_norm
        grown = sources.push(self.t.norm(x) if normed else x, index, carried=not normed)  # type: ignore[arg-type]
        kept = {"sources": grown.keep(self.cfg.kept(index).__contains__)}
        return {**kept, "stream": x} if normed else kept

    def read(self, state: State, block: int, index: int) -> tuple[Any, State]:
        ways = self.cfg.way_names if block else ("r",)
        if index == 0:
            mixed = dense_mix_trace(self.t, self.cfg, state, len(ways)) if block else [newest(state)]
            state = {**state, **{f"way.{c}": z for c, z in zip(ways, mixed, strict=True)}}
        takes = block > 0 and self.cfg.ways > 1 and index == qkv_index(self.layout, block, self.cfg.name)
        so_far = [state["branch"]] if "branch" in state else []
        names = ["q" if takes and "q" in ways else "r", *(c for c in "kv" if takes and c in ways)]
        normed = {c: self.t.norm(self.t.add(state[f"way.{c}"], *so_far)) for c in names}
        if takes:
            state = {n: x for n, x in state.items() if n not in ("way.q", "way.k", "way.v")}
        return Reads(normed[names[0]], normed.get("k"), normed.get("v")), state  # type: ignore[arg-type]

    def write(self, state: State, carry: State, y: Array, block: int, index: int) -> State:
        branch = self.t.add(*([carry["branch"]] if "branch" in carry else []), self.t.state(y))
        if not self.closes(block, index):
            return {**carry, "branch": branch}
        return self.pushed(carry["sources"], self.t.add(carry["way.r"], branch), block + 1)

    def close(self, state: State) -> Array:
        (mixture,) = dense_mix_trace(self.t, self.cfg, state, 1, last=True)
        return super().close(mixture)


MUDDConfig.trace = MUDDTrace
