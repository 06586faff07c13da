"""Which blocks each stage of a pipeline runs, and which rank runs which stages."""

from __future__ import annotations

from collections.abc import Sequence

from twoaxis.errors import InputError


def split_blocks(n_blocks: int, n_stages: int, counts: Sequence[int] | None = None) -> tuple[range, ...]:
    """The blocks of each stage, in order.

    counts: how many each stage runs; 0 is allowed (the first stage embeds and the last has the head, also
    without blocks). By default they differ by at most one, the longer ones first.

    Raises InputError for counts that are not one number per stage and add up to `n_blocks`.
    """
    if n_stages < 1:
        raise InputError(f"a pipeline of {n_stages} stages: allowed is 1 or more")
    if counts is None:
        least, more = divmod(n_blocks, n_stages)
        counts = [least + (stage < more) for stage in range(n_stages)]
    if len(counts) != n_stages or min(counts) < 0 or sum(counts) != n_blocks:
        raise InputError(
            f"a split of {n_blocks} blocks into {list(counts)} for {n_stages} stages: give one number of 0 or "
            f"more per stage, {n_blocks} in all"
        )
    ends = [sum(counts[: stage + 1]) for stage in range(n_stages)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def rank_of(stage: int, n_ranks: int) -> int:
    """The rank that runs a stage: stages go round the ranks."""
    return stage % n_ranks
