"""Speed, memory and decoding state of the rows, measured side by side on this machine.

Every row is built once and all take turns: one whole training step each, A B C, then C B A, and so on, so
that a machine that slows down slows all of them. The first turn of each is its warm-up (and compiles, if
that is on) and is reported apart. Tokens per second are the median over the other turns, with the slowest and
the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from twoaxis.data import load_corpus, load_tokenizer, prepare
from twoaxis.depth.stored import plain_parts
from twoaxis.model import Decoder
from twoaxis.train import TrainConfig
from twoaxis.train.precision import computing_in
from twoaxis.train.randomness import isolated
from twoaxis.train.session import Session

WARMUP = 1
TURNS = 4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one row.

    tokens_per_second: of each timed turn. first_step_seconds: the warm-up turn's. saved_bytes: kept for the
    backward pass of one micro-batch, each storage once, parameters left out. decode_state_bytes: the cache of
    one sequence of seq_len tokens.
    """

    tokens_per_second: list[float]
    first_step_seconds: float
    saved_bytes: int
    decode_state_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the median, the slowest and the fastest turn."""
        rates = self.tokens_per_second
        return asdict(self) | {"median": median(rates), "low": min(rates), "high": max(rates)}


def measure(
    configs: Mapping[str, TrainConfig],
    turns: int = TURNS,
    on_turn: Callable[[int, int], None] | None = None,
) -> dict[str, Measured]:
    """Measure every row of `configs` in turns. on_turn: called with (turns done, turns in all)."""
    names = list(configs)
    with ExitStack() as stack:
        stack.enter_context(isolated(0))
        sessions = {name: _session(cfg) for name, cfg in configs.items()}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(WARMUP + turns):
            for name in names if turn % 2 == 0 else reversed(names):
                seconds[name].append(_timed_step(sessions[name]))
            if on_turn:
                on_turn(turn + 1, WARMUP + turns)
        return {
            name: Measured(
                tokens_per_second=[configs[name].tokens_per_step / s for s in seconds[name][WARMUP:]],
                first_step_seconds=seconds[name][0],
                saved_bytes=saved_bytes(sessions[name]),
                decode_state_bytes=decode_state_bytes(sessions[name].model, configs[name].seq_len),
            )
            for name in names
        }


def saved_bytes(session: Session) -> int:
    """Bytes that autograd keeps between the forward and the backward pass of one micro-batch."""
    model, batch = session.model, next(session.loader)
    own = {_storage(p) for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        for part in plain_parts(tensor).values():
            if _storage(part) not in own:
                kept[_storage(part)] = part.untyped_storage()
        return tensor

    tokens, targets = batch.tokens.to(session.device), batch.targets.to(session.device)
    segments = None if batch.segments is None else batch.segments.to(session.device)
    with (
        computing_in(session.cfg.precision, session.device),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
    ):
        loss = model.loss(tokens, targets, segments=segments)
    del loss
    return sum(storage.nbytes() for storage in kept.values())


def decode_state_bytes(model: Decoder, seq_len: int) -> int:
    """Bytes of the decoding cache of one sequence of `seq_len` tokens."""
    return model.new_cache(1, max_length=seq_len).nbytes


def _session(cfg: TrainConfig) -> Session:
    corpus = load_corpus(cfg.data, cfg.valid_fraction)
    tokens, _ = prepare(corpus, load_tokenizer(cfg.tokenizer, corpus.train))
    return Session(cfg, tokens)


def _timed_step(session: Session) -> float:
    """Seconds of one whole optimiser step."""
    before = session.progress.seconds
    session.step()
    return session.progress.seconds - before


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
