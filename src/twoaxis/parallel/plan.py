"""The plan of a pipeline: what crosses every boundary between stages, under each transport, in bytes.

| transport | what crosses a link                                                                     |
|-----------|-----------------------------------------------------------------------------------------|
| full      | the whole state, which holds only what a later layer reads (of a window: the window)    |
| cached    | of the entries that never change, those that the receiving rank has not seen yet        |
| push      | from some link on, one sum per later reader instead of the sources (`depth/reader.py`)  |

Stage s runs on rank s mod P. Gradients come back in the shapes of what was sent, so a link carries the same
bytes twice for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from twoaxis.errors import InputError
from twoaxis.model import Decoder, ModelConfig
from twoaxis.parallel.boundary import Boundary, boundaries, later_readers, pushed_boundary
from twoaxis.parallel.split import rank_of, split_blocks
from twoaxis.types import DTYPES, TensorSpec

Transport = Literal["full", "cached", "push"]
TRANSPORTS = get_args(Transport)
Links = list[tuple[Boundary, tuple[str, ...]]]  # the state between two stages, and what is sent of it


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline and what it does with the state, by names.

    receives: comes over the link; takes: is in the rank's cache from an earlier stage of it; sends: goes over
    the next link; keeps: goes into the cache, received or made here.
    """

    index: int
    rank: int
    blocks: range
    receives: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Link:
    """The boundary between stage `index` and the next. nbytes: of one micro-batch, for each transport."""

    index: int
    ranks: tuple[int, int]
    boundary: Boundary
    sends: tuple[str, ...]
    nbytes: dict[str, int]
    takes: str
    dtype: str | None

    @property
    def sent(self) -> dict[str, TensorSpec]:
        """The tensors that cross, as they cross."""
        specs = self.boundary.specs
        return {name: as_sent(specs[name], self.dtype) for name in self.sends}


@dataclass(frozen=True)
class Plan:
    """Stages, links, and the transport taken, for micro-batches of (batch_size, seq_len) tokens.

    held: by rank, the parameters that it holds.
    """

    cfg: ModelConfig
    batch_size: int
    seq_len: int
    n_ranks: int
    state_dtype: str
    transport: str
    stages: tuple[Stage, ...]
    links: tuple[Link, ...]
    held: tuple[frozenset[str], ...]

    @property
    def virtual(self) -> int:
        """Stages per rank."""
        return len(self.stages) // self.n_ranks

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes over all links for one micro-batch forward, for each transport that applies."""
        names = self.links[0].nbytes if self.links else {}
        return {name: sum(link.nbytes[name] for link in self.links) for name in names}

    def holders(self, name: str) -> list[int]:
        """The ranks that hold a parameter."""
        return [rank for rank, names in enumerate(self.held) if name in names]


def plan_pipeline(
    cfg: ModelConfig,
    n_ranks: int,
    virtual: int = 1,
    *,
    batch_size: int,
    seq_len: int,
    transport: str = "auto",
    counts: Sequence[int] | None = None,
    send_dtype: str | None = None,
    state_dtype: str | None = None,
) -> Plan:
    """Plan `virtual` stages on each of `n_ranks` for micro-batches of (batch_size, seq_len) tokens.

    transport: "auto" takes the one with the fewest bytes, the simplest of equals. counts: blocks per stage.
    send_dtype: what the state is cast to on its way, None leaves it. state_dtype: of a model whose states
    are not in its configuration's (a float64 model).

    Raises InputError for a transport that does not apply, and for splits and dtypes that do not exist.
    """
    if send_dtype is not None and send_dtype not in DTYPES:
        raise InputError(f"send_dtype={send_dtype!r}: allowed is {' or '.join(DTYPES)}")
    if n_ranks < 1 or virtual < 1:
        raise InputError(f"{n_ranks} ranks of {virtual} stages: allowed is 1 or more of each")
    split = split_blocks(cfg.n_blocks, n_ranks * virtual, counts)
    model, pulled, states = boundaries(cfg, batch_size, seq_len)
    ends = [blocks.stop for blocks in split[:-1]]
    every: dict[str, Links] = {"full": [(pulled[d], tuple(pulled[d].specs)) for d in ends]}
    if virtual > 1:
        every["cached"] = _cached(model, pulled, split, n_ranks)
    if all(model.stream.loose(d) is not None for d in ends):
        pushed = [pushed_boundary(model, pulled[d], states[d]) for d in ends]
        every["push"] = _push(every["full"], [(b, tuple(b.specs)) for b in pushed])
    dtype = send_dtype or state_dtype
    priced = {name: [_nbytes(link, dtype) for link in links] for name, links in every.items()}
    useful = {n: p for n, p in priced.items() if n == "full" or p != priced["full"]}
    taken = _choose(useful, transport, cfg.depth)
    links = tuple(
        Link(
            index=s,
            ranks=(rank_of(s, n_ranks), rank_of(s + 1, n_ranks)),
            boundary=boundary,
            sends=sends,
            nbytes={name: priced[name][s] for name in useful},
            takes="push" if boundary.pushed else "full" if taken == "push" else taken,
            dtype=dtype,
        )
        for s, (boundary, sends) in enumerate(every[taken])
    )
    stages = _stages(split, links, n_ranks)
    return Plan(
        cfg=cfg,
        batch_size=batch_size,
        seq_len=seq_len,
        n_ranks=n_ranks,
        state_dtype=state_dtype or cfg.state_dtype,
        transport=taken,
        stages=stages,
        links=links,
        held=_held(model, stages, links, n_ranks),
    )


def _choose(priced: dict[str, list[int]], asked: str, depth: str) -> str:
    if asked == "auto":
        return min(priced, key=lambda name: sum(priced[name]))
    if asked not in priced:
        raise InputError(
            f"transport={asked!r}: for {depth} over these stages allowed is auto, {', '.join(priced)}; "
            "cached needs several stages per rank and entries that never change, push reads by static weights"
        )
    return asked


def _cached(model: Decoder, pulled: list[Boundary], split: tuple[range, ...], n_ranks: int) -> Links:
    """Each rank keeps the unchanging entries that entered or left one of its stages."""
    seen: list[set[str]] = [set() for _ in range(n_ranks)]
    links: Links = []
    for s, blocks in enumerate(split[:-1]):
        entered, left = pulled[blocks.start], pulled[blocks.stop]
        here, there = seen[rank_of(s, n_ranks)], seen[rank_of(s + 1, n_ranks)]
        here.update(name for name in (*entered.specs, *left.specs) if model.stream.unchanging(name))
        links.append((left, tuple(name for name in left.specs if name not in there)))
    return links


def _push(full: Links, pushed: Links) -> Links:
    """The sources up to the best link, sums from there on: a sum cannot be taken apart again."""

    def total(first: int) -> int:
        return sum(_nbytes(link, None) for link in (*full[:first], *pushed[first:]))

    first = min(range(len(full) + 1), key=total)
    return [*full[:first], *pushed[first:]]


def _stages(split: tuple[range, ...], links: tuple[Link, ...], n_ranks: int) -> tuple[Stage, ...]:
    """What each stage does with the names that its links carry."""
    stages = []
    for s, blocks in enumerate(split):
        logical = tuple(links[s - 1].boundary.specs) if s else ()
        receives = links[s - 1].sends if s else ()
        takes = tuple(name for name in logical if name not in receives)
        sends = links[s].sends if s < len(links) else ()
        stages.append(Stage(s, rank_of(s, n_ranks), blocks, receives, takes, sends))
    for s, stage in enumerate(stages):
        later = {name for other in stages[s + n_ranks :: n_ranks] for name in other.takes}
        around = (*stage.receives, *(links[s].boundary.specs if s < len(links) else ()))
        fresh = [n for n in dict.fromkeys(around) if n in later and n not in stage.takes]
        stages[s] = replace(stage, keeps=tuple(fresh))
    return tuple(stages)


def _held(
    model: Decoder, stages: tuple[Stage, ...], links: tuple[Link, ...], n_ranks: int
) -> tuple[frozenset[str], ...]:
    """The parameters of each rank: its blocks, the method's stream, and the ends where it has them.

    A rank that sums sources for later readers holds their weights too.
    """
    names = [name for name, _ in model.named_parameters()]
    held: list[set[str]] = [{n for n in names if n.startswith("stream.")} for _ in range(n_ranks)]
    for stage in stages:
        mine = [f"blocks.{b}." for b in stage.blocks]
        if stage.index == 0:
            mine.append("embedding.")
        if stage.index == len(stages) - 1:
            mine.append("embedding." if model.cfg.tie_embeddings else "head.")
        elif links[stage.index].boundary.pushed:
            mine += [f"{at}.{r.weights}" for at, r in later_readers(model, stage.blocks.stop)]
        held[stage.rank] |= {n for n in names if n.startswith(tuple(mine))}
    return tuple(frozenset(h) for h in held)


def _nbytes(link: tuple[Boundary, tuple[str, ...]], dtype: str | None) -> int:
    boundary, sends = link
    return sum(as_sent(boundary.specs[name], dtype).nbytes for name in sends)


def as_sent(spec: TensorSpec, dtype: str | None) -> TensorSpec:
    """The spec of a tensor on its way."""
    return spec if dtype is None else TensorSpec(spec.shape, dtype)
