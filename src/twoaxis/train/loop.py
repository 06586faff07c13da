"""The training loop."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from twoaxis.data import TokenFile, check_vocab, load_corpus, load_tokenizer, prepare
from twoaxis.errors import InputError, RunError
from twoaxis.train.config import TrainConfig
from twoaxis.train.device import choose_device
from twoaxis.train.loggers import make_loggers
from twoaxis.train.metrics import Metrics
from twoaxis.train.processes import first_tells, lost, process_group
from twoaxis.train.randomness import isolated
from twoaxis.train.run import RunFolder
from twoaxis.train.saving import Saver
from twoaxis.train.session import Session, last_good
from twoaxis.train.signals import StopSignals

log = logging.getLogger(__name__)


def train(
    cfg: TrainConfig,
    out: str | Path,
    *,
    resume: bool = False,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train as `cfg` says in the run folder `out` and return what its `results.json` holds.

    resume: go on from the newest complete checkpoint, exactly as if never stopped; a run that is done
    returns its results. on_step: called after every step with its row of `metrics.jsonl`.

    Everything that can be checked is checked before the first step (InputError). A loss that is not finite
    and a disk that is full raise RunError and leave the last good checkpoint. The first SIGINT or SIGTERM
    ends the run after its step with a checkpoint and status "interrupted"; one that comes after the last step
    raises KeyboardInterrupt once the finished run is written.
    """
    if not isinstance(cfg, TrainConfig):
        raise InputError(f"what is trained is a TrainConfig, not {type(cfg).__name__}")
    with process_group(cfg) as rank, tempfile.TemporaryDirectory() as unread:
        return _train(cfg, Path(out), resume, on_step, Path(unread) if rank else None)


def _train(
    cfg: TrainConfig,
    out: Path,
    resume: bool,
    on_step: Callable[[dict[str, Any]], None] | None,
    unread: Path | None,
) -> dict[str, Any]:
    """The run of one process; all but the first write into a folder that nobody reads."""
    run = RunFolder(out)
    device = choose_device(cfg.device)
    told = first_tells(lambda: _text(run.checkpoint_to_resume(cfg, resume)), device)
    checkpoint = Path(told) if told else None
    corpus = load_corpus(cfg.data, cfg.valid_fraction)
    tokenizer = load_tokenizer(run.path if checkpoint else cfg.tokenizer, corpus.train)
    tokens, valid = prepare(corpus, tokenizer)
    check_data(cfg, tokens, valid)
    with isolated(cfg.seed), StopSignals() as stop:
        session = Session(cfg, tokens, checkpoint)  # here the processes of a pipeline meet
        saver = Saver(session, run.checkpoints)
        run = run if unread is None else RunFolder(unread)
        loggers = make_loggers(cfg, run.path, session.progress.step) if unread is None else []
        run.begin(cfg, tokenizer)
        metrics = Metrics(run.metrics, session.progress.step, loggers)
        try:
            with lost(session.progress, cfg.timeout):
                loop(session, valid, saver, metrics, stop, on_step)
            results = summary(session, metrics, valid)
        except RunError as error:
            with contextlib.suppress(Exception):  # what is being written may still be whole
                saver.finish()
            reason = f"{error}; {last_good(saver.folder)}"
            with contextlib.suppress(RunError):  # the disk may be full
                run.write_results(summary(session, metrics, valid) | {"status": "failed", "error": reason})
            raise RunError(reason) from None
        finally:
            metrics.close()
    run.write_results(results)
    if stop.caught and results["status"] == "done":
        raise KeyboardInterrupt(f"{stop.caught} came after the last step; the run in {run.path} is complete")
    return results


def loop(
    session: Session,
    valid: TokenFile,
    saver: Saver,
    metrics: Metrics,
    stop: StopSignals,
    on_step: Callable[[dict[str, Any]], None] | None,
) -> None:
    """Step, validate, record and save until the last step or a signal."""
    cfg = session.cfg
    while session.progress.step < cfg.steps and not session.team.anyone(bool(stop.caught)):
        row = session.step()
        step, last = row["step"], row["step"] == cfg.steps
        if valid.n_tokens > 1 and (last or due(step, cfg.eval_every)):
            row |= session.validate(valid, None if last else cfg.eval_tokens)
        metrics.add(row)
        if on_step:
            on_step(row)
        if due(step, cfg.checkpoint_every):
            metrics.sync()
            saver.save()
    metrics.sync()
    saver.save()
    saver.finish()


def check_data(cfg: TrainConfig, tokens: TokenFile, valid: TokenFile) -> None:
    """Refuse data that the model, or the run it starts from, cannot read; without validation text say so."""
    saved = cfg.init is not None and (Path(cfg.init) / "tokenizer.json").is_file()
    check_vocab(tokens, cfg.model.vocab_size, load_tokenizer(str(cfg.init)).fingerprint if saved else None)
    if valid.n_tokens < 2 and cfg.eval_every is not None:
        raise InputError(f"{cfg.data!r} has no validation text for eval_every={cfg.eval_every}; leave it out")
    if valid.n_tokens < 2:
        log.warning("%r has no validation text: the run is not validated", cfg.data)


def summary(session: Session, metrics: Metrics, valid: TokenFile) -> dict[str, Any]:
    """What `results.json` says of a run."""
    cfg, at = session.cfg, session.progress
    return {
        "status": "done" if at.step == cfg.steps else "interrupted",
        "depth": cfg.model.depth,
        "sequence": cfg.model.sequence,
        "seed": cfg.seed,
        "data": {"train": session.loader.tokens.digest, "valid": valid.digest},
        "steps": at.step,
        "tokens": at.tokens,
        "seconds": at.seconds,
        "flops": at.flops,
        "parameters": session.n_parameters,
        **metrics.summary(),
        "precision": cfg.precision,
        "device": str(session.device),
        "torch": torch.__version__,
    }


def _text(path: Path | None) -> str:
    return "" if path is None else str(path)


def due(step: int, every: int | None) -> bool:
    """Whether something done every so many steps falls on this one."""
    return every is not None and step % every == 0
