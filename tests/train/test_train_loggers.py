import sys
import types
import warnings

import pytest

from twoaxis import InputError
from twoaxis.train import train
from twoaxis.train.metrics import read_metrics


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_logger_that_is_not_installed_names_its_package_before_the_first_step(
    name, tiny, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"pip install {name}, or leave it out"):
        train(tiny(loggers=(name,)), tmp_path / "run", on_step=lambda row: pytest.fail("a step was made"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_configuration_and_every_row(name, tiny, tmp_path, monkeypatch):
    calls = []
    library = types.ModuleType(name)
    library.init = lambda **settings: calls.append(settings)
    library.log = lambda row, step: calls.append((step, row))
    library.finish = lambda: calls.append("finished")
    monkeypatch.setitem(sys.modules, name, library)
    cfg = tiny(steps=3, loggers=(name,))
    train(cfg, tmp_path / "my-run")
    rows = read_metrics(tmp_path / "my-run" / "metrics.jsonl")
    expected = {"project": "twoaxis", "name": "my-run", "config": cfg.to_dict()}
    assert calls == [expected, *[(row["step"], row) for row in rows], "finished"]


def test_tensorboard_event_files_hold_every_number(tiny, tmp_path):
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library itself
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        train(tiny(steps=3, loggers=("tensorboard",)), tmp_path)
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(row["step"], pytest.approx(row["loss"])) for row in rows]
    assert "val_bits_per_byte" in events.Tags()["scalars"]
