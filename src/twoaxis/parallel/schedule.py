"""The orders in which a pipeline runs its micro-batches, and what they ask for."""

from __future__ import annotations

from twoaxis.errors import InputError
from twoaxis.model import ModelConfig

SCHEDULES = ("gpipe", "1f1b", "interleaved")


def check_schedule(schedule: str, n_ranks: int, virtual: int, micro_batches: int) -> None:
    """Refuse a schedule that does not exist or does not fit."""
    if schedule not in SCHEDULES:
        raise InputError(f"schedule={schedule!r}: allowed is {', '.join(SCHEDULES)}")
    if n_ranks < 2:
        raise InputError(f"a pipeline over {n_ranks} process: give 2 or more (torchrun --nproc-per-node 2)")
    if virtual < 1 or (virtual > 1) > (schedule != "1f1b"):
        raise InputError(
            f"schedule {schedule} with {virtual} stages per rank: 1f1b takes 1, others 1 or more"
        )
    if schedule == "1f1b" and micro_batches < n_ranks:
        raise InputError(f"1f1b over {n_ranks} stages needs as many micro-batches, not {micro_batches}")
    if schedule == "interleaved" and micro_batches % max(1, micro_batches // n_ranks):
        raise InputError(
            f"interleaved over {n_ranks} ranks: {micro_batches} micro-batches are not cut into rounds; "
            f"give a multiple of {n_ranks}"
        )


def check_dropout(model: ModelConfig) -> None:
    """Refuse a model that draws numbers while it runs."""
    if model.dropout:
        raise InputError(
            f"dropout={model.dropout}: a pipeline draws other numbers than one process; use dropout=0"
        )
