"""Tensors that lie in parts on several processes, brought together on the first one."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
import torch.distributed as dist
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from twoaxis.parallel.mesh import Mesh
from twoaxis.parallel.placement import Placement, put


def gathered(parts: Mapping[str, tuple[Tensor, Placement]], mesh: Mesh) -> dict[str, Tensor] | None:
    """The whole tensors that the parts of all processes make, on the CPU of process 0; None on the others."""
    mine: dict[str, Tensor] = {}
    for name, (tensor, placement) in parts.items():
        for offsets, piece in placement.pieces(tensor.detach()):
            key = json.dumps([name, list(placement.shape), list(offsets)])
            mine[key] = piece.cpu().contiguous()
    if mesh.rank:
        data = torch.frombuffer(bytearray(to_bytes(mine)), dtype=torch.uint8).to(mesh.device)
        dist.send(torch.tensor([data.numel()], device=mesh.device), 0)
        dist.send(data, 0)
        return None
    whole: dict[str, Tensor] = {}
    _assemble(whole, mine)
    for rank in range(1, dist.get_world_size()):
        size = torch.zeros(1, dtype=torch.long, device=mesh.device)
        dist.recv(size, rank)
        data = torch.empty(int(size), dtype=torch.uint8, device=mesh.device)
        dist.recv(data, rank)
        _assemble(whole, from_bytes(data.cpu().numpy().tobytes()))
    return whole


def _assemble(whole: dict[str, Tensor], pieces: dict[str, Tensor]) -> None:
    for key, piece in pieces.items():
        name, shape, offsets = json.loads(key)
        if name not in whole:
            whole[name] = torch.empty(shape, dtype=piece.dtype)
        put(whole[name], tuple(offsets), piece)
