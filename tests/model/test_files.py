"""Model folders: what is written is read back, and damage is told in one line."""

import dataclasses
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import twoaxis
from configurations import Case, perturb, tokens
from twoaxis import InputError
from twoaxis.model import load_weights, write_atomically


@pytest.fixture
def tied(tmp_path):
    model = Case("additive", "bias and sink").model(torch.float32)
    twoaxis.save(model, tmp_path)
    return model, tmp_path


def reconfigure(folder, **fields):
    cfg = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**cfg, **fields}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_a_saved_model_is_the_same(tmp_path, tie, dtype):
    model = perturb(Case("additive", "local to global").fresh(tie_embeddings=tie).to(dtype)).eval()
    twoaxis.save(model, tmp_path / "new" / "folder")
    again = twoaxis.load(tmp_path / "new" / "folder").eval()
    assert again.cfg == model.cfg
    assert again(tokens()).equal(model(tokens()))
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert a.equal(b), name
        assert a.dtype == b.dtype
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_a_moved_folder_is_all_that_is_needed(tied, tmp_path_factory):
    # pitfall (Configuration, export): load elsewhere, save again, delete the first, load the second
    model, folder = tied
    second = tmp_path_factory.mktemp("second")
    twoaxis.save(twoaxis.load(folder), second)
    shutil.rmtree(folder)
    assert twoaxis.load(second)(tokens()).equal(model(tokens()))


def test_tied_weights_are_stored_once_and_tied_again(tied):
    # pitfall (Saving): save, load tied: head equals embedding in value and identity after load
    _, folder = tied
    assert "head.weight" not in load_file(folder / "model.safetensors")
    again = twoaxis.load(folder)
    assert again.head.weight is again.embedding.weight


def test_a_tied_file_loads_untied_as_a_copy(tied):
    # pitfall (Saving): load with tying off: untied load gets a copy
    model, folder = tied
    reconfigure(folder, tie_embeddings=False)
    again = twoaxis.load(folder)
    assert again.head.weight.equal(model.embedding.weight)
    assert again.head.weight is not again.embedding.weight
    with torch.no_grad():
        again.head.weight.zero_()
    assert again.embedding.weight.any()


def test_a_file_with_both_names(tied):
    # pitfall (Saving): a reader that expects both names; they must agree where the model ties them
    model, folder = tied
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, "head.weight": weights["embedding.weight"].clone()}, path)
    assert twoaxis.load(folder)(tokens()).equal(model(tokens()))
    save_file({**weights, "head.weight": weights["embedding.weight"] + 1}, path)
    with pytest.raises(InputError, match="head and embedding differ but tie_embeddings is true"):
        twoaxis.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("stream.norm.weight"), "lacks 1 tensors (stream.norm.weight)"),
        (lambda w: w.update(extra=torch.zeros(1)), "has unknown 1 tensors (extra)"),
        (lambda w: w.update({"stream.norm.weight": torch.zeros(5)}), "stream.norm.weight has shape (5,)"),
        (lambda w: w.pop("embedding.weight"), "lacks 1 tensors (embedding.weight)"),
    ],
    ids=["missing", "unexpected", "shape", "embedding"],
)
def test_other_tensors_are_refused(tied, change, message):
    # pitfall (Recomputation; Saving): a missing or unexpected key is an error, never a warning
    _, folder = tied
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(InputError) as caught:
        twoaxis.load(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["nothing", "length", "header", "data", "last byte", "too long"])
def test_a_cut_file_is_told_in_one_line(tied, where):
    # pitfall (Saving): cut at 0 bytes, inside the header, one byte before the end
    _, folder = tied
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little")
    cuts = {
        "nothing": 0,
        "length": 5,
        "header": 8 + header // 2,
        "data": 8 + header + 9,
        "last byte": len(data) - 1,
    }
    path.write_bytes(data[: cuts[where]] if where in cuts else data + b"\0")
    with pytest.raises(InputError) as caught:
        twoaxis.load(folder)
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    assert f"found {path.stat().st_size}" in line
    assert "expected" in line
    if where in ("data", "last byte", "too long"):
        assert f"expected {len(data)} bytes" in line


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 64, (2**62).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]", b"not weights"],
    ids=["noise", "endless header", "no table", "text"],
)
def test_what_is_no_safetensors_file_is_told_in_one_line(tied, data):
    _, folder = tied
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(InputError, match=r"model\.safetensors is damaged") as caught:
        twoaxis.load(folder)
    assert "\n" not in str(caught.value)


def test_missing_and_broken_configurations(tied, tmp_path):
    _, folder = tied
    with pytest.raises(InputError, match=r"holds no config\.json"):
        twoaxis.load(tmp_path / "nowhere")
    reconfigure(folder, windw=8)
    with pytest.raises(InputError, match="no field 'windw'"):
        twoaxis.load(folder)
    for text in ("{", "[]", "3", '{"d_model": "wide"}'):
        (folder / "config.json").write_text(text)
        with pytest.raises(InputError) as caught:
            twoaxis.load(folder)
        assert "\n" not in str(caught.value)
    (folder / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(InputError, match="not JSON"):
        twoaxis.load(folder)
    (folder / "config.json").write_text(twoaxis.ModelConfig().to_json())
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.safetensors does not exist"):
        twoaxis.load(folder)


def test_weights_of_another_model_are_refused(tied, tmp_path_factory):
    _, folder = tied
    other = twoaxis.Decoder(dataclasses.replace(twoaxis.load(folder).cfg, n_blocks=1))
    before = [p.clone() for p in other.parameters()]
    with pytest.raises(InputError, match="belongs to another configuration"):
        load_weights(other, folder / "model.safetensors")
    assert all(a.equal(b) for a, b in zip(before, other.parameters(), strict=True))


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(OSError, match="No space left") as refused:
                write_atomically(path, b"new")
        assert refused.value.filename == str(path)  # what the commands' one line begins with
        assert path.read_bytes() == b"old"
        assert [p.name for p in tmp_path.iterdir()] == ["file"]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [torch.nn.DataParallel, compiled, lambda model: compiled(torch.nn.DataParallel(model))],
    ids=["data-parallel", "compiled", "both"],
)
def test_a_wrapped_model_is_saved_as_it_is(tmp_path, wrap):
    model = twoaxis.Decoder(twoaxis.ModelConfig(vocab_size=7, d_model=4, n_blocks=1, n_heads=2))
    twoaxis.save(wrap(model), tmp_path)
    again = twoaxis.load(tmp_path).state_dict()
    assert all(again[name].equal(value) for name, value in model.state_dict().items())


def test_only_a_decoder_is_saved(tmp_path):
    with pytest.raises(InputError, match="what is saved is a Decoder, not Linear"):
        twoaxis.save(torch.nn.Linear(2, 2), tmp_path)
