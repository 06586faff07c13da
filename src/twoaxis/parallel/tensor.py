"""Tensor parallelism: the heads of attentions and the inner widths of MLPs over several processes.

    x ──enter── W_q, W_k, W_v rows of own heads ── attention ── W_o columns of own heads ──leave── y
    x ──enter── W_gate, W_up rows of own share  ── product   ── W_down columns             ──leave── y

enter passes x and sums its gradient over the processes; leave sums y and passes its gradient (arXiv 1909.08053).
States, norms and everything of the depth axis are whole on each process. The styles below are
`torch.distributed.tensor.parallel`'s; a core keeps plain tensors of its rows, for its matrices are fused and methods
take parts of them. Where a depth method works inside a core, or a mixer does, that core stays whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from twoaxis.errors import InputError
from twoaxis.model import Decoder
from twoaxis.parallel.mesh import Mesh
from twoaxis.parallel.placement import Placement
from twoaxis.sequence import MLP, Mixer, SoftmaxAttention
from twoaxis.types import Context, Reads

log = logging.getLogger(__name__)


def cut(model: Decoder, mesh: Mesh) -> tuple[dict[str, Placement], frozenset[str]]:
    """Divide the cores of `model` over the tensor processes, in place.

    Returns where each divided parameter lies in the whole one, and the names of those that are whole but whose
    gradients have to be summed, for each process uses them for its heads only. Raises InputError where heads or
    widths do not divide.
    """
    styles = divided(model, mesh.sizes["tensor"])
    parallelize_module(model, mesh.devices["tensor"], dict(styles))
    left = [
        name
        for name, module in _present(model)
        if isinstance(module, MLP | SoftmaxAttention) and _whole(name, styles)
    ]
    if left and mesh.rank == 0:
        log.warning("tensor_parallel: %d cores stay whole on each process, such as %s", len(left), left[0])
    placed = {f"{name}.{p}": at for name, style in styles.items() for p, at in style.placements.items()}
    partial = {f"{name}.{p}" for name, style in styles.items() for p in style.partial}
    return placed, frozenset(partial)


def divided(model: Decoder, n: int) -> dict[str, Cut]:
    """The cores of `model` that n processes divide, by name, and how; nothing is divided yet."""
    styles: dict[str, Cut] = {}
    used = whole_calls(model)
    for name, module in _present(model):
        if name not in used or not _whole(name, styles):
            continue
        if isinstance(module, MLP) and not module.mixers:
            styles[name] = CutMLP(name, n)
        elif isinstance(module, SoftmaxAttention) and divisible(module):
            styles[name] = CutAttention(name, n)
    return styles


def _present(model: Decoder) -> list[tuple[str, nn.Module]]:
    """The modules that have parameters: not another stage's."""
    return [(n, m) for n, m in model.named_modules() if next(m.parameters(), None) is not None]


def divisible(core: SoftmaxAttention) -> bool:
    """Whether each head's part is its own: no mixer and no norm over heads, projections on both ends."""
    plain = core.token_read and not core.mixers and core.norm != "full"
    return plain and core.cfg.value != "identity" and core.cfg.output == "linear"


def whole_calls(model: Decoder) -> set[str]:
    """The cores that run as a whole, by name: those that a depth method enters by halves do not."""
    with torch.device("meta"), torch.no_grad():
        other = Decoder(model.cfg)
        seen: set[str] = set()
        for name, module in other.named_modules():
            if isinstance(module, Mixer):
                module.register_forward_hook(lambda *_, name=name: seen.add(name))
        other(torch.zeros(1, 2, dtype=torch.long))
    return seen


def _whole(name: str, styles: Mapping[str, Any]) -> bool:
    """Whether a module is neither divided nor part of one that is."""
    return not any(name == other or name.startswith(f"{other}.") for other in styles)


class Cut(ParallelStyle):
    """How one core is divided. placements: of its divided parameters; partial: whole ones with partial gradients."""

    def __init__(self, name: str, n: int) -> None:
        super().__init__()
        self.name, self.n = name, n
        self.placements: dict[str, Placement] = {}
        self.partial: tuple[str, ...] = ()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Keep this process's part of `module`, and sum over `device_mesh` on entering and leaving it."""
        self.divide(module, device_mesh.get_local_rank())
        group = device_mesh.get_group()
        module.register_forward_pre_hook(_entering(group))
        module.register_forward_hook(lambda _, args, y: Leave.apply(y, group))
        return module

    def divide(self, module: Any, rank: int) -> None:
        """Keep the part of process `rank`."""
        raise NotImplementedError

    def share(self, what: str, count: int) -> int:
        """A process's share of `count`; InputError if there is a remainder."""
        if count % self.n:
            raise InputError(
                f"tensor_parallel={self.n}: {self.name} has {count} {what}, which {self.n} does not divide"
            )
        return count // self.n

    def keep(self, module: nn.Module, parameter: str, dim: int, pieces: list[tuple[int, int]]) -> None:
        """Of dimension `dim` of a parameter only the (start, length) pieces."""
        *path, last = parameter.split(".")
        owner = module.get_submodule(".".join(path))
        whole = getattr(owner, last)
        place = Placement.whole(tuple(whole.shape)).cut(dim, pieces)
        setattr(owner, last, nn.Parameter(place.of(whole.detach())))
        self.placements[parameter] = place


class CutMLP(Cut):
    """An MLP: rows of W_gate and W_up, columns of W_down."""

    def divide(self, module: MLP, rank: int) -> None:
        hidden = module.down.in_features
        mine = self.share("inner features", hidden)
        starts = (0, hidden) if module.gated else (0,)
        self.keep(module, "up.weight", 0, [(start + rank * mine, mine) for start in starts])
        self.keep(module, "down.weight", 1, [(rank * mine, mine)])


class CutAttention(Cut):
    """An attention: some heads, with their keys and values."""

    def divide(self, module: SoftmaxAttention, rank: int) -> None:
        heads, pairs = self.share("heads", module.n_heads), self.share("key/value heads", module.n_kv_heads)
        starts = [sum(module.sizes[:i]) for i in range(len(module.sizes))]
        sizes = [size // self.n for size in module.sizes]
        rows = [(start + rank * size, size) for start, size in zip(starts, sizes, strict=True)]
        self.keep(module, "qkv.weight", 0, rows)
        width = heads * module.value_width
        self.keep(module, "out.weight", 1, [(rank * width, width)])
        for name in ("sink_logits", "position_bias"):
            if getattr(module, name, None) is not None:
                self.keep(module, name, 0, [(rank * heads, heads)])
        module.n_heads, module.n_kv_heads, module.sizes = heads, pairs, sizes
        self.partial = tuple(n for n, _ in module.named_parameters() if n.startswith(("q_norm.", "k_norm.")))


def _entering(group: dist.ProcessGroup) -> Callable[[nn.Module, Any], tuple[Reads, Context]]:
    def enter(module: nn.Module, args: Any) -> tuple[Reads, Context]:
        reads, ctx = args
        key, value = (None if t is None else Enter.apply(t, group) for t in (reads.key, reads.value))
        return Reads(Enter.apply(reads.x, group), key, value), ctx

    return enter


class Enter(torch.autograd.Function):
    """x, its gradient summed over a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """x."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The sum."""
        return summed(grads[0], ctx.group), None


class Leave(torch.autograd.Function):
    """y summed over a group, its gradient as it is."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The sum."""
        return summed(y, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient."""
        return grads[0], None


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over a group, in at least float32 and cast once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32), copy=True).contiguous()
    dist.all_reduce(wide, group=group)
    return wide.to(x.dtype)
