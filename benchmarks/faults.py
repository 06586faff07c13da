"""Kill a process of a run at random moments, again and again, and hold what is left to an undisturbed run.

    python benchmarks/faults.py --kills 50 --out FOLDER --json benchmarks/faults.json

Two processes train with FSDP and sharded checkpoints, written in the background. Each attempt goes on from the newest
complete checkpoint; some rows later, half of the times while a checkpoint is being written, one process, chosen at
random, gets SIGKILL; the other has to end by itself with a line that names its rank. After every kill: no complete
checkpoint is lost, each is what its marker says, and no more steps are lost than two intervals between checkpoints
(one, and one for a save under way). In the end every row equals the undisturbed run's, to the bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

SIZE, EVERY = 2, 2
STORES: list[TCPStore] = []
TEXT = "".join(chr(97 + i * i % 23) + "\n" * (i % 7 == 0) for i in range(1500))
RUN: dict[str, Any] = {
    **{"seq_len": 8, "batch_size": 2, "accumulation": 2, "warmup_steps": 2, "schedule": "constant"},
    **{"data_parallel": SIZE, "sharding": "fsdp", "device": "cpu", "timeout": 2.0, "keep_checkpoints": 3},
    **{"checkpoint_every": EVERY, "checkpoint_format": "sharded", "checkpoint_async": True},
    "model": {
        **{"vocab_size": 256, "d_model": 12, "n_heads": 2, "n_blocks": 2, "dropout": 0.1},
        "depth": "hyper_connections",
    },
}


def work(rank: int, port: int, run: dict[str, Any], out: str) -> None:
    """One process, as torchrun would start it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    import torch

    import twoaxis
    from twoaxis.train import TrainConfig

    torch.set_num_threads(1)
    sys.stderr = (Path(out).parent / f"said-{rank}").open("w")
    try:
        twoaxis.train(TrainConfig.from_dict(run), out, resume=True)
    except twoaxis.RunError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)


def started(run: dict[str, Any], out: Path) -> list[Any]:
    """The processes of an attempt, forked from a server that has loaded what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.fsdp", "torch.distributed.checkpoint", "twoaxis.train"]
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent has it too
    args = [(rank, store.port, run, str(out)) for rank in range(SIZE)]
    made = [context.Process(target=work, args=a, daemon=True) for a in args]
    for process in made:
        process.start()
    STORES.append(store)
    return made


def rows_in(out: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, without times."""
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def finished(processes: list[Any], seconds: float, hangs: int | None = None) -> list[int | None]:
    """Exit codes; who has not ended by then (or hangs) is killed and has none."""
    end = time.monotonic() + seconds
    for rank, process in enumerate(processes):
        if rank != hangs:
            process.join(max(end - time.monotonic(), 0))
    codes = [p.exitcode for p in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def killed(run: dict[str, Any], out: Path, draw: random.Random, how: int = signal.SIGKILL) -> dict[str, Any]:
    """One attempt that is disturbed: what it had done, what is left, what the other process said."""
    from twoaxis.train.checkpoint import altered, complete, step_of

    folder = out / "checkpoints"
    before = [step_of(p) for p in complete(folder)]
    wanted = (before[-1] if before else 0) + draw.randrange(1, 2 * EVERY + 2)
    processes, victim = started(run, out), draw.randrange(SIZE)
    end = time.monotonic() + 120
    while len(rows_in(out)) < wanted and all(p.is_alive() for p in processes) and time.monotonic() < end:
        time.sleep(0.002)
    if draw.random() < 0.5:  # while a checkpoint is being written
        while not any(folder.glob(".step-*")) and all(p.is_alive() for p in processes):
            time.sleep(0.0002)
        time.sleep(draw.random() * 0.02)
    else:
        time.sleep(draw.random() * 0.1)
    saving = any(folder.glob(".step-*"))
    os.kill(processes[victim].pid, how)
    codes = finished(processes, 300, hangs=victim)
    rows, after = rows_in(out), complete(folder)
    return {
        "victim": victim,
        "saving": saving,
        "rows": rows[-1]["step"] if rows else 0,
        "before": before,
        "after": [step_of(p) for p in after],
        "altered": [why for p in after if (why := altered(p))],
        "code": codes[1 - victim],
        "said": (out.parent / f"said-{1 - victim}").read_text().strip().rpartition("\n")[2],
    }


def disturbed(out: Path, kills: int, seed: int, steps: int = 10**6) -> tuple[list[dict[str, Any]], int]:
    """Kill `kills` times, checking each time; then let the run end some steps later. What happened; the last step."""
    draw = random.Random(seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    (out.parent / "text.txt").write_text(TEXT)
    run = {**RUN, "data": str(out.parent / "text.txt")}
    told = []
    for _ in range(kills):
        seen = killed({**run, "steps": steps}, out, draw)
        told.append(seen)
        newest = seen["after"][-1] if seen["after"] else 0
        assert seen["altered"] == [], seen
        assert newest >= max(seen["before"], default=0), seen
        assert seen["code"] == 1, seen
        assert seen["said"].startswith(f"rank {1 - seen['victim']}, "), seen
        # one interval, and one more for the save that was under way
        assert seen["rows"] - newest <= 2 * EVERY, seen
    last = max((told[-1]["after"] or [0])[-1], 1) + 3
    for name in (out, out.with_name("whole")):
        codes = finished(started({**run, "steps": last}, name), 600)
        assert codes == [0] * SIZE, codes
    assert rows_in(out) == rows_in(out.with_name("whole"))
    assert [row["step"] for row in rows_in(out)] == list(range(1, last + 1))
    return told, last


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=50, help="about half a minute each on two busy cores")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, required=True, help="a new folder")
    options.add_argument("--json", type=Path)
    options.add_argument("--machine", default="not said", help="its class, for the record")
    given = options.parse_args()
    began = time.monotonic()
    told, last = disturbed(given.out / "run", given.kills, given.seed)
    lost = [seen["rows"] - (seen["after"] or [0])[-1] for seen in told]
    result = {
        "kills": len(told),
        "of_rank_0": sum(seen["victim"] == 0 for seen in told),
        "while_a_checkpoint_was_written": sum(seen["saving"] for seen in told),
        "checkpoints_lost_or_altered": 0,
        "steps_lost_at_each_kill": lost,
        "checkpoint_every": EVERY,
        "steps": last,
        "rows_equal_an_undisturbed_run": True,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "command": f"python benchmarks/faults.py --kills {given.kills} --seed {given.seed} --out FOLDER",
        "machine": given.machine,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
