"""The three precisions: what is computed in which dtype.

| name        | weights of the model | master weights | products | residual state        |
|-------------|----------------------|----------------|----------|-----------------------|
| float32     | float32              | the same       | float32  | state_dtype           |
| autocast    | float32              | the same       | bfloat16 | state_dtype           |
| bf16_master | bfloat16             | float32        | bfloat16 | state_dtype           |

Optimiser, checkpoints and gradient sums always use the master weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from twoaxis.model import Decoder
from twoaxis.model.files import plain_name


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a forward pass runs."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


class Master:
    """The weights that are trained and saved: the model's own, or float32 masters of a bfloat16 model.

    named: parameter name -> master. Call `collect` after each backward pass and `publish` after each update.
    """

    def __init__(self, model: Decoder, precision: str) -> None:
        self.model = model
        self.separate = precision == "bf16_master"
        if self.separate:
            self.named = {n: nn.Parameter(p.detach().float()) for n, p in _named(model)}
            model.to(torch.bfloat16)
        else:
            self.named = dict(_named(model))

    def collect(self) -> None:
        """Add the model's gradients to the masters', in float32, and free them."""
        if self.separate:
            for name, weight in _named(self.model):
                if weight.grad is not None:
                    grad, master = weight.grad.float(), self.named[name]
                    master.grad = grad if master.grad is None else master.grad.add_(grad)
                    weight.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        if self.separate:
            for name, weight in _named(self.model):
                weight.copy_(self.named[name])

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Set every master; names and shapes must agree."""
        for name, master in self.named.items():
            master.copy_(weights[name])
        self.publish()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.named.values(), *self.model.parameters()):
            parameter.grad = None


def _named(model: Decoder) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, by the name it is saved under."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter
