"""One run in memory: model, optimiser, data and counters; its step, its validation, its checkpoint."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from twoaxis.cost import cost
from twoaxis.data import Batch, Loader, TokenFile
from twoaxis.errors import InputError, RunError
from twoaxis.model import Decoder, load_weights, token_loss, weights_path
from twoaxis.parallel.deferred import Blank
from twoaxis.train.checkpoint import newest_checkpoint
from twoaxis.train.config import TrainConfig
from twoaxis.train.device import allow_graphs, choose_device
from twoaxis.train.evaluation import evaluate
from twoaxis.train.filling import Filling
from twoaxis.train.optimizer import Optimizer, clip_factor
from twoaxis.train.precision import Master, computing_in
from twoaxis.train.processes import processes
from twoaxis.train.progress import Progress
from twoaxis.train.randomness import isolated, reseed
from twoaxis.train.run import weights_folder
from twoaxis.train.schedule import lr_factor
from twoaxis.train.state import parts_of, take_up
from twoaxis.train.team import Team


class Session:
    """A run of `cfg` on `tokens`, fresh or from a checkpoint folder."""

    def __init__(self, cfg: TrainConfig, tokens: TokenFile, checkpoint: Path | None = None) -> None:
        self.cfg, self.device = cfg, choose_device(cfg.device)
        self.progress = Progress()
        self.flops_per_step = cost(cfg.model, cfg.batch_size, cfg.seq_len).flops * cfg.accumulation
        self.flops_per_step *= cfg.data_parallel
        folder = checkpoint or (weights_folder(cfg.init) if cfg.init else None)
        weights = weights_path(folder) if folder else None
        filling = None
        if processes() > 1:
            blank = Blank(cfg.model)
            filling = Filling(blank, self.device, weights, stream=checkpoint is None)
            self.model = blank.model.train()
        else:
            self.model = Decoder(cfg.model)
            if weights:
                load_weights(self.model, weights)
            self.model.float().to(self.device).train()
        if cfg.saved == "host" and self.device.type == "cpu":
            raise InputError("saved='host': the device cpu is the host already; use all, blocks or cores")
        self.model.saving = cfg.saving
        rules = self.model.param_rules()
        self.n_parameters = sum(p.numel() for p in self.model.parameters())
        self.team = Team(cfg, self.model, self.device, filling)
        rank, of = self.team.rows
        self.loader = Loader(
            tokens, cfg.seq_len, cfg.batch_size, cfg.seed, rank=rank, world_size=of, packing=cfg.packing
        )
        self.master = Master(self.model, cfg.precision)
        self.optimizer = Optimizer(self.master.named, rules, cfg, self.team.shares, self.master.rounded)
        reseed(cfg.seed, 0, rank)
        if checkpoint:
            take_up(self, checkpoint)
        if cfg.compile:
            allow_graphs(cfg.model.n_blocks)
            for block in self.model.blocks:
                block.compile()

    def step(self) -> dict[str, Any]:
        """One optimiser step; its row of metrics.jsonl. RunError instead of an update that is not finite."""
        started, at = time.perf_counter(), self.progress
        batches = [next(self.loader) for _ in range(self.team.micro_batches)]
        self.master.zero_grad()
        loss, targets, terms, norm = gradient(self.cfg, self.team, self.model, self.master, batches)
        for what, value in (("loss", loss), ("norm of the gradient", norm)):
            if not math.isfinite(value):
                raise RunError(f"step {at.step + 1}: the {what} is {value}")
        lr = self.cfg.lr * lr_factor(self.cfg, at.step + 1)
        self.optimizer.step(lr, clip_factor(norm, self.cfg.grad_clip))
        at.step += 1
        at.tokens += self.cfg.tokens_per_step
        at.flops += self.flops_per_step
        at.seconds += time.perf_counter() - started
        return asdict(at) | {"loss": loss, "lr": lr, "grad_norm": norm, "targets": targets} | terms

    def validate(self, valid: TokenFile, max_tokens: int | None) -> dict[str, Any]:
        """The validation columns of a row."""
        cfg, team = self.cfg, self.team
        told = [0.0, 0.0, 0.0]
        together = team.pipelined is None
        model = self.model if together else self._whole_model()
        if model is not None:
            how = (cfg.seq_len, cfg.batch_size, max_tokens, cfg.precision, cfg.packing)
            score = evaluate(model, valid, *how, *((team.rows, team.summed) if together else ()))
            told = [score.bits_per_byte, score.loss, score.tokens]
        bits, loss, tokens = team.first_says(told)
        if not math.isfinite(bits):
            raise RunError(f"step {self.progress.step}: the validation loss is {loss}")
        return {"val_bits_per_byte": bits, "val_loss": loss, "val_tokens": int(tokens)}

    def _whole_model(self) -> Decoder | None:
        """The model of all processes, on the first one; None on the others."""
        parts = {n: p for n, p in parts_of(self).items() if n.startswith("model/")}
        weights = self.team.gathered(parts)
        if weights is None:
            return None
        with isolated(0):
            model = Decoder(self.cfg.model).to(self.device)
        Master(model, self.cfg.precision).load({n.removeprefix("model/"): w for n, w in weights.items()})
        return model


def gradient(
    cfg: TrainConfig, team: Team, model: Decoder, master: Master, batches: list[Batch]
) -> tuple[float, int, dict[str, float], float]:
    """Leave a step's gradient over all processes in `master`: loss, targets, other terms, its norm.

    batches: the micro-batches of this process.
    """
    total = team.targets(batches)
    terms: dict[str, float] = {}
    if team.pipelined is not None:
        loss = team.pipelined.accumulate(master, batches, total)
    else:
        how = (cfg.precision, cfg.depth_loss, total, team, cfg.chunked_loss)
        loss, total, terms = accumulate(model, master, batches, *how)
    team.finish(master)
    loss, *means = team.summed([loss, *terms.values()])
    return loss, total, dict(zip(terms, means, strict=True)), team.norm(master)


def accumulate(
    model: Decoder,
    master: Master,
    batches: list[Batch],
    precision: str,
    depth_loss: float = 0.0,
    total: int | None = None,
    team: Team | None = None,
    chunked: bool = False,
) -> tuple[float, int, dict[str, float]]:
    """Leave the gradient of the mean loss over all targets in `master`; that loss, the number of targets.

    Each batch's sum is divided by the total number of targets, so the result does not depend on how rows
    are divided into batches. Without any target the loss and every gradient are 0. depth_loss: how much of
    the depth method's own term is added to each token's loss; the loss returned is without, and the term's
    mean over the targets comes by its name. total: the number of targets, where other processes have more.
    chunked: see `chunked_token_loss`. A team's only process leaves the gradient of its only batch uncollected.
    """
    device, name = model.embedding.weight.device, model.cfg.depth_config().loss_term
    targets = sum(int((batch.targets != -100).sum()) for batch in batches) if total is None else total
    forward = model if team is None or team.ddp is None else team.ddp
    losses, terms = [], []
    alone = team is not None and team.alone and len(batches) == 1
    for index, batch in enumerate(batches):
        if team is not None:
            team.before(last=index == len(batches) - 1)
        segments = None if batch.segments is None else batch.segments.to(device)
        wanted = batch.targets.to(device)
        with computing_in(precision, device):
            if chunked:
                x, state = model.to_the_end(batch.tokens.to(device), model.context(batch.tokens, segments))
                summed = model.chunked_loss(x, wanted)
            else:
                out = forward(batch.tokens.to(device), segments=segments, return_last=bool(name))
                logits, state = out if name else (out, None)
                summed = token_loss(logits, wanted)
        loss = summed / max(targets, 1)
        losses.append(loss.detach())
        if name:
            term = model.stream.loss_term(state)
            term = term.masked_fill(wanted == -100, 0.0).sum() / max(targets, 1)
            terms.append(term.detach())
            loss = loss + depth_loss * term
        loss.backward()
        if not alone:
            master.collect()
    means = {name: sum(x.item() for x in terms)} if name else {}
    return sum(x.item() for x in losses), targets, means


def last_good(folder: Path) -> str:
    """Words on where a failed run can go on from."""
    best = newest_checkpoint(folder)[0]
    return f"the last good checkpoint is {best}" if best else "there is no checkpoint before it"
