"""What every method of both axes must do, whatever it is: one file over the whole registry.

`pytest` runs these checks on pairs (`configurations.pairwise`), `pytest -m full` on the whole cross product.
The quoted lines are from the project's list of pitfalls, see docs/pitfalls.md.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import functional_call

import twoaxis
from configurations import VOCAB, Case, method_of, pairwise, perturb, tokens
from twoaxis.depth import named_tensors

CASES = pairwise()
FRAME = {  # checks that options of a method hardly touch: in this file, each method once
    "test_logits_and_loss",
    "test_no_token_sees_a_later_one",
    "test_autocast_keeps_the_state",
    "test_empty_input",
    "test_saved_model_is_the_same",
    "test_copy_is_independent",
    "test_one_seed_one_model",
    "test_inputs_are_not_changed",
}
CLOSE = {"rtol": 0.0, "atol": 1e-10}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = metafunc.module.CASES
        if cases is CASES and metafunc.function.__name__ in FRAME:
            cases = cases[: len(twoaxis.methods("depth"))]
        metafunc.parametrize("case", cases, ids=str)


def gradients(model: twoaxis.Decoder, **options: Any) -> dict[str, Tensor | None]:
    """The gradient of every parameter, for one batch."""
    model.zero_grad()
    model.loss(tokens(), tokens(seed=2), **options).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_logits_and_loss(case: Case) -> None:
    model, x = case.fresh(), tokens(3, 7)
    logits = model(x)
    assert (logits.shape, logits.dtype) == ((3, 7, VOCAB), torch.float32)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())
    torch.testing.assert_close(model.loss(x, x), expected)


@pytest.mark.parametrize("n_blocks", [1, 2, 3], ids="L={}".format)
def test_every_parameter_has_a_gradient(case: Case, n_blocks: int) -> None:
    # each method with L = 1, 2, 3: no parameter without gradient; each entry of each one counts
    model = case.model(n_blocks=n_blocks)
    grads = gradients(model)
    assert [name for name, g in grads.items() if g is None or not g.isfinite().all()] == []
    elsewhere = gradients(perturb(model, -0.6))  # a relu that is shut at one point is open at the other
    assert [name for name, g in grads.items() if ((g == 0) & (elsewhere[name] == 0)).any()] == []


def test_state_is_as_declared(case: Case) -> None:
    model = case.model(torch.float32)
    _, states = model(tokens(), return_states=True)
    for depth in range(model.cfg.n_blocks + 1):
        found = named_tensors(states[f"block.{depth}"])
        declared = model.stream.state_spec(depth, 2, 13)
        assert {n: (tuple(t.shape), t.dtype) for n, t in found.items()} == {
            n: (s.shape, getattr(torch, s.dtype)) for n, s in declared.items()
        }


def test_exported_states(case: Case) -> None:
    # the head of the last exported state gives the logits; a numbered source is one value at all depths
    model = case.model()
    logits, states = model(tokens(), return_states=True)
    assert torch.equal(model.head(states.pop("final")), logits)
    numbered: dict[str, Tensor] = {}
    for state in states.values():
        for name, tensor in named_tensors(state).items():
            if name.split(".")[-1].isdigit():
                assert torch.equal(numbered.setdefault(name, tensor), tensor)


def test_no_token_sees_a_later_one(case: Case) -> None:
    model, x = case.model(), tokens()
    changed = x.clone()
    changed[:, 6] = (x[:, 6] + 1) % VOCAB
    moved = (model(x) - model(changed)).abs().amax((0, 2)) > 0
    assert not moved[:6].any()
    assert moved[6]


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0)], ids=["B=0", "T=0"])
def test_empty_input(case: Case, batch: int, length: int) -> None:
    # B=0, T=4; B=2, T=0: empty outputs of the right shape and dtype, caches unchanged
    model = case.model()
    empty = torch.empty(batch, length, dtype=torch.long)
    logits = model(empty, segments=empty, cache=model.new_cache(batch))
    assert (logits.shape, logits.dtype) == ((batch, length, VOCAB), torch.float64)
    model.loss(empty, empty).backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_saved_model_is_the_same(case: Case, tmp_path: Path) -> None:
    model = case.model(torch.float32)
    twoaxis.save(model, tmp_path)
    loaded = twoaxis.load(tmp_path)
    assert loaded.cfg == model.cfg
    assert torch.equal(loaded(tokens()), model(tokens()))


def test_specs_and_configurations_round_trip(case: Case) -> None:
    cfg = case.config()
    assert twoaxis.ModelConfig.from_dict(json.loads(cfg.to_json())) == cfg
    depth = cfg.depth_config()
    assert twoaxis.parse_spec("depth", depth.spec()) == depth
    assert twoaxis.parse_spec("depth", case.depth) == depth
    for core in (c for block in cfg.block_configs() for c in block):
        assert twoaxis.parse_spec("sequence", core.spec()) == core


def test_checkpointing_changes_no_gradient(case: Case) -> None:
    # gradients under recomputation equal those without: a history is a value, never a growing list
    model = case.model()
    kept = gradients(model)
    model.checkpointing = True
    torch.testing.assert_close(gradients(model), kept, rtol=0, atol=1e-13)


def test_gradients_equal_finite_differences(case: Case) -> None:
    # float64 gradcheck along one random direction of each part's parameters
    model, cotangent = case.model(), torch.randn(1, 5, VOCAB, dtype=torch.float64)
    along = {n: 0.05 * torch.randn_like(p) for n, p in model.named_parameters()}

    def output(embedding: Tensor, cores: Tensor, depth: Tensor) -> Tensor:
        steps = {n: embedding if "embedding" in n else cores if ".cores." in n else depth for n in along}
        moved = {n: p.detach() + steps[n] * along[n] for n, p in model.named_parameters()}
        return (functional_call(model, moved, (tokens(1, 5),)) * cotangent).sum()

    at = tuple(torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert gradcheck(output, at, eps=2e-6, rtol=1e-6, atol=1e-7)


def test_autocast_keeps_the_state(case: Case) -> None:
    model = perturb(case.fresh(), 0.1)  # far from the start some methods amplify any rounding of their cores
    with torch.autocast("cpu", torch.bfloat16):
        logits, states = model(tokens(), return_states=True)
        loss = model.loss(tokens(), tokens())
    final = states.pop("final")
    dtypes = {t.dtype for state in states.values() for t in named_tensors(state).values()}
    assert (dtypes, final.dtype, loss.dtype) == ({torch.float32}, torch.float32, torch.float32)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    full = model(tokens())
    assert 0 < (logits.float() - full).norm() < 0.5 * full.norm()  # some random points magnify rounding


def test_weights_in_bfloat16_keep_the_states_dtype(case: Case) -> None:
    # as training with float32 master weights has them; one step of a loss and of decoding
    x = tokens(2, 3)
    model = case.fresh().to(torch.bfloat16)
    _, states = model(x, return_states=True)
    states.pop("final")
    dtypes = {t.dtype for state in states.values() for t in named_tensors(state).values()}
    assert dtypes == {torch.float32}
    model.loss(x, x).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        assert model(x, cache=model.new_cache(2)).isfinite().all()


def test_copy_is_independent(case: Case) -> None:
    model = case.model()
    twin, before = copy.deepcopy(model), model(tokens())
    assert torch.equal(twin(tokens()), before)
    perturb(twin)
    assert torch.equal(model(tokens()), before)
    assert torch.equal(perturb(model)(tokens()), twin(tokens()))  # what was shared is shared in the copy


def test_one_seed_one_model(case: Case) -> None:
    first, second, other = (case.fresh(seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_inputs_are_not_changed(case: Case) -> None:
    model, x = case.model(), tokens()
    segments, positions = torch.zeros_like(x), torch.arange(13)
    inputs = [x, segments, positions]
    before = [t.clone() for t in inputs]
    _, states = model(x, segments=segments, positions=positions, return_states=True)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    ctx = twoaxis.Context(segments, positions)
    for index, block in enumerate(model.blocks):
        state = named_tensors(states[f"block.{index}"])
        versions = {name: (t._version, t.clone()) for name, t in state.items()}
        block(states[f"block.{index}"], ctx)
        assert all(t._version == versions[n][0] and torch.equal(t, versions[n][1]) for n, t in state.items())


def distance_from_standard(case: Case, **fields: Any) -> float | None:
    """Largest difference in logits between a fresh model and the standard one of the same weights.

    None if the method builds its cores differently, so that weights cannot be shared.
    """
    model = case.fresh(**fields).double()
    for block in model.blocks:
        perturb(block.cores)
    plain = Case("additive", case.sequence).fresh(**fields).double()
    shared = {n: w for n, w in model.state_dict().items() if ".cores." in n or not n.startswith("blocks.")}
    if any(n in shared and shared[n].shape != w.shape for n, w in plain.state_dict().items()):
        return None
    plain.load_state_dict({n: shared.get(n, w) for n, w in plain.state_dict().items()})
    return (model(tokens()) - plain(tokens())).abs().max().item()


def test_start_is_as_declared(case: Case) -> None:
    # "exact": a fresh model equals the standard one of the same weights; "up to eps": it does with eps 0
    promise = case.config().depth_config().standard_start()
    assert promise in ("exact", "up to eps", "no")
    distance = distance_from_standard(case, norm_eps=0.0 if promise == "up to eps" else 1e-6)
    if promise == "no" and distance is not None and distance <= 1e-6:
        # a window holds all sources of a short model, and sums of one-sublayer blocks are the outputs themselves
        distance = distance_from_standard(Case(case.depth), n_blocks=7)
    if distance is None:
        assert promise == "no"
    elif promise == "no":
        assert distance > 1e-6
    else:
        assert distance < (1e-12 if promise == "exact" else 1e-10)


DECAYED = {"hyper_connections": {"dynamic"}}  # of the depth axis, because the method's own paper says so


def test_only_matrices_decay(case: Case) -> None:
    # depth weights, gates, scalars, biases and norms do not decay, or as the method's paper sets
    model = case.model()
    rules = model.param_rules()
    assert rules.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        matrix = ".cores." in name or name == "embedding.weight"
        expected = matrix and parameter.ndim == 2 and leaf != "position_bias"
        assert rules[name].decay == (expected or leaf in DECAYED.get(method_of(case.depth), ())), name
        assert rules[name].lr_scale > 0
