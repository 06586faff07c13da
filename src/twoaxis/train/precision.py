"""The three precisions: what is computed in which dtype.

| name        | weights of the model | master weights | products | residual state        |
|-------------|----------------------|----------------|----------|-----------------------|
| float32     | float32              | the same       | float32  | state_dtype           |
| autocast    | float32              | the same       | bfloat16 | state_dtype           |
| bf16_master | bfloat16             | float32        | bfloat16 | state_dtype           |

Optimiser, checkpoints and gradient sums always use the master weights. The gradient of a bfloat16 model's only
micro-batch stays where backward left it: nothing is added to it, and the update reads it there.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from twoaxis.model import Decoder
from twoaxis.model.files import plain_name
from twoaxis.ops.native import adamw


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a forward pass runs."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


class Master:
    """The weights that are trained and saved: the model's own, or float32 masters of a bfloat16 model.

    named: parameter name -> master. Of a parameter that FSDP divides (which keeps float32 and computes in
    bfloat16 by itself) it is this process's share. rounded: parameter name -> the model's bfloat16 weight, which an
    update writes with its master. Call `collect` after each backward pass to which more will be added.
    """

    def __init__(self, model: Decoder, precision: str) -> None:
        self.weights = {
            plain_name(n): p for n, p in model.named_parameters()
        }  # FSDP swaps those of the model
        shares = {n: nn.Parameter(own) for n, p in self.weights.items() if (own := _share(p)) is not None}
        self.separate = precision == "bf16_master" and not shares
        if self.separate:
            self.named = {n: nn.Parameter(p.detach().float()) for n, p in self.weights.items()}
            model.to(torch.bfloat16)
        else:
            self.named = {**self.weights, **shares}
        self.rounded = self.weights if self.separate else {}

    def collect(self) -> None:
        """Add the model's gradients to the masters', in float32, and free them."""
        for name, weight in self.weights.items():
            master = self.named[name]
            if weight.grad is None or master is weight:
                continue
            if self.separate:
                widen(weight, master)
            else:
                master.grad = _share(weight.grad)  # FSDP adds to it in place

    def norm(self) -> float:
        """The norm of all gradients together, summed in at least float32."""
        found = adamw.norm(self._gradients())
        if found is None:
            self.collect()
            found = nn.utils.get_total_norm(self._gradients())
        return float(found)

    def _gradients(self) -> list[Tensor]:
        all_of_them = (gradient_of(p, self.rounded.get(n)) for n, p in self.named.items())
        return [grad for grad in all_of_them if grad is not None]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        if self.separate:
            for name, weight in self.weights.items():
                weight.copy_(self.named[name])

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Set every master; names and shapes must agree."""
        for name, master in self.named.items():
            master.copy_(weights[name])
        self.publish()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.named.values(), *self.weights.values()):
            parameter.grad = None


def widen(weight: nn.Parameter, master: nn.Parameter) -> None:
    """Add a weight's gradient to its master's, in float32, and free it."""
    if weight.grad is not None:
        grad = weight.grad.float()
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        weight.grad = None


def gradient_of(master: nn.Parameter, weight: nn.Parameter | None) -> Tensor | None:
    """A master's gradient: its own, or the one that backward left at its bfloat16 weight, as it is."""
    if weight is None or weight.grad is None:
        return master.grad
    if master.grad is not None:
        widen(weight, master)
        return master.grad
    return weight.grad


def _share(tensor: Tensor) -> Tensor | None:
    """This process's part of a divided tensor, without a copy; None of a plain one."""
    local = getattr(tensor, "_local_tensor", None)
    return None if local is None else local.detach()
