"""Processes that die or hang: what is left, what the others say. `benchmarks/faults.py` does the same 50 times."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.test_train_grid import FSDP, SHARDED, of_one_process
from parallel.test_train_pipeline import alone, rows, same
from twoaxis.train.checkpoint import complete

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # processes import it by this path too
import faults


# pitfalls, Saving: "kill the process at every write during save (also between files)", here one of two processes
def test_killed_processes_lose_no_checkpoint_and_few_steps(tmp_path):
    told, last = faults.disturbed(tmp_path / "run", kills=2, seed=1)
    assert len(told) == 2
    assert last >= 4


def test_a_process_that_hangs_is_given_up_with_a_line_naming_rank_and_step(tmp_path):
    (tmp_path / "text.txt").write_text(faults.TEXT)
    run = {**faults.RUN, "data": str(tmp_path / "text.txt"), "steps": 10**6, "timeout": 0.2}
    seen = faults.killed(run, tmp_path / "run", random.Random(0), how=signal.SIGSTOP)
    assert seen["code"] == 1
    assert f"rank {1 - seen['victim']}, step {seen['rows'] + 1}: " in seen["said"]
    assert "did not answer within 0.2 minutes" in seen["said"]


# pitfalls, Saving: "a file-size limit or tiny file system so the write fails halfway", on one process of two
@pytest.mark.parametrize(("saved", "rank"), [(SHARDED, 1), ({}, 0)], ids=["sharded", "file"])
def test_a_disk_that_is_full_on_one_process_stops_all_with_one_line(world, tmp_path, saved, rank):
    cfg = of_one_process(tmp_path, steps=4, **FSDP, **saved) | {"batch_size": 2}
    for said in world(2).run("grid.full_disk", cfg, str(tmp_path / "run"), 4, rank):
        assert "cannot save step 4" in said
        assert "No space left on device" in said
        assert "step-00000002" in said
        assert len(said.splitlines()) == 1
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]
    world(2).run("cases.trained", cfg, str(tmp_path / "run"), resume=True)
    alone({**cfg, "data_parallel": 1, "batch_size": 4}, tmp_path / "one")
    same(rows(tmp_path / "run"), rows(tmp_path / "one"))


@pytest.mark.full
def test_torchrun_starts_again_from_the_newest_checkpoint(tmp_path):
    """A worker kills itself in its fourth step, once; torchrun starts all again with the same command."""
    (tmp_path / "text.txt").write_text(faults.TEXT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", str(Path(__file__).with_name("dying_worker.py")), "--data"]
    command += [str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), "--device", "cpu", "--resume"]
    flags = "--data-parallel 2 --checkpoint-format sharded --checkpoint-every 2 --steps 6 --d-model 12 --n-heads 2"
    flags += " --n-blocks 2 --seq-len 8 --batch-size 2"
    done = subprocess.run(
        [*command, *flags.split()],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "DIES": str(tmp_path / "died")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "died").exists()
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 7))
    assert complete(tmp_path / "run/checkpoints")[-1].name == "step-00000006"
