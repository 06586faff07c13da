"""What is asked of the adviser and what it answers: request, objections, trials, advice."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from twoaxis.cost.fork import Goal, check_goal
from twoaxis.cost.hardware import Hardware
from twoaxis.cost.load import Load
from twoaxis.cost.mesh import Mesh
from twoaxis.cost.rows import Row
from twoaxis.cost.sizes import Size
from twoaxis.errors import InputError
from twoaxis.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked. budget: how much longer a step may take, as a share. window: of the local mixer."""

    size: Size
    machine: Hardware
    load: Load
    mesh: Mesh = field(default_factory=Mesh)
    goal: Goal = "any"
    window: int = 64
    budget: float = 0.15

    def __post_init__(self) -> None:
        check_goal(self.goal)
        if type(self.window) is not int or self.window < 1:
            raise InputError(f"window={self.window!r}: allowed is an integer of 1 or more")
        if self.window > self.load.seq_len:
            raise InputError(
                f"window={self.window} is larger than the context of {self.load.seq_len} tokens; "
                f"give a window of at most {self.load.seq_len}, or a longer --seq-len"
            )
        if not 0 < self.budget < 100:
            raise InputError(f"budget={self.budget!r}: allowed is a share above 0, such as 0.15")
        self.mesh.check(self.size.model, self.load.seq_len)

    @property
    def model(self) -> ModelConfig:
        """The standard model, its state in the load's dtype."""
        return dataclasses.replace(self.size.model, state_dtype=self.load.dtype)


@dataclass(frozen=True)
class Objection:
    """Why a candidate is not taken. kind: memory, window, price, own. by: what takes the price."""

    kind: str
    words: str
    by: str = ""


@dataclass(frozen=True)
class Trial:
    """A candidate and what speaks against it; it is taken if nothing does."""

    row: Row
    objections: tuple[Objection, ...]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The decision, how it came about, and the table behind it.

    fork: the paper's words. trials: candidates in order, the last one is taken. against: the strongest case
    against it first. experiment: a command that would settle it. notes: what was left out of the predictions.
    """

    request: Request
    fork: str
    trials: tuple[Trial, ...]
    rows: tuple[Row, ...]
    against: tuple[str, ...] = ()
    experiment: str = ""
    notes: tuple[str, ...] = ()

    @property
    def choice(self) -> Row:
        """What is recommended."""
        return self.trials[-1].row

    @property
    def reasons(self) -> tuple[tuple[str, str, str], ...]:
        """(candidate, kind, by) of every objection on the way."""
        return tuple((t.row.point.name, o.kind, o.by) for t in self.trials for o in t.objections)
