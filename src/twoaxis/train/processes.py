"""The processes of a run: how many there are, their process group, and what they tell each other.

    torchrun --nproc-per-node N -m twoaxis train --data-parallel N ...

The same command without torchrun runs on one process.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from twoaxis.errors import InputError, RunError
from twoaxis.train.config import TrainConfig
from twoaxis.train.progress import Progress


def processes() -> int:
    """How many processes torchrun, or a process group that is there already, has; 1 without."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def wanted(cfg: TrainConfig) -> int:
    """How many processes a configuration is for; one is always allowed."""
    return cfg.data_parallel * cfg.tensor_parallel * cfg.pipeline


def check_division(cfg: TrainConfig) -> None:
    """InputError for what does not work together yet over several processes."""
    divided = [
        name
        for name, given in (
            ("sharding='fsdp'", cfg.data_parallel > 1 and cfg.sharding == "fsdp"),
            (f"tensor_parallel={cfg.tensor_parallel}", cfg.tensor_parallel > 1),
        )
        if given
    ]
    if divided and cfg.compile:
        raise InputError(f"compile with {divided[0]}: not supported together; leave one out")


@contextlib.contextmanager
def process_group(cfg: TrainConfig) -> Iterator[int]:
    """The process group of a run, if it has several processes; yields the rank of this one.

    What the group's engine raises, because another process died or did not answer in time, comes out as a
    RunError that names the rank.
    """
    n = processes()
    if n not in (1, wanted(cfg)):
        raise InputError(
            f"{n} processes and data_parallel={cfg.data_parallel}, tensor_parallel={cfg.tensor_parallel}, "
            f"pipeline={cfg.pipeline}: start their product, {wanted(cfg)}, or give such as --data-parallel {n}"
        )
    if n == 1 or dist.is_initialized():
        yield dist.get_rank() if n > 1 else 0
        return
    backend = "nccl" if cfg.device != "cpu" and torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with lost("while starting", cfg.timeout):
        _meet(backend, timedelta(minutes=cfg.timeout))
        try:
            yield dist.get_rank()
        finally:
            dist.destroy_process_group()


def _meet(backend: str, timeout: timedelta) -> None:
    """Make the process group that torchrun's environment describes.

    Torchrun keeps one store over its restarts, where addresses of processes that are gone still stand: each attempt
    gets names of its own.
    """
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def first_tells(ask: Callable[[], Any], device: torch.device) -> Any:
    """What `ask` returns on process 0 (plain data), on every process; its InputError or RunError is raised on all."""
    if processes() == 1:
        return ask()
    said = b""
    if dist.get_rank() == 0:
        try:
            said = json.dumps({"told": ask()}).encode()
        except InputError as error:
            said = json.dumps({"refused": str(error)}).encode()
        except RunError as error:
            said = json.dumps({"failed": str(error)}).encode()
    size = torch.tensor([len(said)], device=device)
    dist.broadcast(size, 0)
    data = (
        torch.frombuffer(bytearray(said), dtype=torch.uint8)
        if said
        else torch.empty(int(size), dtype=torch.uint8)
    )
    data = data.to(device)
    dist.broadcast(data, 0)
    answer = json.loads(data.cpu().numpy().tobytes())
    if "refused" in answer:
        raise InputError(answer["refused"])
    if "failed" in answer:
        raise RunError(answer["failed"])
    return answer["told"]


@contextlib.contextmanager
def lost(when: str | Progress, minutes: float) -> Iterator[None]:
    """RunError naming this rank and when or in which step, where torch finds another process gone or silent."""
    try:
        yield
    except RunError:
        raise
    except (dist.DistError, RuntimeError) as error:
        if processes() == 1 or not _of_the_group(error):
            raise
        at = when if isinstance(when, str) else f"step {when.step + 1}"
        rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "0")
        line = " ".join(str(error).split())[:200]
        raise RunError(
            f"rank {rank}, {at}: another process died or did not answer "
            f"within {minutes:g} minutes ({line}); start again with --resume, or let torchrun do so (--max-restarts)"
        ) from None


SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "timeout", "broken pipe")


def _of_the_group(error: Exception) -> bool:
    """Whether an error comes from the engine between processes."""
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in SIGNS)
