"""Each number of `twoaxis.cost` against a built model."""

import subprocess
import sys

import pytest
import torch
from cases import CASES, config

import configurations
import twoaxis
from twoaxis.depth import named_tensors
from twoaxis.types import TensorSpec

B, T = 2, 11
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def built(cfg: twoaxis.ModelConfig) -> twoaxis.Decoder | None:
    """The model, or None where the method refuses the block list; then the cost refuses it too."""
    try:
        return twoaxis.Decoder(cfg)
    except twoaxis.InputError:
        with pytest.raises(twoaxis.InputError):
            twoaxis.cost(cfg, B, T)
        return None


def found_specs(state: object) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in named_tensors(state).items()
    }


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@every_case
def test_parameters(case):
    cfg = case.config(tie_embeddings=False)
    if model := built(cfg):
        cost = twoaxis.cost(cfg, B, T)
        assert cost.parameters == parameters(model)
        assert cost.by_part["embedding"].parameters == cost.by_part["head"].parameters == 11 * 12
        cores = sum(parameters(block.cores) for block in model.blocks)
        assert cost.by_part["depth"].parameters == cost.parameters - cores - 2 * 11 * 12


@pytest.mark.parametrize("depth", configurations.depths())
def test_parameters_of_any_number_of_blocks(depth):
    for n_blocks in (1, 2, 7):
        cfg = config(depth, n_blocks=n_blocks)
        assert twoaxis.cost(cfg, B, T).parameters == parameters(twoaxis.Decoder(cfg)), n_blocks


@every_case
def test_caches_and_states(case):
    """Decode state is what the cache holds after T tokens; state_spec is what a forward pass hands on."""
    cfg = case.config()
    if model := built(cfg):
        cache = model.new_cache(B, max_length=T)
        with torch.no_grad():
            _, states = model(configurations.tokens(B, T), cache=cache, return_states=True)
        assert cache.length == T
        assert twoaxis.cost(cfg, B, T).decode_state_bytes == cache.nbytes
        for index in range(cfg.n_blocks + 1):
            assert model.stream.state_spec(index, B, T) == found_specs(states[f"block.{index}"]), index


def test_a_window_wider_than_the_row_is_held_whole():
    cfg = config("additive", "wide window")
    cache = twoaxis.Decoder(cfg).new_cache(B, max_length=T)
    assert twoaxis.cost(cfg, B, T).decode_state_bytes == cache.nbytes == 3 * 2 * B * 40 * 24 * 4


def test_decode_state_follows_the_weights_dtype():
    cfg = config("additive", "local to global")
    model = twoaxis.Decoder(cfg).bfloat16()
    assert twoaxis.cost(cfg, B, T, dtype="bfloat16").decode_state_bytes == model.new_cache(B, T).nbytes


@pytest.mark.parametrize(("n_blocks", "state_dtype"), [(1, "float32"), (5, "bfloat16")])
@pytest.mark.parametrize("depth", configurations.depths())
def test_boundary_is_the_largest_state(depth, n_blocks, state_dtype):
    cfg = config(depth, n_blocks=n_blocks, state_dtype=state_dtype)
    model = twoaxis.Decoder(cfg)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # the state's dtype survives autocast
        _, states = model(torch.randint(cfg.vocab_size, (B, T)), return_states=True)
    sizes = []
    for index in range(n_blocks + 1):
        found = found_specs(states[f"block.{index}"])
        assert model.stream.state_spec(index, B, T) == found, f"after {index} blocks"
        sizes.append(sum(spec.nbytes for spec in found.values()))
    assert twoaxis.cost(cfg, B, T).boundary_bytes["full"] == max(sizes)


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


def test_more_tokens_than_can_be_laid_out_are_refused_at_once():
    cfg = twoaxis.ModelConfig(sequence=["short_swa(window=65)", "mlp"])
    with pytest.raises(
        twoaxis.InputError, match="seq_len=1000000000000: costs are counted for at most 16777216"
    ):
        twoaxis.cost(cfg, 1, 10**12)
