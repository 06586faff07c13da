"""Sharded checkpoints of one process: the same run, whole files from them and back, and what is damaged."""

import json

import pytest
import torch
from test_train_checkpoint import names
from test_train_resume import crash_at, exact_rows, stop_at

from twoaxis import InputError, RunError, load, save
from twoaxis.model.shards import Shards
from twoaxis.train import load_run, train
from twoaxis.train.checkpoint import complete

SHARDED = {"checkpoint_format": "sharded"}


def newest(folder):
    return complete(folder / "checkpoints")[-1]


@pytest.mark.parametrize("later", [False, True], ids=["at once", "in the background"])
def test_a_run_goes_on_exactly_from_shards(tiny, tmp_path, later):
    cfg = tiny(steps=8, checkpoint_every=2, checkpoint_async=later, **SHARDED)
    train(tiny(steps=8), tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        train(cfg, tmp_path / "parts", on_step=crash_at(7))
    train(cfg, tmp_path / "parts", resume=True)
    assert exact_rows(tmp_path / "parts") == exact_rows(tmp_path / "whole")
    found = ["COMPLETE", "config.json", "index.json", "shard-00000.safetensors", "state.json"]
    assert names(newest(tmp_path / "parts")) == found


# whole files from shards and shards from whole files, by loading and by going on
def test_shards_and_whole_files_are_turned_into_each_other(tiny, tmp_path):
    run, model = tmp_path / "run", {"tie_embeddings": True, "depth": "hyper_connections"}
    train(tiny(model=model, **SHARDED), run, on_step=stop_at(2))
    loaded = load(newest(run))
    save(loaded, tmp_path / "file")
    again = load(tmp_path / "file").state_dict()
    assert all(torch.equal(t, again[n]) for n, t in load_run(run)[0].state_dict().items())
    train(tiny(model=model), run, resume=True, on_step=stop_at(4))
    assert "model.safetensors" in names(newest(run))
    train(tiny(model=model, **SHARDED), run, resume=True)
    train(tiny(model=model), tmp_path / "whole")
    assert exact_rows(run) == exact_rows(tmp_path / "whole")


def test_the_newest_and_every_so_many_stay(tiny, tmp_path):
    for folder, how in (("file", {}), ("sharded", SHARDED)):
        train(tiny(steps=7, checkpoint_every=1, keep_checkpoints=2, keep_every=3, **how), tmp_path / folder)
        assert [p.name[-1] for p in complete(tmp_path / folder / "checkpoints")] == ["3", "6", "7"]


@pytest.mark.parametrize("file", ["index.json", "shard-00000.safetensors", "state.json"])
def test_a_cut_file_makes_an_older_checkpoint_count(tiny, tmp_path, file, caplog):
    cfg = tiny(steps=4, checkpoint_every=2, **SHARDED)
    train(cfg, tmp_path)
    path = newest(tmp_path) / file
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "results.json").unlink()
    seen = []
    train(cfg, tmp_path, resume=True, on_step=lambda row: seen.append(row["step"]))
    assert seen == [3, 4]
    assert f"skipped checkpoint step-00000004: {file} has" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update(shape=[999, 99]), "do not make"),
        (lambda t: t["pieces"][0].__setitem__(0, "../../state.json"), "no file of this folder"),
        (lambda t: t["pieces"][0].__setitem__(1, [1, 0]), "outside"),
        (lambda t: t["pieces"][0].__setitem__(1, [-1, 0]), "not a list of sizes"),
        (lambda t: t.update(dtype="object"), "object"),
    ],
    ids=["shape", "path", "outside", "negative", "dtype"],
)
def test_an_index_that_cannot_be_is_refused(change, said, tiny, tmp_path):
    train(tiny(steps=1, **SHARDED), tmp_path)
    path = newest(tmp_path) / "index.json"
    data = json.loads(path.read_text())
    change(data["tensors"]["model/embedding.weight"])
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=said) as error:
        load(path.parent)
    assert len(str(error.value).splitlines()) == 1


# pitfalls, Saving: "a misspelled key is caught", "a missing or unexpected key is an error, never a warning"
def test_a_tensor_that_is_missing_is_refused(tiny, tmp_path):
    train(tiny(steps=1, **SHARDED), tmp_path)
    folder = newest(tmp_path)
    data = json.loads((folder / "index.json").read_text())
    del data["tensors"]["model/embedding.weight"]
    (folder / "index.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match="lacks 1 tensors"):
        load(folder)


def test_a_full_disk_leaves_the_earlier_checkpoint(tiny, tmp_path, monkeypatch):
    from twoaxis.train import dcp_save

    def full(path, data):
        if "00000004" in str(path) and path.suffix == ".safetensors":
            path.write_bytes(data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        path.write_bytes(data)

    cfg = tiny(steps=4, checkpoint_every=2, **SHARDED)
    with monkeypatch.context() as patch:
        patch.setattr(dcp_save, "write_synced", full)
        with pytest.raises(RunError, match=r"cannot save step 4.*No space left.*are free.*step-00000002"):
            train(cfg, tmp_path / "run")
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000002"]
    train(cfg, tmp_path / "run", resume=True)
    train(tiny(steps=4), tmp_path / "whole")
    assert exact_rows(tmp_path / "run") == exact_rows(tmp_path / "whole")


def test_the_index_names_every_piece_once(tiny, tmp_path):
    train(tiny(steps=1, **SHARDED), tmp_path)
    tensors = Shards(newest(tmp_path)).tensors
    assert {n.split("/")[0] for n in tensors} == {"model", "optimizer", "random"}
    model = load_run(tmp_path)[0]
    assert {n.removeprefix("model/") for n in tensors if n.startswith("model/")} == {
        n for n, _ in model.named_parameters()
    }


def test_whole_files_are_not_written_in_the_background(tiny):
    with pytest.raises(InputError, match="only sharded ones"):
        tiny(checkpoint_async=True)
