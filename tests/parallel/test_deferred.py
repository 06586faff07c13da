"""A process of several holds its parts and one tensor besides, with the numbers of one process, drawn or read."""

import pytest
import torch

import twoaxis
from configurations import SEQUENCES, Case, depths, fits
from parallel.test_train_grid import FSDP, SHARDED, of_one_process
from twoaxis.parallel.deferred import Blank


def drawn(cfg, wanted=None):
    """(names and tensors that a blank model draws, the next random numbers)."""
    torch.manual_seed(3)
    blank, found = Blank(cfg), {}
    names = list(blank.tensors) if wanted is None else wanted
    blank.draw(names, lambda name, whole: found.__setitem__(name, whole.clone()), stream=True)
    return found, torch.rand(3)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(d) for d in ("mhc(streams=3)", "ddl(value_dim=3)", "lime", "vertical_attention")),
        *(Case("additive", s) for s in SEQUENCES if fits(Case("additive", s))),
        *(pytest.param(Case(d), marks=pytest.mark.full) for d in depths()),
    ],
    ids=str,
)
def test_a_model_drawn_later_has_the_numbers_of_one_drawn_at_once(case):
    cfg = case.config(n_blocks=3)
    torch.manual_seed(3)
    model = twoaxis.Decoder(cfg)
    expected, after = dict(model.named_parameters()) | dict(model.named_buffers()), torch.rand(3)
    found, then = drawn(cfg)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], t) for n, t in expected.items())
    assert torch.equal(then, after)
    some, then = drawn(cfg, wanted=list(expected)[1::3])
    assert list(expected)[1::3] == [n for n in expected if n in some]
    assert all(torch.equal(t, expected[n]) for n, t in some.items())
    assert torch.equal(then, after)
    left = [n for m in Blank(cfg).model.modules() for n, v in vars(m).items() if isinstance(v, torch.Tensor)]
    assert not left  # what is no parameter and no buffer would stay without numbers


FIELDS = {"vocab_size": 53, "d_model": 32, "n_heads": 2, "n_blocks": 6, "depth": "denseformer"}
GRIDS = {
    "pipeline": (2, {"pipeline": 2, "accumulation": 4}),
    "fsdp": (2, FSDP),
    "fsdp and a pipeline": (4, {"pipeline": 2, "accumulation": 4, **FSDP}),
    "heads": (2, {"tensor_parallel": 2}),
}


# a tensor drawn or read whole, and for random numbers a copy while it is divided
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_process_never_holds_more_than_its_parts_and_one_tensor(world, tmp_path, grid, tied):
    size, options = GRIDS[grid]
    fields = FIELDS | {"tie_embeddings": tied}
    torch.manual_seed(0)
    twoaxis.save(model := twoaxis.Decoder(twoaxis.ModelConfig(**fields)), tmp_path)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    for weights in (None, str(tmp_path / "model.safetensors")):
        for owned, largest, most, equal in world(size).run("held.filled", fields, options, weights):
            assert equal
            assert owned < (0.8 if size == 2 else 0.45) * whole
            assert most <= owned + 2 * largest + 4096  # and small constants
            assert most < 0.9 * whole


def test_resuming_reads_what_the_process_owns_and_nothing_else(world, tmp_path):
    cfg = of_one_process(tmp_path, steps=2, checkpoint_every=2, **SHARDED)
    grid = FSDP | {"batch_size": 2, "pipeline": 2}
    world(4).run("cases.trained", {**cfg, **grid}, str(tmp_path / "run"))
    for options, size in ((grid, 4), ({"pipeline": 2}, 2), (FSDP | {"batch_size": 2}, 2)):
        longer = {**cfg, **options, "steps": 2}
        answers = world(size).run("held.read_of", longer, str(tmp_path / "run"))
        assert all(read == owned for read, owned in answers)
