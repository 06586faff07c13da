"""One pass over a whole model, noted on a tape from the configuration alone."""

from __future__ import annotations

from typing import Any

from twoaxis.depth.history_spec import parse_history
from twoaxis.depth.trace import Core, Trace, run
from twoaxis.errors import InputError
from twoaxis.model.config import ModelConfig
from twoaxis.ops.traced import native_source
from twoaxis.sequence.mixer import Place
from twoaxis.tape import Array, Backend, Tape
from twoaxis.types import DTYPES

LONGEST = 1 << 24  # blocks of a window are laid out one by one


def traced(
    cfg: ModelConfig,
    batch_size: int,
    seq_len: int,
    dtype: str = "float32",
    decoding: bool = False,
    backend: Backend = "plain",
) -> Tape | None:
    """Every kernel of `model.loss`, or of the decoding step of token `seq_len`; None if a part has no trace."""
    depth, layout = cfg.depth_config(), cfg.layout()
    if seq_len > LONGEST:
        raise InputError(f"seq_len={seq_len}: costs are counted for at most {LONGEST} tokens; give fewer")
    if depth.trace is None:
        return None
    item = DTYPES[dtype].itemsize
    state = 8 if dtype == "float64" else DTYPES[layout.state_dtype].itemsize
    t = Tape(batch_size, seq_len, decoding, item, state, backend=backend)
    cores: list[list[Core]] = [
        [_core(core, Place(layout, b, depth.core_options_at(layout, b, i)), t) for i, core in enumerate(row)]
        for b, row in enumerate(cfg.block_configs())
    ]
    table = t.weight(cfg.vocab_size * cfg.d_model)
    with t.of("embedding"):
        tokens = t.array(1, 8, constant=True)
        x = t.state(t.run("embedding", (tokens, table), t.array(cfg.d_model), keep=(tokens,)))
    trace: Trace = depth.trace(depth, layout, t)
    t.entry, start = x, len(t.kernels)
    x = run(trace, x, cores)
    if parse_history(layout.history).recompute and not decoding:
        t.again = start, len(t.kernels)
    with t.of("head"):
        logits = t.linear(t.cast(x, t.itemsize), cfg.vocab_size)
        if not decoding:
            _loss(t, logits)
    return t


def _core(core: Any, at: Place, t: Tape) -> Core:
    def note(reads: Any, *between: Any) -> Array:
        with t.of(core.kind):
            made: Array = core.trace(t, reads, at, *between)
            return made

    return note


def _loss(t: Tape, logits: Array) -> None:
    """Cross-entropy keeps log-probabilities, targets, their total weight; its mean how many there are. Our kernel keeps
    the logits and two numbers of each token."""
    targets, count = t.array(1, 8, constant=True), t.table(1, 8, constant=True)
    if t.backend == "native" and native_source(logits, logits):
        scale = t.array(2, 4)
        t.run(
            "token_loss",
            (logits, targets),
            t.table(1),
            scale,
            keep=(logits, targets, scale),
            native=True,
            launches=2,
        )
    else:
        wide = t.cast(logits, max(4, logits.itemsize))
        probabilities, total = t.like(wide), t.table(1, wide.itemsize)
        t.run("log_softmax", (wide,), probabilities, keep=(probabilities,))
        t.run("nll_loss", (probabilities, targets), t.table(1), total, keep=(probabilities, targets, total))
    t.run("mean", (targets,), t.table(1), count, keep=(count,), launches=4)
