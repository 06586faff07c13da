"""Training over the processes of a pipeline: rows, checkpoints and resumption equal one process."""

import json
import os
import re
import subprocess
import sys

import pytest

import twoaxis
from twoaxis.cli.main import main
from twoaxis.train import TrainConfig, load_run

TEXT = "".join(chr(97 + i * i % 23) + "\n" * (i % 7 == 0) for i in range(1500))
MODEL = {"vocab_size": 256, "d_model": 12, "n_heads": 2, "n_blocks": 3}


def config(tmp_path, steps=4, **options):
    (tmp_path / "text.txt").write_text(TEXT)
    return {
        **{
            "data": str(tmp_path / "text.txt"),
            "seq_len": 8,
            "batch_size": 2,
            "accumulation": 4,
            "device": "cpu",
        },
        **{"steps": steps, "warmup_steps": 2, "schedule": "constant", "checkpoint_every": 2, "eval_every": 2},
        **{"packing": "documents", "pipeline": 2, **options},
        "model": {**MODEL, "depth": options.pop("depth", "denseformer")},
    }


def rows(folder):
    wanted = ("step", "loss", "grad_norm", "targets", "val_loss", "val_tokens")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k in wanted} for line in lines]


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def alone(cfg, out, **options):
    return twoaxis.train(TrainConfig.from_dict(cfg), out, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"pipeline_virtual": 2, "pipeline_schedule": "interleaved", "pipeline_split": [1, 1, 0, 1]}],
    ids=["push", "cached"],
)
def test_a_run_over_two_processes_equals_one_and_goes_on_as_one(world, tmp_path, options):
    # the same configuration on one process runs without a pipeline; folders can be taken over either way
    cfg = config(tmp_path, **options)
    alone(cfg, tmp_path / "one")
    results = world(2).run("trained", cfg, str(tmp_path / "two"))
    assert all(r["status"] == "done" for r in results)
    same(rows(tmp_path / "two"), rows(tmp_path / "one"))
    a, b = (load_run(tmp_path / name)[0].state_dict() for name in ("one", "two"))
    assert all((a[k] - b[k]).abs().max() < 1e-5 for k in a)
    alone({**cfg, "steps": 6}, tmp_path / "two", resume=True)
    world(2).run("trained", {**cfg, "steps": 6}, str(tmp_path / "one"), resume=True)
    same(rows(tmp_path / "two"), rows(tmp_path / "one"))


def test_the_plan_is_printed_and_needs_no_folder(capsys):
    flags = ["--depth", "attnres(block_sublayers=2)", "--d-model", "8", "--n-heads", "2", "--n-blocks", "4"]
    flags += ["--batch-size", "2", "--seq-len", "4", "--accumulation", "4", "--pipeline", "2"]
    flags += ["--pipeline-virtual", "2", "--pipeline-schedule", "interleaved", "--pipeline-plan"]
    assert main(["train", *flags]) == 0
    text = capsys.readouterr().out
    assert "rank 1 -> rank 0, cached: full 768, cached 256" in text
    assert "from the cache: sources.source.0, sources.source.1" in text
    assert main(["train", *flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["bytes"] == {"full": 2304, "cached": 1024}
    assert plan["live"] == [5, 3]
    assert 0 < plan["bubble"] < 0.5
    sent = [t["name"] for t in plan["boundaries"][1]["tensors"]]
    assert sent == ["sources.source.2"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pipeline-plan"], "--pipeline 4"),
        ([], "--out FOLDER"),
        (["--pipeline-plan", "--pipeline", "2", "--accumulation", "1"], "micro-batches"),
        (
            ["--pipeline-plan", "--pipeline", "2", "--accumulation", "2", "--pipeline-split", "1", "1"],
            "6 in all",
        ),
    ],
    ids=["one process", "no folder", "micro-batches", "split"],
)
def test_bad_pipelines_are_refused_in_one_line(flags, said, capsys):
    assert main(["train", *flags]) == 2
    assert said in capsys.readouterr().err


def launched(folder, *flags):
    """Two processes under torchrun."""
    (folder / "text.txt").write_text(TEXT)
    started = "-m torch.distributed.run --standalone --nproc-per-node 2 -m twoaxis train"
    sizes = "--d-model 12 --n-heads 2 --n-blocks 2 --seq-len 8 --batch-size 2 --steps 2 --device cpu"
    places = ["--data", str(folder / "text.txt"), "--out", str(folder / "run")]
    command = [sys.executable, *started.split(), *sizes.split(), *places, *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ}, check=False
    )


@pytest.mark.full
def test_torchrun(tmp_path):
    done = launched(tmp_path, "--pipeline", "2", "--accumulation", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done after 2 steps") == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--pipeline", "2", "--depth", "nothing"), "nothing"),  # before the processes meet
        (("--pipeline", "2", "--accumulation", "1"), "micro-batches"),  # after
    ],
    ids=["alone", "together"],
)
def test_torchrun_says_a_refusal_once(tmp_path, flags, said):
    done = launched(tmp_path, *flags)
    ours = [line for line in done.stderr.splitlines() if line.startswith("twoaxis: ")]
    assert len(ours) == 1, done.stderr
    assert said in ours[0]
    assert re.search(r"exitcode\s*: 2\b", done.stderr)
    assert "InputError" not in done.stderr  # torchrun's own traceback names its ChildFailedError alone


# the first process speaks; torchrun ends the others, unless one was alone in what it met
def test_a_refusal_is_said_by_the_first_process(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    for rank, line in (("0", "twoaxis: train writes"), ("1", "twoaxis: rank 1: train writes")):
        monkeypatch.setenv("RANK", rank)
        assert main(["train"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(line)
        assert error.count("\n") == 1
    assert len(waited) == 1
