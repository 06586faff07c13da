"""What a set of runs allows to be said: spreads over seeds, paired differences, verdicts in words.

A row is compared with the baseline on the seeds that both have, so that both saw the same data in the same
order. For differences d_1 .. d_n (row minus baseline, bits per byte; below 0 is better):

    interval    mean(d) +- t_{0.975, n-1} sd(d) / sqrt(n)                 Student's paired t
    p           two-sided, of the same test; Holm's step-down correction over all rows compared
    spread      the sample standard deviation over seeds, the larger of the two rows'

A row is called better or worse only if three or more seeds agree on it: p below 0.05 after correction, and
|mean(d)| larger than the spread. And only if the budgets are matched (see `budgets.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any, Literal

LEVEL = 0.05
ENOUGH_SEEDS = 3

Call = Literal["better", "worse", "inside the noise", "no ranking"]
Scores = Mapping[int, float]  # seed -> bits per byte


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What may be said of one row against the baseline.

    difference: the mean over `seeds`, row minus baseline. low, high: its 95% interval, None below two seeds.
    p: corrected, None where nothing was tested. words: the verdict as a sentence.
    """

    row: str
    call: Call
    words: str
    seeds: tuple[int, ...] = ()
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"seeds": list(self.seeds)}


def spread(values: Sequence[float]) -> float | None:
    """The sample standard deviation, None below two values."""
    return stdev(values) if len(values) > 1 else None


def paired(differences: Sequence[float]) -> tuple[float, float, float, float]:
    """(mean, low, high, p) of two or more paired differences: the 95% interval and the two-sided t-test."""
    n, centre = len(differences), mean(differences)
    error = stdev(differences) / math.sqrt(n)
    if error <= 1e-12 * max(map(abs, differences), default=0.0):  # equal up to rounding
        return centre, centre, centre, float(centre == 0)
    from scipy.stats import t

    half = float(t.ppf(1 - LEVEL / 2, n - 1)) * error
    p = 2 * float(t.sf(abs(centre) / error, n - 1))
    return centre, centre - half, centre + half, p


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (Scand. J. Statist. 6, 1979), in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def verdicts(
    scores: Mapping[str, Scores], baseline: str, unmatched: Mapping[str, str] | None = None
) -> list[Verdict]:
    """One verdict for each row but the baseline, in the order of `scores`.

    scores: row -> seed -> bits per byte of finished runs. unmatched: row -> why its budgets are not those of
    the baseline; such a row is never ranked, and neither is one whose seeds, like the baseline's, all gave the
    same score. Neither the order of rows nor that of seeds changes a verdict.
    """
    unmatched = unmatched or {}
    base = scores.get(baseline, {})
    shared = {row: sorted(base.keys() & own.keys()) for row, own in scores.items() if row != baseline}
    differences = {row: [scores[row][s] - base[s] for s in seeds] for row, seeds in shared.items()}
    tests = {row: paired(d) for row, d in differences.items() if len(d) > 1}
    alike = {row for row, seeds in shared.items() if _alike(base, seeds) and _alike(scores[row], seeds)}
    unmatched = dict.fromkeys(alike, "the seeds changed nothing, so they are one run") | dict(unmatched)
    ranked = sorted(row for row, d in differences.items() if len(d) >= ENOUGH_SEEDS and row not in unmatched)
    corrected = dict(zip(ranked, holm([tests[row][3] for row in ranked]), strict=True))
    result = []
    for row, seeds in shared.items():
        d = differences[row]
        facts: dict[str, Any] = {"row": row, "seeds": tuple(seeds), "difference": mean(d) if d else None}
        if row in tests:
            _, facts["low"], facts["high"], _ = tests[row]
        if row in corrected:
            facts["p"] = corrected[row]
            noise = max(stdev([own[s] for s in seeds]) for own in (base, scores[row]))
            result.append(_ranked(facts, noise, baseline))
        else:
            words = _no_ranking(len(seeds), unmatched.get(row), facts["difference"], baseline)
            result.append(Verdict(**facts, call="no ranking", words=words))
    return result


def _alike(own: Scores, seeds: Sequence[int]) -> bool:
    """Whether several seeds gave one and the same score."""
    return len(seeds) > 1 and len({own[s] for s in seeds}) == 1


def _ranked(facts: dict[str, Any], noise: float, baseline: str) -> Verdict:
    d, low, high, p = (facts[k] for k in ("difference", "low", "high", "p"))
    numbers = (
        f"{d:+.4f} bits per byte, 95% interval {low:+.4f} to {high:+.4f}, "
        f"spread over seeds {noise:.4f}, corrected p {p:.3f}, {len(facts['seeds'])} seeds"
    )
    if p >= LEVEL or abs(d) <= noise:
        return Verdict(
            **facts, call="inside the noise", words=f"inside the noise against {baseline}: {numbers}"
        )
    call: Call = "better" if d < 0 else "worse"
    return Verdict(
        **facts, call=call, words=f"{call} than {baseline} by {abs(d):.4f} bits per byte ({numbers})"
    )


def _no_ranking(n_seeds: int, unmatched: str | None, difference: float | None, baseline: str) -> str:
    reasons = []
    if n_seeds < ENOUGH_SEEDS:
        count = {0: "no finished seed in common", 1: "one seed", 2: "two seeds"}[n_seeds]
        reasons.append(f"{count}, {ENOUGH_SEEDS} or more are needed")
    if unmatched:
        reasons.append(unmatched)
    measured = (
        "" if difference is None else f" (measured: {difference:+.4f} bits per byte against {baseline})"
    )
    return f"no ranking: {'; '.join(reasons)}{measured}"
