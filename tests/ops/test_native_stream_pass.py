"""A write of streams and what the next sublayer takes of them in one kernel, against the references in float64."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from agreement import error, results
from native_cases import needs_kernel

from twoaxis import Decoder, ModelConfig, ops
from twoaxis.depth import ahead
from twoaxis.errors import InputError
from twoaxis.ops import hyper_pass, mhc_pass, precision, reference, stream_write

pytestmark = [needs_kernel(name) for name in ("stream_pass", "streams", "stream_scores", "stream_gates")]
OPTIONS = {
    "hyper": {"tanh": True, "eps": 1e-3, "read_eps": 1e-2},
    "linear hyper": {"tanh": False},
    "mhc": {"iterations": 5, "last": "columns", "write_scale": 3.0, "eps": 1e-3, "read_eps": 1e-2},
    "mhc without mixing": {},
}


def inputs_of(case, n, d, lead, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(*lead, n, n), (*lead, n)]
    given = [torch.randn(*lead, n, d).to(dtype), *map(torch.randn, shapes), torch.randn(*lead, d).to(dtype)]
    if "hyper" in case:
        learned = [torch.randn(d, n + 2) / d**0.5, torch.randn(n, n + 2), torch.randn(()), torch.randn(())]
    else:
        groups = 2 if "without" in case else 3
        columns = 2 * n + n * n * (groups == 3)
        learned = [torch.randn(n * d, columns) / d, torch.randn(groups), torch.randn(columns)]
    return [*given, *learned, torch.randn(d)]


def both(case):
    """The operator and its equation, of all inputs, as one tensor each."""

    def joined(f):
        def run(*inputs):
            found = f(*inputs[:-1], gain=inputs[-1], **OPTIONS[case])
            return torch.cat([x.flatten(1) for x in found if x is not None], 1)

        return run

    name = "hyper_pass" if "hyper" in case else "mhc_pass"
    fast = hyper_pass if "hyper" in case else mhc_pass
    return joined(fast), joined(getattr(reference, name))


def one_by_one(case):
    """The equation of operators that round what they return."""

    def run(X, M, b, y, matrix, *learned_and_gain):
        (*learned, gain), n = learned_and_gain, X.shape[-2]
        options = dict(OPTIONS[case])
        eps, read_eps = (options.pop(name, 1e-6) for name in ("eps", "read_eps"))
        X = ops.stream_write(X, M, b, y)
        if "hyper" in case:
            w, mixing, write = ops.hyper_gates(ops.stream_scores(X, matrix, eps), *learned, **options)
        else:
            w, write, mixing = ops.mhc_gates(ops.joint_scores(X, matrix, eps), *learned, n, **options)
        found = X, ops.stream_read(X, w, gain=gain, eps=read_eps), mixing, write
        return torch.cat([x.flatten(1) for x in found if x is not None], 1)

    return run


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("n", "d", "lead"), [(1, 5, (7,)), (3, 33, (1, 9)), (4, 24, (3, 43)), (4, 344, (17,)), (8, 7, (8,))], ids=str
)  # fmt: skip
def test_equals_the_reference(case, dtype, n, d, lead, counting):
    library, (fast, plain) = counting("stream_pass"), both(case)
    inputs = inputs_of(case, n, d, lead, dtype)
    found, exact = results(fast, inputs), results(plain, [x.double() for x in inputs])
    errors = [error(a, b) for a, b in zip(found, exact, strict=True)]
    if dtype == torch.float32:
        assert max(errors) <= 1e-5
    else:  # states, reads and their gradients are rounded; no worse than by the operators one by one
        by_one = [error(a, b) for a, b in zip(results(one_by_one(case), inputs), exact, strict=True)]
        assert errors[0] <= 2.0**-8
        assert sum(errors) <= 1.1 * sum(by_one) + 1e-5
    assert library.calls == ["stream_pass"]


@pytest.mark.parametrize("case", OPTIONS)
def test_any_layout_and_small_matrices_for_all_tokens(case, counting):
    library, (fast, plain) = counting("stream_pass"), both(case)
    inputs = inputs_of(case, 3, 12, (4, 5))
    odd = [x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x for x in inputs]
    odd[1], odd[2] = odd[1][:1, :1], odd[2][:, :1]
    found, exact = results(fast, odd), results(plain, [x.double() for x in odd])
    assert max(error(a, b) for a, b in zip(found, exact, strict=True)) < 1e-5
    assert len(library.calls) == 1


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("n", "d"), [(4, 24), (4, 33), (3, 40), (2, 5)])
def test_the_streams_are_those_of_the_write_to_the_bit(n, d, dtype, threads, counting):
    """Backward may write them again by themselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for case in OPTIONS:
            inputs = [x.requires_grad_() for x in inputs_of(case, n, d, (2, 70), dtype)]
            found = (hyper_pass if "hyper" in case else mhc_pass)(*inputs[:-1], gain=inputs[-1])
            assert found[0].equal(stream_write(*inputs[:4]))
    finally:
        torch.set_num_threads(before)


def test_what_the_kernel_does_not_cover(counting):
    library = counting("stream_pass")
    for case in OPTIONS:
        fast, plain = both(case)
        X, mixing, *others = inputs_of(case, 3, 6, (5,))
        empty = [x[:0] if x.ndim and len(x) == 5 else x for x in (X, mixing, *others)]
        for inputs in ([X, None, *others], empty, [x.double() for x in (X, mixing, *others)]):
            assert error(fast(*inputs), plain(*inputs)) < 1e-6
    assert not library.calls
    fast, plain = both("mhc")
    far = inputs_of("mhc", 3, 6, (5,))
    far[-2][-1] = 100.0  # a logit of the mixing; numbers of float32 would not do
    found, exact = results(fast, far), results(plain, [x.double() for x in far])
    assert max(error(a, b) for a, b in zip(found, exact, strict=True)) < 1e-5
    assert len(library.calls) == 1
    fast, plain = both("hyper")
    nine = inputs_of("hyper", 9, 6, (5,))
    assert error(fast(*nine), plain(*nine)) < 1e-5


X, y, W = torch.ones(2, 3, 6), torch.ones(2, 6), torch.ones(6, 5)
S, one, M = torch.ones(3, 5), torch.ones(()), torch.ones(2, 3, 3)
REFUSED = {
    "matrix": (lambda: hyper_pass(X, M, X[..., 0], y, W[:, :4], S, one, one), r"scores \(2, 3, 4\), static \(3, 5\)"),
    "static": (lambda: hyper_pass(X, M, X[..., 0], y, W, S[:2], one, one), r"static \(2, 5\)"),
    "rows": (lambda: hyper_pass(X, M, X[..., 0], y, W[:4], S, one, one), r"matrix \(4, 5\)"),
    "branch": (lambda: hyper_pass(X, M, X[..., 0], y[:, :5], W, S, one, one), r"branch \(2, 5\)"),
    "gain": (lambda: hyper_pass(X, M, X[..., 0], y, W, S, one, one, gain=y[0, :2]), r"gain \(2,\)"),
    "phi": (lambda: mhc_pass(X, M, X[..., 0], y, torch.ones(18, 5), torch.ones(2), torch.ones(5)), "for 3 streams"),
    "iterations": (
        lambda: mhc_pass(X, M, X[..., 0], y, torch.ones(18, 15), torch.ones(3), torch.ones(15), iterations=-1),
        "iterations",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "says"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_before_any_kernel(call, says, counting):
    library = counting("stream_pass")
    with pytest.raises(InputError, match=says):
        call()
    assert not library.calls


MODELS = {"hyper_connections": 5, "mhc": 4, "mhc(streams=2,readout='head')": 4}


def model_of(depth):
    torch.manual_seed(0)
    model = Decoder(ModelConfig(vocab_size=11, d_model=16, n_blocks=3, n_heads=2, depth=depth))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model, torch.arange(26).view(2, 13) % 11


def gradients(model, rows):
    model.zero_grad()
    model.loss(rows, rows).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("depth", "calls"), MODELS.items(), ids=MODELS)
def test_a_model_writes_and_takes_in_one_pass(depth, calls, counting, monkeypatch):
    """Of 6 sublayers the last is followed by none, and mHC's first mixes nothing."""
    (model, rows), passes, scores = model_of(depth), counting("stream_pass"), counting("stream_gates")
    found = gradients(model, rows)
    assert passes.calls == ["stream_pass"] * calls
    assert len(scores.calls) == 6 - calls + 6  # what no write made ahead, and every backward
    monkeypatch.setattr(ahead, "made", lambda *_: None)
    assert all(error(a, b) < 2e-5 for a, b in zip(found, gradients(model, rows), strict=True))
    monkeypatch.undo()
    with torch.no_grad():
        wanted = model(rows)
    assert error(model(rows).detach(), wanted) < 1e-6


@pytest.mark.parametrize("depth", MODELS)
@pytest.mark.parametrize("change", ["in place", "another state"])
def test_what_was_made_ahead_is_forgotten_of_another_state(depth, change, counting, monkeypatch):
    """A hook between two sublayers changes the streams."""
    (model, rows), library = model_of(depth), counting("stream_pass")
    monkeypatch.setattr(precision, "CHUNK", 0)  # so that no pass is a step of a few tokens

    def hook(_module, _inputs, state):
        if change == "another state":
            return state * 1.5
        with torch.no_grad():
            state.mul_(1.5)
        return None

    model.blocks[1].register_forward_hook(hook)
    with torch.no_grad():
        found = model(rows)
        assert library.calls
        monkeypatch.setattr(ahead, "made", lambda *_: None)
        assert error(found, model(rows)) < 1e-5
        model.blocks[1]._forward_hooks.clear()
        assert error(found, model(rows)) > 1e-3


@pytest.mark.parametrize("depth", [*MODELS, "additive"])
def test_what_was_made_ahead_is_forgotten_by_changed_parameters(depth, monkeypatch):
    """A hook before a block changes its norm, or all of its connection."""
    model, rows = model_of(depth)

    def hook(block, _inputs):
        with torch.no_grad():
            for p in block.connections[0].parameters():
                p.mul_(2).add_(0.1)

    def run():
        changed = deepcopy(model)
        changed.blocks[1].register_forward_pre_hook(hook)
        return changed(rows).detach()

    found = run()
    monkeypatch.setattr(ahead, "loop", lambda *_: nullcontext())  # nobody knows what follows
    assert error(found, run()) < 1e-6


def test_a_model_of_inference_mode_runs_outside_of_it(monkeypatch):
    """Its parameters do not tell whether they were changed: nothing is made ahead by them."""
    monkeypatch.setattr(precision, "CHUNK", 0)
    for depth in ("hyper_connections", "mhc", "additive"):
        with torch.inference_mode():
            model, rows = model_of(depth)
            wanted = model(rows).clone()
        with torch.no_grad():
            assert error(model(rows), wanted) < 1e-6


def test_a_weight_that_is_made_at_each_look_is_not_taken_for_another():
    """A parametrised matrix is a new tensor each time: the sublayer takes by itself."""
    model, rows = model_of("hyper_connections")
    wanted = gradients(model, rows)
    connection = model.blocks[1].connections[0]
    torch.nn.utils.parametrize.register_parametrization(connection, "dynamic", torch.nn.Identity())
    found = gradients(model, rows)
    assert sorted(float(g.norm()) for g in found) == pytest.approx(
        sorted(float(g.norm()) for g in wanted), rel=1e-4
    )
