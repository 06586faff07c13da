"""An endless stream of training batches whose place can be saved and found again exactly."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from twoaxis.data.checks import choice, whole
from twoaxis.data.rows import PACKINGS, Batch, Layout, n_windows
from twoaxis.data.tokens import TokenFile
from twoaxis.errors import InputError

OFFSETS, ROWS, DOCUMENTS = range(3)  # what a permutation is for: each use has its own random stream


class Loader:
    """Batches of (batch_size, seq_len) from `tokens`, epoch after epoch, without end.

    An epoch cuts the tokens into rows side by side and visits each once, in an order given by (seed, epoch).
    Its first row starts at an offset below seq_len, and over seq_len epochs every offset comes up once, so
    every window of a stream is a row once before any is again. Up to seq_len tokens at either end are left
    out of an epoch. With shuffle=False every epoch is the same: offset 0 and rows in order.

    packing="stream" reads the text as one piece. "documents" lays whole documents end to end in an order
    given by (seed, epoch), marks them in `segments` and makes no target across a border; a document that
    passes the end of a row goes on in another row, without its earlier tokens.

    The order of rows is global: with `world_size` ranks, each takes its `batch_size` of the next batch_size *
    world_size rows. Micro-batches are successive batches. So the data depend neither on the model nor on
    how a global batch is divided. InputError for less than seq_len + 1 tokens.
    """

    def __init__(
        self,
        tokens: TokenFile,
        seq_len: int,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        packing: str = "stream",
    ) -> None:
        n_windows(tokens.n_tokens, whole("seq_len", seq_len, least=1))
        self.tokens = tokens
        self.seq_len = seq_len
        self.batch_size = whole("batch_size", batch_size, least=1)
        self.seed = whole("seed", seed, least=0)
        self.shuffle = shuffle
        self.world_size = whole("world_size", world_size, least=1)
        self.rank = whole("rank", rank, least=0)
        if rank >= world_size:
            raise InputError(f"rank must be below world_size {world_size}, not {rank}")
        self.packing = choice("packing", packing, PACKINGS)
        self._starts: NDArray[np.int64]  # (rows of the epoch,) in the order of visit
        self._open_epoch(0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._advance(self.rank * self.batch_size)  # rows of the ranks before
        pieces = self._advance(self.batch_size)
        self._advance((self.world_size - 1 - self.rank) * self.batch_size)
        parts = [layout.rows(starts, self.seq_len, self.packing) for layout, starts in pieces]
        if len(parts) == 1:
            return parts[0]
        segments = [part.segments for part in parts if part.segments is not None]
        return Batch(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.targets for part in parts]),
            torch.cat(segments) if segments else None,
        )

    def state_dict(self) -> dict[str, int | str | bool]:
        """Where the stream stands, and what it is a stream of: plain values, the same on every rank."""
        return {"epoch": self._epoch, "position": self._position} | self._identity()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place, also with another number of ranks or batch size.

        InputError if the data, the seed or the cutting differ, for then the rows ahead would be others.
        """
        expected = self._identity()
        if set(state) != {"epoch", "position", *expected}:
            raise InputError(
                f"not a loader state: it has {sorted(state)}; give what Loader.state_dict returned"
            )
        for name, value in expected.items():
            if state[name] != value:
                raise InputError(
                    f"cannot resume the data: saved with {name}={state[name]!r}, now {name}={value!r}; "
                    "use the same data and settings, or start a new run"
                )
        position = whole("position", state["position"], least=0)
        self._open_epoch(whole("epoch", state["epoch"], least=0))
        if position > len(self._starts):
            raise InputError(
                f"position {position} is beyond the epoch's {len(self._starts)} rows: a damaged state"
            )
        self._position = position

    def _identity(self) -> dict[str, int | str | bool]:
        """All that the order of rows depends on."""
        return {
            "tokens": self.tokens.digest,
            "seq_len": self.seq_len,
            "packing": self.packing,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def _open_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        n, step = self.tokens.n_tokens, self.seq_len
        offset, documents = 0, np.arange(len(self.tokens.documents) - 1)
        if self.shuffle:
            n_offsets = min(step, n_windows(n, step))
            cycle, turn = divmod(epoch, n_offsets)
            offset = int(self._permutation(n_offsets, OFFSETS, cycle)[turn])
            if self.packing == "documents":
                documents = self._permutation(len(documents), DOCUMENTS, epoch)
        self._starts = np.arange(offset, n - step, step)
        if self.shuffle:
            self._starts = self._starts[self._permutation(len(self._starts), ROWS, epoch)]
        self._layout = Layout.of(self.tokens, documents)

    def _permutation(self, n: int, purpose: int, number: int) -> NDArray[np.int64]:
        """A permutation of range(n) from raw generator bits, which NumPy keeps the same over its versions."""
        return np.argsort(np.random.PCG64([self.seed, purpose, number]).random_raw(n), kind="stable")

    def _advance(self, count: int) -> list[tuple[Layout, NDArray[np.int64]]]:
        """The next `count` rows as (layout, starts) of each epoch that they come from; moves behind them."""
        pieces = []
        while count:
            starts = self._starts[self._position : self._position + count]
            if len(starts):
                pieces.append((self._layout, starts))
            self._position += len(starts)
            count -= len(starts)
            if count:
                self._open_epoch(self._epoch + 1)
        return pieces
