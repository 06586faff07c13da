"""Gradients over the ranks of a pipeline: parameters that several ranks hold, the norm, clipping."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twoaxis.parallel.plan import Plan


class Gradients:
    """What the ranks of a plan have to agree on after a backward pass.

    group: the pipeline's processes, rank by rank as in the plan; None is all of them.
    """

    def __init__(self, plan: Plan, group: dist.ProcessGroup | None = None) -> None:
        self.plan, self.group, self.rank = plan, group, dist.get_rank(group)
        self.shared: dict[tuple[int, ...], list[str]] = {}
        for name in sorted(set().union(*plan.held)):
            holders = tuple(plan.holders(name))
            if len(holders) > 1:
                self.shared.setdefault(holders, []).append(name)

    @torch.no_grad()
    def sum_shared(self, named: Mapping[str, nn.Parameter]) -> None:
        """Give every holder of a shared parameter the sum of all holders' gradients.

        A holder that did not use it counts as zero; if none did, the gradient stays None.
        """
        for holders in (h for h in self.shared if self.rank in h):
            parameters = [named[name] for name in self.shared[holders]]
            used = torch.tensor([p.grad is not None for p in parameters]).to(parameters[0])
            parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
            flat = torch.cat([used, *parts])
            self._sum_over(holders, flat)
            used, *sums = flat.split([len(parameters), *(p.numel() for p in parameters)])
            for parameter, total, any_use in zip(parameters, sums, used.tolist(), strict=True):
                parameter.grad = total.view_as(parameter).clone() if any_use else None

    def _sum_over(self, holders: tuple[int, ...], flat: Tensor) -> None:
        """Sum a tensor over some ranks, in place; the first of them adds, in one order for all."""
        first, *others = holders
        if len(holders) == self.plan.n_ranks:
            dist.all_reduce(flat, group=self.group)
        elif self.rank == first:
            part = torch.empty_like(flat)
            for rank in others:
                dist.recv(part, group=self.group, group_src=rank)
                flat += part
            for rank in others:
                dist.send(flat, group=self.group, group_dst=rank)
        else:
            dist.send(flat, group=self.group, group_dst=first)
            dist.recv(flat, group=self.group, group_src=first)

    @torch.no_grad()
    def clip(self, named: Mapping[str, nn.Parameter], largest: float) -> float:
        """Scale all gradients to a norm of at most `largest` over all ranks (0: leave them); the norm before.

        A parameter that several ranks hold counts once.
        """
        mine = [p.grad for n, p in named.items() if p.grad is not None and self._counts(n)]
        square = sum((g.double().square().sum() for g in mine), torch.zeros((), dtype=torch.float64))
        dist.all_reduce(square, group=self.group)
        norm = float(square.sqrt())
        scale = min(largest / (norm + 1e-6), 1.0) if largest > 0 else 1.0
        for parameter in named.values():
            if parameter.grad is not None and scale < 1:
                parameter.grad.mul_(scale)
        return norm

    def _counts(self, name: str) -> bool:
        return self.plan.holders(name)[0] == self.rank

    def from_last(self, value: Tensor) -> Tensor:
        """A tensor of the rank that runs the last stage, on every rank."""
        last = self.plan.stages[-1].rank
        dist.broadcast(value, group=self.group, group_src=last)
        return value
