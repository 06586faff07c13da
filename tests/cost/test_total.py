"""Each number of `twoaxis.cost` against a built model."""

import subprocess
import sys

import pytest
import torch
from cases import DEPTHS, SEQUENCES, config

import twoaxis
from twoaxis.depth import named_tensors
from twoaxis.types import TensorSpec

B, T = 2, 11
everything = pytest.mark.parametrize("sequence", SEQUENCES)
every_depth = pytest.mark.parametrize("depth", DEPTHS)


def built(cfg: twoaxis.ModelConfig) -> twoaxis.Decoder | None:
    """The model, or None where the method refuses the block list; then the cost refuses it too."""
    try:
        return twoaxis.Decoder(cfg)
    except twoaxis.InputError:
        with pytest.raises(twoaxis.InputError):
            twoaxis.cost(cfg, B, T)
        return None


@everything
@every_depth
def test_parameters(depth, sequence):
    cfg = config(depth, sequence, vocab_size=5, tie_embeddings=False)
    if model := built(cfg):
        cost = twoaxis.cost(cfg, B, T)
        assert cost.parameters == sum(p.numel() for p in model.parameters())
        assert cost.by_part["depth"].parameters == sum(
            p.numel() for n, p in model.named_parameters() if "connections" in n or n.startswith("stream")
        )


@every_depth
@pytest.mark.parametrize("n_blocks", [1, 2, 7])
def test_parameters_of_any_number_of_blocks(depth, n_blocks):
    cfg = config(depth, n_blocks=n_blocks)
    assert twoaxis.cost(cfg, B, T).parameters == sum(p.numel() for p in twoaxis.Decoder(cfg).parameters())


@everything
@every_depth
def test_decode_state_is_what_the_cache_holds(depth, sequence):
    cfg = config(depth, sequence)
    if model := built(cfg):
        cache = model.new_cache(B, max_length=T)
        with torch.no_grad():
            model(torch.randint(cfg.vocab_size, (B, T)), cache=cache)
        assert cache.length == T
        assert twoaxis.cost(cfg, B, T).decode_state_bytes == cache.nbytes


def test_decode_state_follows_the_weights_dtype():
    cfg = config("additive", "local to global")
    model = twoaxis.Decoder(cfg).bfloat16()
    assert twoaxis.cost(cfg, B, T, dtype="bfloat16").decode_state_bytes == model.new_cache(B, T).nbytes


@pytest.mark.parametrize("n_blocks", [1, 3, 5])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@every_depth
def test_state_spec_names_every_tensor_at_every_boundary(depth, state_dtype, n_blocks):
    cfg = config(depth, n_blocks=n_blocks, state_dtype=state_dtype)
    model = twoaxis.Decoder(cfg)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # the state's dtype survives autocast
        _, states = model(torch.randint(cfg.vocab_size, (B, T)), return_states=True)
    sizes = []
    for index in range(n_blocks + 1):
        found = {
            name: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for name, t in named_tensors(states[f"block.{index}"]).items()
        }
        assert model.stream.state_spec(index, B, T) == found, f"after {index} blocks"
        sizes.append(sum(spec.nbytes for spec in found.values()))
    assert max(twoaxis.cost(cfg, B, T).boundary_bytes.values()) == max(sizes)


@everything
@every_depth
def test_state_spec_of_other_blocks(depth, sequence):
    cfg = config(depth, sequence)
    if model := built(cfg):
        with torch.no_grad():
            _, states = model(torch.randint(cfg.vocab_size, (B, T)), return_states=True)
        for index in range(cfg.n_blocks + 1):
            found = {name: tuple(t.shape) for name, t in named_tensors(states[f"block.{index}"]).items()}
            assert {k: v.shape for k, v in model.stream.state_spec(index, B, T).items()} == found


def test_parts_add_up_and_repeat_a_kind_once():
    cfg = config("additive", "list per block")
    cost = twoaxis.cost(cfg, B, T)
    assert set(cost.by_part) == {
        "embedding",
        "head",
        "depth",
        "attention",
        "short_swa",
        "mlp",
        "parallel(attention, mlp)",
    }
    for name in ("parameters", "flops_forward", "flops_backward", "decode_state_bytes"):
        assert getattr(cost, name) == sum(getattr(part, name) for part in cost.by_part.values()) > 0
    assert cost.flops == cost.flops_forward + cost.flops_backward


def test_a_tied_head_is_counted_once():
    tied, untied = (twoaxis.cost(config(tie_embeddings=tie), B, T) for tie in (True, False))
    assert untied.parameters - tied.parameters == 37 * 24
    assert untied.flops == tied.flops


@pytest.mark.parametrize(
    ("sizes", "given"),
    [
        ((0, 4), "batch_size=0"),
        ((2, -1), "seq_len=-1"),
        ((True, 4), "batch_size=True"),
        ((2, 4.0), "seq_len=4.0"),
    ],
)
def test_sizes_below_one_are_refused(sizes, given):
    with pytest.raises(twoaxis.InputError, match=f"^{given}: allowed is an integer of 1 or more$"):
        twoaxis.cost(config(), *sizes)


def test_unknown_dtype_is_refused():
    with pytest.raises(twoaxis.InputError, match="dtype='int8': allowed is float64 or float32"):
        twoaxis.cost(config(), B, T, dtype="int8")


def test_the_function_and_the_room_share_a_name():
    """`twoaxis.cost` is callable whatever was imported before, and the room's other names stay reachable."""
    lines = [
        "import twoaxis.cost.match",
        "from twoaxis.cost import cost, match_mlp",
        "import twoaxis",
        "assert callable(twoaxis.cost) and twoaxis.cost is cost",
        "from twoaxis import cost as again",
        "assert again is cost",
    ]
    subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(lines)], check=True)
