"""What one process of a divided run really holds in a step, beside what the dry run says of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from twoaxis.model import Decoder, ModelConfig, token_loss
from twoaxis.ops import choice
from twoaxis.train import TrainConfig
from twoaxis.train.dry_run import dry_run
from twoaxis.train.optimizer import Optimizer
from twoaxis.train.precision import Master
from twoaxis.train.team import Team

ROWS, LENGTH, VOCAB = 2, 6, 37


class Gathered:
    """The most bytes of whole weights that FSDP has put together at once."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.most = model, 0
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: self.look())
            module.register_forward_hook(lambda *_: self.look())
        for parameter in model.parameters():
            parameter.register_hook(lambda _: self.look())

    def look(self) -> None:
        groups = [
            m._get_fsdp_state()._fsdp_param_group for m in self.model.modules() if hasattr(m, "unshard")
        ]
        params = [p for group in groups if group for p in group.fsdp_params]
        sizes = [x.untyped_storage().nbytes() for p in params for x in p.all_gather_outputs]
        self.most = max(self.most, sum(sizes))


def saved_by(model: Decoder, tokens: Tensor, targets: Tensor, total: int) -> tuple[Tensor, int]:
    """A micro-batch's loss, and the bytes that autograd keeps for it, weights left out."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        own = {getattr(p, "_local_tensor", p).untyped_storage().data_ptr() for p in model.parameters()}
        storage = getattr(x, "_local_tensor", x).untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return x

    with choice.requesting("plain"), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = token_loss(model(tokens), targets) / total
    return loss, sum(storage.nbytes() for storage in kept.values())


def step(depth: str, options: dict[str, Any], more: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """(measured, counted) bytes of this process."""
    model_cfg = ModelConfig(vocab_size=VOCAB, d_model=24, n_heads=4, n_blocks=3, depth=depth, **more)
    given = {"batch_size": ROWS, "seq_len": LENGTH, "device": "cpu"}
    cfg = TrainConfig(model=model_cfg, **given, **options)
    torch.manual_seed(0)
    model = Decoder(model_cfg).train()
    rules = model.param_rules()
    team = Team(cfg, model, torch.device("cpu"))
    gathered = Gathered(model) if cfg.sharding == "fsdp" else None
    master = Master(model, cfg.precision)
    optimizer = Optimizer(master.named, rules, cfg, team.shares)
    tokens, targets = torch.randint(VOCAB, (2, ROWS, LENGTH))
    loss, saved = saved_by(model, tokens, targets, ROWS * LENGTH)
    loss.backward()
    master.collect()
    team.finish(master)
    optimizer.step(1e-3)
    named = master.named.values()
    measured = {
        "weights": sum(p.nbytes for p in named),
        "gradients": sum(p.grad.nbytes for p in named if p.grad is not None),
        "optimizer": sum(t.nbytes for t in optimizer.state().values()),
        "saved": saved,
        "gathered": 0 if gathered is None else gathered.most,
    }
    needs = dry_run(cfg).ranks[0]
    trained = needs.shared if cfg.sharding == "fsdp" else needs
    counted = {name: getattr(trained, name) for name in ("weights", "gradients", "optimizer")}
    counted |= {"saved": needs.activations + needs.state}
    return measured, counted | {"gathered": needs.gathered if cfg.sharding == "fsdp" else 0}
