"""A few processes with one process group, which run many cases one after another.

A case that hangs is an error: `World.run` waits so many seconds, then names the ranks that have not answered.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SECONDS = int(os.environ.get("TWOAXIS_TEST_SECONDS", 120))  # for one case; a busy machine needs more


class World:
    """`size` processes over gloo. run: the same function on every rank, "module.function" in `parallel`."""

    def __init__(self, size: int) -> None:
        context = _context()
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            args = (rank, size, str(Path(self.folder.name) / "store"), theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        late = [rank for rank, pipe in enumerate(self.pipes) if not pipe.poll(3 * SECONDS)]
        if late:
            self.close()
            raise AssertionError(f"ranks {late} of {size} did not start")
        for pipe in self.pipes:
            pipe.recv()

    def run(self, function: str, *args: Any, **options: Any) -> list[Any]:
        """What the function returned on each rank; AssertionError with the first rank's traceback."""
        for pipe in self.pipes:
            pipe.send((function, args, options))
        end, answers = time.monotonic() + SECONDS, {}
        for rank, pipe in enumerate(self.pipes):
            if pipe.poll(max(end - time.monotonic(), 0)):
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, "the process died")
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + 5)  # the others may wait for it for ever
        late = sorted(set(range(len(self.pipes))) - set(answers))
        wrong = {rank: text for rank, (done, text) in answers.items() if not done}
        if late or wrong:
            if late:
                self.close()
            raise AssertionError(
                f"{function}{args}{options}: no answer from ranks {late}" * bool(late)
                + "".join(f"\nrank {rank}:\n{text}" for rank, text in wrong.items())
            )
        return [answers[rank][1] for rank in range(len(self.pipes))]

    @property
    def alive(self) -> bool:
        return all(p.is_alive() for p in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _context() -> Any:
    """Processes forked from a server that has loaded what all of them need once; plain new ones on Windows."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.pipelining", "torch.distributed.fsdp", "twoaxis.parallel", "twoaxis.train"]
    )
    return context


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    pipe.send("ready")
    while True:
        try:
            function, args, options = pipe.recv()
        except EOFError:
            return
        try:
            module, _, name = function.rpartition(".")
            cases = importlib.import_module(f"parallel.{module or 'cases'}")
            pipe.send((True, getattr(cases, name)(*args, **options)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
