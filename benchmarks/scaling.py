"""What it costs to divide a run over two processes, against the same run on one.

    python benchmarks/scaling.py --rounds 3 --json benchmarks/scaling.json

Each row trains the same model on the same 16 rows of a step in 4 micro-batches, one thread a process, gloo. CPU time is
that of all processes together, so 1 would be no work more; wall is of the slowest. Rows of a round run one after
another and are divided by that round's single process; medians of the rounds. Two cores that are shared with other
work say little about speed on a cluster: sums over loopback are cheap, waiting burns no CPU time, and two processes on
two busy cores do not run side by side.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import statistics
import time
from pathlib import Path
from typing import Any

ROWS: dict[str, dict[str, Any]] = {
    "one process": {},
    "DDP": {"data_parallel": 2, "batch_size": 2},
    "FSDP2": {"data_parallel": 2, "batch_size": 2, "sharding": "fsdp"},
    "tensor parallel": {"tensor_parallel": 2},
    "pipeline, 1F1B": {"pipeline": 2},
    "pipeline, interleaved": {"pipeline": 2, "pipeline_virtual": 2, "pipeline_schedule": "interleaved"},
}
RUN = {"batch_size": 4, "accumulation": 4, "seq_len": 64, "device": "cpu", "steps": 10**6}
MODEL = {"vocab_size": 256, "d_model": 128, "n_heads": 4, "n_blocks": 8}
WARM, STEPS = 2, 4


def measured(rank: int, n: int, port: int, row: str, depth: str, pipe: Any) -> None:
    """One process: seconds of CPU and wall for one step."""
    if n > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    import torch

    from twoaxis.data import load_corpus, load_tokenizer, prepare
    from twoaxis.train import TrainConfig
    from twoaxis.train.processes import process_group
    from twoaxis.train.session import Session

    torch.set_num_threads(1)
    cfg = TrainConfig.from_dict({**RUN, **ROWS[row], "model": {**MODEL, "depth": depth}})
    tokens, _ = prepare(load_corpus(cfg.data, cfg.valid_fraction), load_tokenizer(cfg.tokenizer))
    with process_group(cfg):
        torch.manual_seed(0)
        session = Session(cfg, tokens)
        for _ in range(WARM):
            session.step()
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(STEPS):
            loss = session.step()["loss"]
        pipe.send(((time.process_time() - cpu) / STEPS, (time.perf_counter() - wall) / STEPS, loss))
    os._exit(0)


def row_of(row: str, depth: str) -> tuple[float, float, float]:
    """CPU seconds of all processes and wall seconds for a step; the last loss."""
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.fsdp", "torch.distributed.pipelining", "twoaxis.train"]
    )
    n = 1 if not ROWS[row] else 2
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(n):
        mine, theirs = context.Pipe()
        process = context.Process(
            target=measured, args=(rank, n, store.port, row, depth, theirs), daemon=True
        )
        process.start()
        pipes.append(mine)
        processes.append(process)
    told = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return sum(t[0] for t in told), max(t[1] for t in told), told[0][2]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3, help="of every layout, interleaved")
    options.add_argument("--depth", nargs="+", default=["additive", "attnres"], help="depth methods")
    options.add_argument("--json", type=Path)
    options.add_argument("--machine", default="not said", help="its class, for the record")
    given = options.parse_args()
    depths = shlex.join(given.depth)
    result: dict[str, Any] = {
        "command": f"python benchmarks/scaling.py --rounds {given.rounds} --depth {depths}"
    }
    result |= {"machine": given.machine, "run": RUN | MODEL, "load_before": os.getloadavg()[0]}
    for depth in given.depth:
        rounds = [{row: row_of(row, depth) for row in ROWS} for _ in range(given.rounds)]
        losses = [r[row][2] for r in rounds for row in ROWS]
        assert max(losses) - min(losses) < 1e-4 * losses[0], losses
        for row in ROWS:
            cpu, wall = (statistics.median(r[row][i] / r["one process"][i] for r in rounds) for i in (0, 1))
            seconds = statistics.median(r[row][0] for r in rounds)
            told = {
                "cpu_seconds_a_step": round(seconds, 3),
                "cpu_ratio": round(cpu, 3),
                "wall_ratio": round(wall, 3),
            }
            result.setdefault(depth, {})[row] = told
            print(f"{depth:<10} {row:<24} {seconds:8.3f} s CPU  {cpu:6.3f} CPU  {wall:6.3f} wall", flush=True)
    result["load_after"] = os.getloadavg()[0]
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
