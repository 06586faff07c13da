import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from twoaxis import Decoder, InputError, ModelConfig, RunError, load, save
from twoaxis.model import load_weights
from twoaxis.train import load_run, train
from twoaxis.train import session as session_module
from twoaxis.train.checkpoint import complete, newest_checkpoint, save_checkpoint
from twoaxis.train.metrics import read_metrics
from twoaxis.train.signals import StopSignals

FILES = {"model.safetensors": b"weights", "state.json": b"{}"}
CHILDREN = Path(__file__).with_name("dying_runs.py")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def stop_at(step, number=signal.SIGTERM):
    def on_step(row):
        if row["step"] == step:
            os.kill(os.getpid(), number)

    return on_step


def same_weights(*folders):
    left, right = (load_run(folder)[0].state_dict() for folder in folders)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def in_a_child(*arguments):
    """Run `dying_runs.py`; what it printed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(CHILDREN), *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# pitfalls, Saving: "kill the process at every write during save (also between files); restart -> resume
# uses the last complete one and says which it skipped; a directory counts only once a marker written last
# exists"
def test_a_run_killed_at_any_write_of_a_save_resumes_from_the_last_complete_checkpoint(
    tiny, tmp_path, caplog
):
    cfg = tiny(steps=4, checkpoint_every=2)
    train(cfg, tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):  # before the last save
        train(cfg, tmp_path / "crashed", on_step=lambda row: 1 // (4 - row["step"]))
    points = int(in_a_child("kill", tmp_path / "crashed" / "config.yaml", tmp_path))
    assert points >= 20  # opening, writing and syncing five files, syncing two folders, the renaming
    steps, unfinished = [], 0
    for point in range(points):
        folder = tmp_path / f"killed-{point}"
        best, skipped = newest_checkpoint(folder / "checkpoints")
        assert load(best).cfg == cfg.model
        steps.append(int(best.name[-1]))
        unfinished += len(skipped)
        if point % 6 and point != points - 1:
            continue
        caplog.clear()
        seen = []
        train(cfg, folder, resume=True, on_step=lambda row, seen=seen: seen.append(row["step"]))
        assert seen == {2: [3, 4], 4: []}[steps[-1]]
        assert all(f"skipped checkpoint {line}" in caplog.text for line in skipped)
        assert names(folder / "checkpoints") == ["step-00000002", "step-00000004"]
        assert same_weights(folder, tmp_path / "whole")
        assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    assert steps == sorted(steps)
    assert set(steps) == {2, 4}
    assert unfinished >= 10


# pitfalls, Saving: "a file-size limit or tiny file system so the write fails halfway -> previous checkpoint
# intact, partial files removed, clear message with needed and free bytes, non-zero exit, training state
# still resumable"
def test_a_file_size_limit_leaves_a_resumable_run(tiny, tmp_path):
    small = tiny(steps=4, checkpoint_every=2)
    train(small, tmp_path / "whole")
    (tmp_path / "config.yaml").write_text(small.to_yaml())
    said = json.loads(in_a_child("limit", tmp_path / "config.yaml", tmp_path / "run"))
    assert said["exit"] == 1
    assert "cannot save step 4" in said["error"]
    assert "File too large; it needs" in said["error"]
    assert "bytes and" in said["error"]
    assert "are free" in said["error"]
    assert said["error"].endswith("step-00000002")
    assert len(said["error"].splitlines()) == 1
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000002"]
    assert json.loads((tmp_path / "run" / "results.json").read_text())["status"] == "failed"
    train(small, tmp_path / "run", resume=True)
    assert same_weights(tmp_path / "run", tmp_path / "whole")


def test_a_checkpoint_counts_only_with_its_marker_and_whole_files(tmp_path):
    for step in (5, 10, 15, 20):
        save_checkpoint(tmp_path, step, FILES, keep=9)
    assert complete(tmp_path)[-1].name == "step-00000020"
    (tmp_path / "step-00000020" / "COMPLETE").unlink()
    (tmp_path / "step-00000015" / "state.json").write_bytes(b"{")
    (tmp_path / ".step-00000025.99").mkdir()
    best, skipped = newest_checkpoint(tmp_path)
    assert best.name == "step-00000010"
    assert skipped == [
        "step-00000015: state.json has 1 bytes, not 2",
        "step-00000020: has no COMPLETE",
        ".step-00000025.99: was being written",
    ]


@pytest.mark.parametrize("name", ["step-x", "step-²", "step-٣"])
def test_a_folder_that_is_not_called_by_a_step_is_left_alone(name, tmp_path):
    save_checkpoint(tmp_path, 1, {"config.json": b"{}"}, keep=1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    assert newest_checkpoint(tmp_path) == (tmp_path / "step-00000001", [f"{name}: is not called step-NUMBER"])
    save_checkpoint(tmp_path, 2, {"config.json": b"{}"}, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["step-00000002", name])


def test_a_checkpoint_whose_contents_changed_is_skipped(tmp_path):
    for step in (5, 10):
        save_checkpoint(tmp_path, step, FILES, keep=9)
    (tmp_path / "step-00000010" / "state.json").write_bytes(b"[]")  # as long as what was written
    best, skipped = newest_checkpoint(tmp_path)
    assert best.name == "step-00000005"
    assert skipped == ["step-00000010: state.json is not what was written"]


def test_the_marker_is_written_after_every_other_file(tmp_path, monkeypatch):
    from twoaxis.train import checkpoint

    written, write = [], checkpoint.write_synced
    monkeypatch.setattr(
        checkpoint, "write_synced", lambda path, data: (written.append(path.name), write(path, data))
    )
    save_checkpoint(tmp_path, 1, FILES, keep=1)
    assert written == [*FILES, "COMPLETE"]


def test_old_checkpoints_go_only_after_the_new_one_is_complete(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, FILES, keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(RunError, match="it needs 9 bytes"):
            save_checkpoint(tmp_path, 4, FILES, keep=1)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    save_checkpoint(tmp_path, 1000000000, FILES, keep=1)  # one more digit than usual
    assert names(tmp_path) == ["step-1000000000"]


def fail(*_):
    raise OSError(28, "No space left on device")


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_last_good_checkpoint(
    tiny, tmp_path, monkeypatch
):
    accumulate, calls = session_module.accumulate, []

    def spoiled(*args):
        calls.append(args)
        loss, *rest = accumulate(*args)
        return (float("nan") if len(calls) == 4 else loss, *rest)

    monkeypatch.setattr(session_module, "accumulate", spoiled)
    with pytest.raises(RunError) as error:
        train(tiny(checkpoint_every=2), tmp_path)
    last = tmp_path / "checkpoints" / "step-00000002"
    assert str(error.value) == f"step 4: the loss is nan; the last good checkpoint is {last}"
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["status"], results["steps"], results["error"]) == ("failed", 3, str(error.value))
    assert names(tmp_path / "checkpoints") == ["step-00000002"]
    assert train(tiny(checkpoint_every=2), tmp_path, resume=True)["status"] == "done"


def test_weights_that_are_not_finite_are_never_saved(tiny, tmp_path):
    with pytest.raises(RunError, match=r"step 2: .* (is|not finite).*there is no checkpoint before it"):
        train(tiny(lr=3e38, warmup_steps=0, weight_decay=0, schedule="constant", steps=2), tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_a_signal_after_the_last_step_is_not_lost(tiny, tmp_path):
    with pytest.raises(KeyboardInterrupt, match="SIGTERM came after the last step"):
        train(tiny(steps=3), tmp_path, on_step=stop_at(3))
    assert json.loads((tmp_path / "results.json").read_text())["status"] == "done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_finishes_the_step_and_leaves_a_resumable_run(number, tiny, tmp_path):
    before = signal.getsignal(number)
    results = train(tiny(), tmp_path, on_step=stop_at(3, number))
    assert signal.getsignal(number) is before
    assert (results["status"], results["steps"]) == ("interrupted", 3)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert complete(tmp_path / "checkpoints")[-1].name == "step-00000003"
    assert train(tiny(), tmp_path, resume=True)["status"] == "done"


def test_a_second_signal_interrupts_at_once():
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.caught == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_signals_stay_as_they_are():
    before, seen = signal.getsignal(signal.SIGINT), []

    def run():
        with StopSignals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


# pitfalls, Recomputation: "save from plain, compiled ...; load each into each -> all pairs load strictly; a
# missing or unexpected key is an error, never a warning" (plain and compiled)
@pytest.mark.parametrize("source", ["plain", "compiled", "wrapped"])
@pytest.mark.parametrize("target", ["plain", "compiled", "wrapped"])
def test_compiled_and_plain_models_share_their_files(source, target, tmp_path):
    def build(kind):
        model = Decoder(ModelConfig(d_model=16, n_blocks=2, n_heads=2))
        for index, block in enumerate(model.blocks):
            if kind == "compiled":
                block.compile(backend="eager")
            elif kind == "wrapped":
                model.blocks[index] = torch.compile(block, backend="eager")
        return model

    saved, other = build(source), build(target)
    save(saved, tmp_path)
    load_weights(other, tmp_path / "model.safetensors")
    for left, right in zip(saved.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)
    assert load(tmp_path).state_dict().keys() == build("plain").state_dict().keys()


def test_a_compiled_run_saves_the_names_of_a_plain_one(tiny, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(type(self).__name__))
    train(tiny(compile=True, steps=2), tmp_path / "compiled")
    assert compiled == ["Block", "Block"]
    train(tiny(steps=2), tmp_path / "plain")
    left, right = (load_run(tmp_path / name)[0].state_dict() for name in ("compiled", "plain"))
    assert left.keys() == right.keys()


def test_a_folder_without_a_run_is_refused(tiny, tmp_path):
    with pytest.raises(InputError, match=r"is not a run folder: it has no config\.yaml"):
        load_run(tmp_path)
    (tmp_path / "config.yaml").write_text(tiny().to_yaml())
    with pytest.raises(InputError, match="has no complete checkpoint"):
        load_run(tmp_path)


def test_checkpoints_without_a_configuration_are_neither_gone_on_with_nor_written_over(tiny, tmp_path):
    save_checkpoint(tmp_path / "checkpoints", 1, FILES, keep=1)
    with pytest.raises(InputError, match=r"checkpoints and no config\.yaml"):
        train(tiny(), tmp_path, resume=True)
