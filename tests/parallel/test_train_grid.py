"""Runs over several processes equal one, write one folder, and go on with another number of processes."""

import json

import pytest

from parallel.test_train_pipeline import alone, config, rows, same
from twoaxis.train import load_run

SHARDED = {"checkpoint_format": "sharded", "checkpoint_async": True}
FSDP = {"data_parallel": 2, "sharding": "fsdp"}


def of_one_process(tmp_path, **options):
    """4 rows in each of 2 micro-batches, without a pipeline."""
    return config(tmp_path, **{"pipeline": 1, "accumulation": 2, "batch_size": 4, **options})


# pitfalls, parallel training: "save on 2 processes, resume on 1 and on 3, compare the next 5 losses"
@pytest.mark.parametrize(
    ("sharding", "saved"),
    [
        ("ddp", {}),
        ("fsdp", SHARDED),
        pytest.param("fsdp", {}, marks=pytest.mark.full),
        pytest.param("ddp", SHARDED, marks=pytest.mark.full),
    ],
    ids=["ddp-file", "fsdp-sharded", "fsdp-file", "ddp-sharded"],
)
def test_two_processes_then_one_then_four_equal_one(world, tmp_path, sharding, saved):
    cfg = of_one_process(tmp_path, steps=9, eval_every=3, **saved)
    alone(cfg, tmp_path / "one")
    out, two = str(tmp_path / "run"), {"data_parallel": 2, "batch_size": 2, "sharding": sharding}
    results = world(2).run("cases.trained", {**cfg, **two, "steps": 3}, out)
    assert [r["status"] for r in results] == ["done", "done"]
    alone({**cfg, "steps": 6}, out, resume=True)
    four = {"data_parallel": 4, "batch_size": 1, "sharding": sharding}
    world(4).run("cases.trained", {**cfg, **four}, out, resume=True)
    same(rows(tmp_path / "run"), rows(tmp_path / "one"))
    a, b = (load_run(tmp_path / name)[0].state_dict() for name in ("one", "run"))
    assert all((a[k] - b[k]).abs().max() < 1e-5 for k in a)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted(
        p.name for p in (tmp_path / "one").iterdir()
    )


def test_shards_of_a_pipeline_are_read_by_one_process_and_by_another_pipeline(world, tmp_path):
    cfg = of_one_process(tmp_path, steps=6, eval_every=2, **SHARDED)
    cfg["model"]["depth"] = "depth_window"
    alone(cfg, tmp_path / "one")
    out, grid = str(tmp_path / "run"), FSDP | {"batch_size": 2, "pipeline": 2}
    world(4).run("cases.trained", {**cfg, **grid, "steps": 2}, out)
    assert len(list((tmp_path / "run/checkpoints/step-00000002").glob("shard-*"))) == 4
    alone({**cfg, "steps": 4}, out, resume=True)
    world(2).run("cases.trained", {**cfg, "pipeline": 2}, out, resume=True)
    same(rows(tmp_path / "run"), rows(tmp_path / "one"))


def test_heads_over_two_processes_then_one_then_heads_and_shares_over_four(world, tmp_path):
    cfg = of_one_process(tmp_path, steps=6, eval_every=2)
    cfg["model"] |= {"qk_norm": True, "depth": "attnres"}
    alone(cfg, tmp_path / "one")
    out, heads = str(tmp_path / "run"), {"tensor_parallel": 2}
    world(2).run("cases.trained", {**cfg, **heads, **SHARDED, "steps": 2}, out)
    alone({**cfg, "steps": 4}, out, resume=True)
    world(4).run("cases.trained", {**cfg, **heads, **FSDP, **SHARDED, "batch_size": 2}, out, resume=True)
    same(rows(tmp_path / "run"), rows(tmp_path / "one"))
    a, b = (load_run(tmp_path / name)[0].state_dict() for name in ("one", "run"))
    assert all((a[k] - b[k]).abs().max() < 1e-5 for k in a)


# pitfalls, randomness: "identical initial weights on all ranks; both reproducible from one seed"
def test_dropout_draws_other_numbers_on_each_process_and_goes_on_exactly(world, tmp_path):
    cfg = of_one_process(tmp_path, data_parallel=2, batch_size=2, steps=4)
    cfg["model"]["dropout"] = 0.3
    world(2).run("cases.trained", cfg, str(tmp_path / "whole"))
    world(2).run("cases.trained", {**cfg, "steps": 2}, str(tmp_path / "parts"))
    world(2).run("cases.trained", cfg, str(tmp_path / "parts"), resume=True)
    same(rows(tmp_path / "parts"), rows(tmp_path / "whole"))
    alone({**cfg, "data_parallel": 1, "batch_size": 4}, tmp_path / "one")
    assert rows(tmp_path / "one")[0]["loss"] != rows(tmp_path / "whole")[0]["loss"]


def test_the_rows_of_a_step_cannot_change(world, tmp_path):
    cfg = of_one_process(tmp_path, steps=2)
    alone(cfg, tmp_path / "run")
    for said in world(2).run("grid.refused_run", {**cfg, **FSDP, "steps": 4}, str(tmp_path / "run")):
        assert "data_parallel=1, now data_parallel=2" in said


def test_metrics_count_the_tokens_of_all_processes(world, tmp_path):
    cfg = of_one_process(tmp_path, data_parallel=2, batch_size=2, steps=2)
    world(2).run("cases.trained", cfg, str(tmp_path / "two"))
    alone(cfg, tmp_path / "one")
    for key in ("tokens", "flops", "targets"):
        a, b = (
            [json.loads(line)[key] for line in (tmp_path / n / "metrics.jsonl").read_text().splitlines()]
            for n in ("one", "two")
        )
        assert a == b
    assert a[-1] > 0
