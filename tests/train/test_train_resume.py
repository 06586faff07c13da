import hashlib
import json
import os
import random
import signal

import numpy as np
import pytest
import torch

from twoaxis import InputError, RunError
from twoaxis.model import read_safetensors
from twoaxis.train import load_run, train
from twoaxis.train.metrics import read_metrics
from twoaxis.train.randomness import isolated, random_state, set_random_state

EXACT = ("step", "tokens", "flops", "loss", "lr", "grad_norm", "targets")
VARIANTS = {
    "denseformer": {"model": {"depth": "denseformer"}},
    "hyper_connections-bf16": {"model": {"depth": "hyper_connections"}, "precision": "bf16_master"},
    "attnres-muon-documents": {"model": {"depth": "attnres"}, "optimizer": "muon", "packing": "documents"},
    "additive-bf16-accumulation": {"precision": "bf16_master", "accumulation": 2, "schedule": "wsd"},
}


def stop_at(step):
    """An `on_step` that sends this process SIGTERM during a step."""

    def on_step(row):
        if row["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_step


def crash_at(step):
    def on_step(row):
        if row["step"] == step:
            raise ZeroDivisionError

    return on_step


def exact_rows(folder):
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: row[k] for k in row if k != "seconds"} for row in rows]


def tensors_of(folder, step):
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    return {name: read_safetensors(checkpoint / f"{name}.safetensors") for name in ("model", "state")}


# "40 training steps equal 20 + resume + 20 bit for bit on the CPU, for three different methods"; pitfalls,
# Saving: "dropout 0.1, warm-up + cosine schedule; 10 steps against 5 + resume + 5 -> identical losses and
# learning rates step by step on CPU"
@pytest.mark.parametrize("variant", VARIANTS)
def test_20_and_20_steps_are_40(variant, tiny, tmp_path):
    cfg = tiny(steps=40, warmup_steps=10, eval_every=10, eval_tokens=50, **VARIANTS[variant])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(cfg, whole)
    assert train(cfg, parts, on_step=stop_at(20))["status"] == "interrupted"
    torch.rand(3), random.random(), np.random.rand()  # whatever happens in between
    results = train(cfg, parts, resume=True)
    assert (results["status"], results["steps"]) == ("done", 40)
    rows = exact_rows(whole)
    assert exact_rows(parts) == rows
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert all(set(EXACT) <= set(row) for row in rows)
    assert len({row["lr"] for row in rows[10:]}) > 5
    left, right = tensors_of(whole, 40), tensors_of(parts, 40)
    for kind in left:
        assert left[kind].keys() == right[kind].keys()
        assert all(torch.equal(left[kind][name], right[kind][name]) for name in left[kind])
    states = [json.loads((f / "checkpoints/step-00000040/state.json").read_text()) for f in (whole, parts)]
    for state in states:
        assert state["progress"].pop("seconds") > 0
    assert states[0] == states[1]


def test_rows_after_the_checkpoint_of_a_crashed_run_are_dropped(tiny, tmp_path):
    cfg = tiny(steps=9, checkpoint_every=4)
    train(cfg, tmp_path / "whole")
    folder = tmp_path / "crashed"
    with pytest.raises(ZeroDivisionError):
        train(cfg, folder, on_step=crash_at(7))
    assert len(read_metrics(folder / "metrics.jsonl")) == 7
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # killed in the middle of a line
    seen = []
    train(cfg, folder, resume=True, on_step=lambda row: seen.append(row["step"]))
    assert seen == [5, 6, 7, 8, 9]
    assert exact_rows(folder) == exact_rows(tmp_path / "whole")


def test_metrics_damaged_in_the_middle_are_an_error(tiny, tmp_path):
    train(tiny(steps=3), tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:9], lines[2], ""]))
    with pytest.raises(RunError, match="line 2 is not JSON"):
        train(tiny(steps=3), tmp_path, resume=True)


@pytest.mark.parametrize("line", ["{}", "[]", '{"step": "a", "tokens": 1, "seconds": 1, "loss": 1}'])
def test_metrics_without_their_columns_are_an_error(line, tiny, tmp_path):
    train(tiny(steps=1), tmp_path)
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(RunError, match="line 1 lacks"):
        train(tiny(steps=1), tmp_path, resume=True)


def sign(checkpoint):
    """Make the marker agree with a state.json that was changed, as if it had been saved so."""
    data = (checkpoint / "state.json").read_bytes()
    marks = json.loads((checkpoint / "COMPLETE").read_text())
    marks["state.json"] = [len(data), hashlib.sha256(data).hexdigest()]
    (checkpoint / "COMPLETE").write_text(json.dumps(marks))


@pytest.mark.parametrize("damage", ["{", "[]", '{"progress": 1, "loader": 1, "random": 1}'])
def test_a_damaged_state_is_bad_input(damage, tiny, tmp_path):
    train(tiny(steps=1), tmp_path)
    state = tmp_path / "checkpoints" / "step-00000001" / "state.json"
    state.write_text(damage)
    sign(state.parent)
    with pytest.raises(InputError, match=r"state\.json (is damaged|has other fields)"):
        train(tiny(steps=1), tmp_path, resume=True)


def test_a_run_that_is_done_returns_its_results(tiny, tmp_path):
    cfg = tiny(steps=3, eval_every=2)
    first = train(cfg, tmp_path)
    files = sorted(tmp_path.rglob("*"))
    again = train(cfg, tmp_path, resume=True, on_step=crash_at(1))
    assert again == first == json.loads((tmp_path / "results.json").read_text())
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize("resume", [False, True])
def test_a_comparison_is_not_written_over(resume, tiny, tmp_path):
    (tmp_path / "study.yaml").write_text("rows: []\n")
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(
        InputError, match="holds a comparison, whose results would be lost; give another folder"
    ):
        train(tiny(steps=1), tmp_path, resume=resume)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["results.json", "study.yaml"]


def test_resume_without_a_checkpoint_starts_from_the_beginning(tiny, tmp_path, caplog):
    cfg = tiny(steps=3)
    train(cfg, tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        train(cfg, tmp_path / "run", on_step=crash_at(2))
    train(cfg, tmp_path / "run", resume=True)
    assert "no complete checkpoint; the run starts from the beginning" in caplog.text
    train(cfg, tmp_path / "new", resume=True)
    assert "new holds no run to go on with; a new one starts there" in caplog.text
    assert exact_rows(tmp_path / "whole") == exact_rows(tmp_path / "run") == exact_rows(tmp_path / "new")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"lr": 0.5}, "lr=0.002, now lr=0.5"),
        ({"batch_size": 3}, "batch_size=2"),
        ({"seed": 1}, "seed=0"),
        ({"model": {"depth": "attnres"}}, "model.depth='additive', now model.depth='attnres'"),
        ({"model": {"d_model": 32}}, "model.d_model=16"),
        ({"steps": 5}, "steps=5"),
        ({"steps": 7}, "steps=7"),
        ({"steps": 2}, "steps=2"),
        ({"precision": "autocast"}, "precision='float32'"),
    ],
    ids=str,
)
def test_other_settings_are_refused_by_name(change, name, tiny, tmp_path):
    train(tiny(warmup_steps=1), tmp_path, on_step=stop_at(4))
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(InputError, match="cannot resume") as error:
        train(tiny(**{"warmup_steps": 1} | change), tmp_path, resume=True)
    assert name in str(error.value)
    assert (tmp_path / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("run", "steps", "fits"),
    [
        ({"schedule": "constant"}, 9, True),
        ({"schedule": "constant"}, 3, False),  # four are done
        ({"schedule": "wsd", "decay_fraction": 0.2}, 9, True),
        ({"schedule": "wsd", "decay_fraction": 0.9}, 9, False),  # the decay had begun
        ({"schedule": "cosine", "warmup_steps": 4}, 9, True),  # still warming up
    ],
    ids=str,
)
def test_steps_may_change_as_long_as_no_learning_rate_would_have(run, steps, fits, tiny, tmp_path):
    run = {"warmup_steps": 1} | run
    train(tiny(steps=6, **run), tmp_path / "a", on_step=stop_at(4))
    if not fits:
        with pytest.raises(InputError, match="cannot resume"):
            train(tiny(steps=steps, **run), tmp_path / "a", resume=True)
        return
    train(tiny(steps=steps, **run), tmp_path / "a", resume=True)
    train(tiny(steps=steps, **run), tmp_path / "b")
    assert exact_rows(tmp_path / "a") == exact_rows(tmp_path / "b")


def test_how_often_to_validate_and_save_may_change(tiny, tmp_path):
    train(tiny(), tmp_path, on_step=stop_at(2))
    cfg = tiny(eval_every=1, checkpoint_every=1, keep_checkpoints=3, checkpointing=True)
    train(cfg, tmp_path, resume=True)
    assert load_run(tmp_path)[2] == cfg
    assert ["val_loss" in row for row in exact_rows(tmp_path)] == [False] * 2 + [True] * 4


def test_a_used_folder_is_refused_without_resume(tiny, tmp_path):
    train(tiny(steps=1), tmp_path)
    with pytest.raises(InputError, match="already holds a run; go on with it by --resume"):
        train(tiny(steps=1), tmp_path)


def test_other_data_are_refused(tiny, tmp_path, text):
    copy = tmp_path / "copy.txt"
    copy.write_text(text.read_text())
    train(tiny(data=str(copy)), tmp_path / "run", on_step=stop_at(2))
    copy.write_text(text.read_text() + "one more line\n")
    with pytest.raises(InputError, match="cannot resume the data"):
        train(tiny(data=str(copy)), tmp_path / "run", resume=True)


# pitfalls, Saving: "every saved field is read back (a misspelled key is caught by a round-trip test)"
@pytest.mark.parametrize(
    "place", [(), ("progress",), ("loader",), ("random",), ("random", "numpy")], ids=".".join
)
def test_a_misspelled_key_of_the_saved_state_is_refused(place, tiny, tmp_path):
    train(tiny(), tmp_path, on_step=stop_at(2))
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    state = json.loads((checkpoint / "state.json").read_text())
    inner = state
    for key in place:
        inner = inner[key]
    key = sorted(inner)[0]
    inner[key[:-1] + "_"] = inner.pop(key)
    (checkpoint / "state.json").write_text(json.dumps(state))
    sign(checkpoint)
    with pytest.raises(InputError):
        train(tiny(), tmp_path, resume=True)


# pitfalls, Saving: "save with Python, NumPy and torch generators, load with the safe loader -> loads; state
# stored as plain numbers, lists and tensors"
def test_generators_go_on_from_their_saved_states():
    def draw():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.randn(1).item()

    draw()  # leaves second normal numbers behind
    facts, tensors = random_state()
    first = draw()
    assert draw() != first
    set_random_state(json.loads(json.dumps(facts)), {name: t.clone() for name, t in tensors.items()})
    assert draw() == first


def test_a_run_leaves_the_callers_generators_alone_and_depends_on_its_seed_only(tiny, tmp_path):
    torch.manual_seed(5)
    with isolated(3):
        inside = torch.rand(1)
    with isolated(3):
        assert torch.equal(torch.rand(1), inside)
    expected = torch.Generator().manual_seed(5)
    runs = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny(steps=2, seed=seed), tmp_path / name)
        runs[name] = (exact_rows(tmp_path / name), load_run(tmp_path / name)[0].embedding.weight)
    assert torch.rand(1) == torch.rand(1, generator=expected)
    assert runs["a"][0] == runs["b"][0] != runs["c"][0]
    assert torch.equal(runs["a"][1], runs["b"][1])
    assert not torch.equal(runs["a"][1], runs["c"][1])
