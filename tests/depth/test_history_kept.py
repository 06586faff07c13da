"""How a model keeps its history: in fewer bits, or not at all for backward; every method that has one."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.utils._pytree as pytree
from points import saved_bytes
from torch import Tensor

import twoaxis
from configurations import Case, depths, tokens
from twoaxis.depth import history as history_module
from twoaxis.depth import named_tensors
from twoaxis.depth.stored import STORED_DTYPES, Stored, store


def keeps(depth: str) -> bool:
    return bool(twoaxis.parse_spec("depth", depth).keeps_history)


KEEPERS = [d for d in depths() if keeps(d)]
OTHERS = [d for d in twoaxis.methods("depth") if not keeps(d)]
DEFAULTS = [d for d in KEEPERS if "(" not in d]
EVERY = [d if d in DEFAULTS else pytest.param(d, marks=pytest.mark.full) for d in KEEPERS]
every_method = pytest.mark.parametrize("depth", EVERY)
HALVES = [
    pytest.param(d, marks=pytest.mark.full) for d in STORED_DTYPES if d != "int8"
]  # one cast: test_stored
every_dtype = pytest.mark.parametrize("dtype", ["int8", *HALVES])


def gradients(model: twoaxis.Decoder) -> dict[str, Tensor]:
    model.zero_grad()
    model.loss(tokens(), tokens(seed=2)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def fake(x: Tensor, dtype: str) -> Tensor:
    """The naive twin of a stored source: a plain tensor of its value, with x's gradient."""
    if dtype == "full":
        return x
    kept = store(x.detach(), dtype)
    assert isinstance(kept, Stored)
    return x + (kept.value() - x).detach()


@every_method
@every_dtype
def test_equals_rounding_with_the_gradient_passed_through(
    depth: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Case(depth).model(history=dtype)
    out, grads = model(tokens()), gradients(model)
    monkeypatch.setattr(history_module, "store", fake)
    torch.testing.assert_close(out, model(tokens()), rtol=0, atol=1e-11)
    torch.testing.assert_close(grads, gradients(model), rtol=0, atol=1e-11)
    if len(named_tensors(model(tokens(), return_states=True)[1]["block.2"])) > 1:  # something was rounded
        assert (out - Case(depth).model()(tokens())).abs().max() > 0


@every_method
@every_dtype
def test_state_is_as_declared(depth: str, dtype: str) -> None:
    """Tensors, names, dtypes and bytes at every boundary; a numbered source is one value at all depths."""
    case = Case(depth)
    model = case.model(torch.float32, history=dtype)
    _, states = model(tokens(), return_states=True)
    numbered: dict[str, Tensor] = {}
    sizes = []
    for n in range(4):
        found, declared = named_tensors(states[f"block.{n}"]), model.stream.state_spec(n, 2, 13)
        assert {k: (tuple(t.shape), str(t.dtype)[6:]) for k, t in found.items()} == {
            k: (s.shape, s.dtype) for k, s in declared.items()
        }
        sizes.append(sum(t.numel() * t.element_size() for t in found.values()))
        for name, tensor in found.items():
            if ".source." in name:
                assert tensor.dtype == (torch.float32 if name.endswith("scale") else getattr(torch, dtype))
                assert torch.equal(numbered.setdefault(name, tensor), tensor)
    cost = twoaxis.cost(case.config(history=dtype), 2, 13)
    assert cost.boundary_bytes["full"] == max(sizes)


@every_method
def test_decoding_equals_training(depth: str) -> None:
    model = Case(depth).model(history="int8")
    with torch.no_grad():
        whole, cache = model(tokens()), model.new_cache(2)
        steps = [model(tokens()[:, t : t + 1], cache=cache) for t in range(13)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-10)


@every_method
def test_survives_checkpointing_copies_and_files(depth: str, tmp_path: Path) -> None:
    model = Case(depth).model(torch.float32, history="int8")
    out, kept = model(tokens()), gradients(model)
    model.checkpointing = True
    torch.testing.assert_close(gradients(model), kept, rtol=0, atol=1e-6)
    assert torch.equal(copy.deepcopy(model)(tokens()), out)
    twoaxis.save(model, tmp_path)
    loaded = twoaxis.load(tmp_path)
    assert loaded.cfg.history == "int8"
    assert torch.equal(loaded(tokens()), out)


@every_method
@every_dtype
def test_survives_autocast(depth: str, dtype: str) -> None:
    model = Case(depth).fresh(history=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        logits, states = model(tokens(), return_states=True)
        loss = model.loss(tokens(), tokens())
    assert (states["final"].dtype, loss.dtype) == (torch.float32, torch.float32)
    assert {t.dtype for t in pytree.tree_leaves(states)} == {torch.float32}  # outwardly
    loss.backward()
    assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "depth",
    [
        d
        if d in DEFAULTS or re.search("window|period|dilation|stride", d)
        else pytest.param(d, marks=pytest.mark.full)
        for d in KEEPERS
    ],
)
def test_nothing_is_kept_that_no_later_layer_reads(depth: str) -> None:
    """Every tensor of every boundary's state moves the output; the state after the last block is what is read."""
    model = Case(depth).model(n_blocks=4)
    _, states = model(tokens(), return_states=True)
    for n in range(5):
        copied = pytree.tree_map(lambda t: t.detach().clone().requires_grad_(), states[f"block.{n}"])
        x = copied
        for block in model.blocks[n:]:
            x = block(x, twoaxis.Context())
        model.stream.close(x, twoaxis.Context()).sum().backward()
        held = named_tensors(copied)
        held.pop("share", None)  # dynamic_window's loss term, which no layer reads
        assert [name for name, t in held.items() if t.grad is None or not t.grad.any()] == [], n


# sources of 12 blocks that reads see; of them those that are kept as they are too, by a norm of one alone
BRANCHES = {"attnres": (25, 1), "dca": (13, 0), "delta_attnres": (24, 1), "vertical_attention": (12, 1)}


@pytest.mark.parametrize("depth", BRANCHES)
def test_training_memory_falls_by_what_branches_take(depth: str) -> None:
    """From 4 bytes a number to 1 and a scale of 4 per token: nothing else is kept, and nothing twice.

    In reads that take a history of either kind; those of a loop that gathers gradients keep less yet of a full one. But
    the 23 reads of delta_attnres keep their results, and a number per token in place of one for each source.
    """
    options = {"tokens": 16, "rebuilding": False}
    full, int8 = (saved_bytes(depth, 12, **options, history=h) for h in ("full", "int8"))
    sources, beside = BRANCHES[depth]
    looped = saved_bytes(depth, 12, tokens=16, history="full")
    if depth == "delta_attnres":
        assert looped - full == 4 * 16 * (23 * (64 + 1) - sum(range(2, 25)))
    else:
        assert looped <= full
    assert full - int8 == 16 * (sources * (4 * 64 - 64 - 4) - beside * 4 * 64)


@every_method
def test_recomputation_is_exact_and_keeps_nothing(depth: str) -> None:
    full, again = (Case(depth).model(history=h) for h in ("full", "recompute"))
    again.train()
    assert torch.equal(again(tokens()), full(tokens()))
    pulled, full.rebuilding = (
        gradients(full),
        False,
    )  # each source gathers its gradient once: another order of sums
    kept, recomputed = gradients(full), gradients(again)
    torch.testing.assert_close(pulled, kept, rtol=1e-9, atol=1e-12)
    assert [name for name in kept if not torch.equal(kept[name], recomputed[name])] == []
    some, many = (saved_bytes(depth, n, history="recompute") for n in (2, 3))
    assert some == many < saved_bytes(depth, 2)  # the embeddings and the head's


def test_recomputation_meets_the_other_ways_of_saving() -> None:
    case = Case("attnres")
    models = [case.fresh(history=h, dropout=0.3) for h in ("int8", "int8, recompute", "int8, recompute")]
    models[2].checkpointing = True
    found = []
    for model in models:
        torch.manual_seed(5)  # dropout
        found.append(gradients(model))
    assert all(torch.equal(found[0][k], other[k]) for other in found[1:] for k in found[0])
    assert models[1].eval()(tokens(), return_states=True)[1].keys() == {
        *(f"block.{n}" for n in range(4)),
        "final",
    }


@pytest.mark.parametrize("depth", OTHERS)
def test_methods_without_a_history_refuse(depth: str) -> None:
    for history in ("int8", "recompute", "window(2)"):
        with pytest.raises(twoaxis.InputError, match=f"{depth} keeps no history; allowed is 'full'"):
            Case(depth).config(history=history)
        with pytest.raises(twoaxis.InputError, match="keeps no history"):
            twoaxis.depth.build(depth, 4, [["mlp"]], history=history)
    assert Case(depth).config(history="full").history == "full"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does it
@pytest.mark.full
@pytest.mark.parametrize("depth", DEFAULTS)
def test_the_whole_model_is_one_graph(depth: str) -> None:
    model = Case(depth).model(torch.float32, history="int8", n_blocks=2)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens()), model(tokens()))
