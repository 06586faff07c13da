"""Hold what a runner took and gave to the file: every output, every gradient, and no tensor left over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.rules import bound, error

Status = Literal["ok", "FAILED", "not run"]


@dataclass(frozen=True)
class Result:
    """The verdict on one file. Errors are the largest for their bound, None when nothing was compared.

    detail: what failed, or why the case was not run.
    """

    name: str
    family: str
    status: Status
    output_error: float | None = None
    gradient_error: float | None = None
    output_bound: float | None = None
    gradient_bound: float | None = None
    detail: str = ""


def check(case: Case, family: str) -> Result:
    """Compare a case after its runner: sum(output * cotangent) goes backward, all is held to the file."""
    rule = bound(family, case.stem, case.dtype)
    if rule is None:
        raise NotRun(f"no bound is known for {case.dtype}")
    gradients = _gradients(case)
    problems = [*_left_over(case), *_unwanted(case, gradients)]
    outputs: list[tuple[str, float, float]] = []
    for name, values in case.outputs.items():
        recorded = case.tensors[name]
        limit = bound(family, case.stem, recorded.dtype)
        for value in values:
            outputs.append((name, _error(value, recorded), limit.output if limit else 0.0))
    inward: list[tuple[str, float, float]] = []
    for name, recorded in case.tensors.items():
        target = case.gradient_of(name)
        if target is None:
            continue
        if target not in case.leaves:
            problems.append(f"gradient of {target} was not computed")
            continue
        limit = bound(family, case.stem, recorded.dtype)
        inward.append((name, _error(gradients[target], recorded), limit.gradient if limit else 0.0))
    problems += [
        f"{name} is off by {e:.1e} (bound {b:.0e})" for name, e, b in [*outputs, *inward] if not e <= b
    ]
    if not outputs:
        problems.append("no output was compared")
    output_error, output_bound = _worst(outputs, rule.output)
    gradient_error, gradient_bound = _worst(inward, rule.gradient)
    return Result(
        case.name,
        family,
        "FAILED" if problems else "ok",
        output_error,
        gradient_error,
        output_bound,
        gradient_bound,
        "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else ""),
    )


def _gradients(case: Case) -> dict[str, Tensor | None]:
    """The gradient of sum over outputs of output * cotangent with respect to every leaf."""
    loss: Tensor | None = None
    for name, cotangent in case.tensors.items():
        target = case.cotangent_of(name)
        if target is not None and target in case.outputs:
            term = (case.outputs[target][0] * cotangent).sum()
            loss = term if loss is None else loss + term
    if loss is None or not loss.requires_grad or not case.leaves:
        return dict.fromkeys(case.leaves)
    found = torch.autograd.grad(loss, list(case.leaves.values()), allow_unused=True)
    return dict(zip(case.leaves, found, strict=True))


def _left_over(case: Case) -> Iterator[str]:
    """Tensors of the file that the runner neither took nor gave."""
    for name in case.tensors:
        if case.gradient_of(name):
            continue
        target = case.cotangent_of(name)
        if target is not None:
            if target not in case.outputs:
                yield f"output {target} was not computed"
        elif name not in case.taken and name not in case.outputs:
            yield f"{name} was not used or computed"


def _unwanted(case: Case, gradients: dict[str, Tensor | None]) -> Iterator[str]:
    """Parameters that the file says have no gradient, and that have one here."""
    for name in case.meta.get("parameters_without_gradient", ()):
        for leaf in (name, f"param.{name}"):
            gradient = gradients.get(leaf)
            if gradient is not None and bool(gradient.any()):
                yield f"{leaf} has a gradient and should have none"


def _error(computed: Tensor | None, recorded: Tensor) -> float:
    if computed is None:  # unused by the loss: a gradient of zeros
        computed = torch.zeros_like(recorded)
    return error(computed, recorded) if computed.shape == recorded.shape else float("inf")


def _worst(rows: list[tuple[str, float, float]], usual: float) -> tuple[float | None, float]:
    """The error that is largest for its bound, and that bound; a NaN counts as the largest."""

    def excess(row: tuple[str, float, float]) -> float:
        _, e, bound = row
        return 0.0 if e == 0 else e / bound if e == e and bound else float("inf")

    _, error, bound = max(rows, key=excess, default=("", None, usual))
    return error, bound
