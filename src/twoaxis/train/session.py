"""One run in memory: model, optimiser, data and counters; its step, its validation, its checkpoint."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from twoaxis.cost import cost
from twoaxis.data import Batch, Loader, TokenFile
from twoaxis.errors import InputError, RunError
from twoaxis.model import Decoder, load_weights, read_safetensors, token_loss
from twoaxis.model.files import weights_of
from twoaxis.train.checkpoint import newest_checkpoint, save_checkpoint
from twoaxis.train.config import TrainConfig
from twoaxis.train.device import allow_graphs, choose_device
from twoaxis.train.evaluation import evaluate
from twoaxis.train.optimizer import Optimizer, clip_gradients
from twoaxis.train.pipelined import Pipelined, processes
from twoaxis.train.precision import Master, computing_in
from twoaxis.train.randomness import isolated, random_state, set_random_state
from twoaxis.train.run import weights_folder
from twoaxis.train.schedule import lr_factor


@dataclass
class Progress:
    """How far a run is. seconds: spent in steps, without validation and saving."""

    step: int = 0
    tokens: int = 0  # input tokens
    flops: int = 0  # forward and backward
    seconds: float = 0.0


class Session:
    """A run of `cfg` on `tokens`, fresh or from a checkpoint folder."""

    def __init__(self, cfg: TrainConfig, tokens: TokenFile, checkpoint: Path | None = None) -> None:
        self.cfg, self.device = cfg, choose_device(cfg.device)
        self.loader = Loader(tokens, cfg.seq_len, cfg.batch_size, cfg.seed, packing=cfg.packing)
        self.progress = Progress()
        self.flops_per_step = cost(cfg.model, cfg.batch_size, cfg.seq_len).flops * cfg.accumulation
        self.model = Decoder(cfg.model)
        weights = checkpoint or (weights_folder(cfg.init) if cfg.init else None)
        if weights:
            load_weights(self.model, weights / "model.safetensors")
        self.model.float().to(self.device).train()
        self.model.checkpointing = cfg.checkpointing
        rules = self.model.param_rules()
        self.n_parameters = sum(p.numel() for p in self.model.parameters())
        many = cfg.pipeline > 1 and processes() > 1
        self.pipelined = Pipelined(cfg, self.model, self.device) if many else None
        self.master = Master(self.model, cfg.precision)
        self.optimizer = Optimizer(self.master.named, rules, cfg)
        if checkpoint:
            self._load(checkpoint)
        if cfg.compile:
            allow_graphs(cfg.model.n_blocks)
            for block in self.model.blocks:
                block.compile()

    def step(self) -> dict[str, Any]:
        """One optimiser step; its row of metrics.jsonl. RunError instead of an update that is not finite."""
        started, at = time.perf_counter(), self.progress
        batches = [next(self.loader) for _ in range(self.cfg.accumulation)]
        self.master.zero_grad()
        loss, targets, terms, norm = self._gradient(batches)
        for what, value in (("loss", loss), ("norm of the gradient", norm)):
            if not math.isfinite(value):
                raise RunError(f"step {at.step + 1}: the {what} is {value}")
        lr = self.cfg.lr * lr_factor(self.cfg, at.step + 1)
        self.optimizer.step(lr)
        self.master.publish()
        at.step += 1
        at.tokens += self.cfg.tokens_per_step
        at.flops += self.flops_per_step
        at.seconds += time.perf_counter() - started
        return asdict(at) | {"loss": loss, "lr": lr, "grad_norm": norm, "targets": targets} | terms

    def _gradient(self, batches: list[Batch]) -> tuple[float, int, dict[str, float], float]:
        """Leave the step's gradient, clipped, in `master`: loss, targets, other terms, the norm before."""
        cfg = self.cfg
        if self.pipelined is not None:
            loss, targets = self.pipelined.accumulate(self.master, batches)
            return loss, targets, {}, self.pipelined.clip(self.master, cfg.grad_clip)
        loss, targets, terms = accumulate(self.model, self.master, batches, cfg.precision, cfg.depth_loss)
        return loss, targets, terms, clip_gradients(self.master.named.values(), cfg.grad_clip)

    def stops(self, caught: bool) -> bool:
        """Whether a signal ends the run, on any of its processes."""
        return caught if self.pipelined is None else self.pipelined.anyone(caught)

    def validate(self, valid: TokenFile, max_tokens: int | None) -> dict[str, Any]:
        """The validation columns of a row."""
        cfg = self.cfg
        told = [0.0, 0.0, 0.0]
        model = self.model if self.pipelined is None else self._whole_model()
        if model is not None:
            score = evaluate(
                model, valid, cfg.seq_len, cfg.batch_size, max_tokens, cfg.precision, cfg.packing
            )
            told = [score.bits_per_byte, score.loss, score.tokens]
        bits, loss, tokens = told if self.pipelined is None else self.pipelined.first_says(told)
        if not math.isfinite(bits):
            raise RunError(f"step {self.progress.step}: the validation loss is {loss}")
        return {"val_bits_per_byte": bits, "val_loss": loss, "val_tokens": int(tokens)}

    def _whole_model(self) -> Decoder | None:
        """The model of all processes, on the first one; None on the others."""
        assert self.pipelined is not None
        weights = self.pipelined.gathered(self.master.named)
        if weights is None:
            return None
        with isolated(0):
            model = Decoder(self.cfg.model).to(self.device)
        Master(model, self.cfg.precision).load(weights)
        return model

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of everything that the next step depends on."""
        masters, optimizer = {n: p.detach() for n, p in self.master.named.items()}, self.optimizer.state()
        if self.pipelined is None:
            weights = {**weights_of(self.model), **masters}
        else:
            whole = self.pipelined.gathered(masters)
            states = self.pipelined.gathered(optimizer, owner=lambda key: key.rpartition("/")[0])
            if whole is None or states is None:
                return folder  # the first process writes
            weights, optimizer = whole, states
        broken = [name for name, w in weights.items() if not torch.isfinite(w).all()]
        if broken:
            raise RunError(f"step {self.progress.step}: {broken[0]} is not finite")
        facts, generators = random_state()
        tensors = {f"optimizer/{n}": t for n, t in optimizer.items()}
        tensors |= {f"random/{n}": t for n, t in generators.items()}
        state = {"progress": asdict(self.progress), "loader": self.loader.state_dict(), "random": facts}
        files = {
            "model.safetensors": _bytes(weights),
            "config.json": self.cfg.model.to_json().encode(),
            "state.safetensors": _bytes(tensors),
            "state.json": json.dumps(state).encode(),
        }
        return save_checkpoint(folder, self.progress.step, files, self.cfg.keep_checkpoints)

    def _load(self, checkpoint: Path) -> None:
        """Take up everything but the weights from a checkpoint."""
        state = read_state(checkpoint / "state.json")
        tensors = read_safetensors(checkpoint / "state.safetensors")
        saved = _under("optimizer/", tensors)
        if self.pipelined is not None:  # the others are other processes'
            saved = {k: t for k, t in saved.items() if k.rpartition("/")[0] in self.master.named}
        self.optimizer.load_state(saved)
        self.loader.load_state_dict(state["loader"])
        self.progress = Progress(**state["progress"])
        set_random_state(state["random"], _under("random/", tensors))


def read_state(path: Path) -> dict[str, Any]:
    """What `save` wrote besides tensors; InputError if the file is damaged or of another version."""
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = set(state) == {"progress", "loader", "random"}
        known = known and set(state["progress"]) == set(asdict(Progress()))
        known = known and all(isinstance(v, int | float) for v in state["progress"].values())
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({error}); delete its folder to use an older one") from None
    if not known:
        raise InputError(f"{path} has other fields than this version of twoaxis writes")
    return state


def accumulate(
    model: Decoder, master: Master, batches: list[Batch], precision: str, depth_loss: float = 0.0
) -> tuple[float, int, dict[str, float]]:
    """Leave the gradient of the mean loss over all targets in `master`; that loss, the number of targets.

    Each batch's sum is divided by the total number of targets, so the result does not depend on how rows
    are divided into batches. Without any target the loss and every gradient are 0. depth_loss: how much of
    the depth method's own term is added to each token's loss; the loss returned is without, and the term's
    mean over the targets comes by its name.
    """
    device, name = model.embedding.weight.device, model.cfg.depth_config().loss_term
    targets = sum(int((batch.targets != -100).sum()) for batch in batches)
    losses, terms = [], []
    for batch in batches:
        segments = None if batch.segments is None else batch.segments.to(device)
        wanted = batch.targets.to(device)
        with computing_in(precision, device):
            logits, last = run_to_the_end(model, batch.tokens.to(device), segments)
        loss = token_loss(logits, wanted) / max(targets, 1)
        losses.append(loss.detach())
        if name:
            term = model.stream.loss_term(last)
            term = term.masked_fill(wanted == -100, 0.0).sum() / max(targets, 1)
            terms.append(term.detach())
            loss = loss + depth_loss * term
        loss.backward()
        master.collect()
    means = {name: sum(x.item() for x in terms)} if name else {}
    return sum(x.item() for x in losses), targets, means


def run_to_the_end(model: Decoder, tokens: Tensor, segments: Tensor | None) -> tuple[Tensor, Any]:
    """Logits, and the state after the last block for a method that has a loss term of its own."""
    if not model.cfg.depth_config().loss_term:
        return model(tokens, segments=segments), None
    x, last = model.to_the_end(tokens, model.context(tokens, segments))
    return model.logits(x), last


def last_good(folder: Path) -> str:
    """Words on where a failed run can go on from."""
    best = newest_checkpoint(folder)[0]
    return f"the last good checkpoint is {best}" if best else "there is no checkpoint before it"


def _bytes(tensors: dict[str, Tensor]) -> bytes:
    return to_bytes({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, {"format": "pt"})


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
