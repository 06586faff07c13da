"""Wrong inputs of the public functions end in one line that says what is allowed."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import twoaxis
from twoaxis import Decoder, InputError, ModelConfig

TINY = ModelConfig(vocab_size=11, d_model=8, n_blocks=2, n_heads=2)


@pytest.fixture(scope="module")
def model():
    return Decoder(TINY)


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (torch.tensor([[3, 11]]), "tokens has 11: the model's ids are 0 to 10"),
        (torch.tensor([[-1, 3]]), "tokens has -1: the model's ids are 0 to 10"),
        (torch.ones(1, 2, dtype=torch.uint8), r"not torch\.uint8 \(1, 2\); give them in int64 or int32"),
        (torch.ones(1, 2, dtype=torch.bool), r"not torch\.bool"),
        ([[1, 2]], "tokens must be a tensor of integers .* not list"),
    ],
    ids=["beyond", "negative", "bytes", "booleans", "a list"],
)
def test_tokens(model, tokens, line):
    with pytest.raises(InputError, match=line):
        model(tokens)


@pytest.mark.parametrize(
    "targets", [torch.ones(1, 3, dtype=torch.long), torch.ones(1, 2)], ids=["3", "floats"]
)
def test_targets(model, targets):
    with pytest.raises(InputError, match="targets "):
        model.loss(torch.ones(1, 2, dtype=torch.long), targets)


def test_a_prompt_that_is_a_list(model):
    with pytest.raises(InputError, match="tokens must be a tensor of integers"):
        twoaxis.generate(model, [[1, 2]], 1)


def test_caches(model):
    tokens = torch.ones(2, 3, dtype=torch.long)
    other = Decoder(ModelConfig(vocab_size=11, d_model=8, n_blocks=1, n_heads=2))
    with pytest.raises(
        InputError, match=r"holds nothing of blocks\.1\.cores\.0: it was made by another model"
    ):
        model(tokens, cache=other.new_cache(2))
    cache = model.new_cache(2)
    model(tokens, cache=cache)
    with pytest.raises(InputError, match="give a tensor with one row number for each new row"):
        cache.reorder([1, 0])
    assert cache.length == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda: Decoder({"d_model": 8}),
        lambda: twoaxis.cost("additive", 1, 4),
        lambda: twoaxis.train({"steps": 1}, "run"),
        lambda: twoaxis.compare({"rows": []}),
        lambda: twoaxis.parse_spec("width", "ddl"),
        lambda: twoaxis.depth.build("ddl", 8, ["attention", "mlp"]),
        lambda: twoaxis.depth.build("ddl", 0, [["attention", "mlp"]]),
    ],
    ids=["decoder", "cost", "train", "compare", "axis", "a flat block list", "no width"],
)
def test_what_is_no_configuration(call):
    with pytest.raises(InputError):
        call()


@pytest.mark.parametrize("damage", ["a file", "deep", "a directory", "integers"])
def test_folders(model, tmp_path, damage):
    folder = tmp_path / "model"
    if damage == "a file":
        folder.touch()
        with pytest.raises(InputError, match="is not a folder"):
            twoaxis.save(model, folder)
        return
    twoaxis.save(model, folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    if damage == "deep":
        config.write_text("[" * 100_000)
    elif damage == "a directory":
        weights.unlink()
        os.mkdir(weights)
    else:
        save_file({name: w.int() for name, w in load_file(weights).items()}, weights)
    line = {"deep": "is not JSON", "a directory": "cannot be read", "integers": "floating-point numbers"}[
        damage
    ]
    with pytest.raises(InputError, match=line):
        twoaxis.load(folder)


@pytest.mark.parametrize(
    "depth", ["attnres", "value_residual(form='learnable_plus')"], ids=["none", "places"]
)
def test_constants_are_not_emptied(depth):
    cfg = ModelConfig(vocab_size=11, d_model=8, n_blocks=3, n_heads=2, depth=depth)
    model, tokens = Decoder(cfg), torch.ones(1, 4, dtype=torch.long)
    with torch.device("meta"):
        bare = Decoder(cfg)
    if depth == "attnres":
        bare.to_empty(device="cpu").load_state_dict(model.state_dict())
        assert torch.equal(bare(tokens), model(tokens))
    else:
        with pytest.raises(InputError, match=r"to_empty would leave blocks.* without its numbers"):
            bare.to_empty(device="cpu")
