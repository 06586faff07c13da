"""The decoder by itself: states, precision, loss, init, and how the optimiser treats its parameters."""

import pytest
import torch

import configurations
import twoaxis
from configurations import Case, tokens
from twoaxis import InputError
from twoaxis.model import token_loss

every_case = pytest.mark.parametrize("case", configurations.pairwise(), ids=str)


@every_case
def test_the_head_on_the_last_state_is_the_logits(case):
    # pitfall (Depth states): the head applied to the last exported state: exactly the logits
    model, x = case.model(tie_embeddings=case.depth == "additive"), tokens()
    logits, states = model(x, return_states=True)
    assert list(states) == ["block.0", "block.1", "block.2", "block.3", "final"]
    assert model.head(states["final"]).equal(logits)
    ctx = twoaxis.Context()
    assert model.stream.close(states["block.3"], ctx).equal(states["final"])
    for index, block in enumerate(model.blocks):  # block.i is what block i reads
        after = twoaxis.depth.named_tensors(block(states[f"block.{index}"], ctx))
        for name, tensor in twoaxis.depth.named_tensors(states[f"block.{index + 1}"]).items():
            assert after[name].equal(tensor)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("sequence", ["standard", "local to global", "parallel", "bias and sink"])
def test_the_state_keeps_its_dtype(sequence, weights, state, autocast):
    model = Case("additive", sequence).fresh(state_dtype=state).to(getattr(torch, weights))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model.loss(tokens(), tokens())
        _, states = model(tokens(), return_states=True)
    assert {s.dtype for name, s in states.items() if name != "final"} == {getattr(torch, state)}
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_float64_model_keeps_float64_states():
    _, states = Case("additive").model()(tokens(), return_states=True)
    assert {s.dtype for s in states.values()} == {torch.float64}


def test_checkpointing_repeats_the_same_dropout():
    grads = []
    for checkpointing in (False, True):
        model = Case("additive", "local to global").fresh(dropout=0.2).train()
        model.checkpointing = checkpointing
        torch.manual_seed(5)
        model.loss(tokens(), tokens(seed=2)).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(a.equal(b) for a, b in zip(*grads, strict=True))


def test_loss_is_a_mean_over_targets():
    model, x, y = Case("additive").model(), tokens(), tokens(seed=2)
    y[0, 3:] = -100
    logits = model(x).log_softmax(-1)
    picked = [-logits[b, t, y[b, t]] for b in range(2) for t in range(13) if y[b, t] != -100]
    torch.testing.assert_close(model.loss(x, y), torch.stack(picked).mean())
    torch.testing.assert_close(token_loss(model(x), y), torch.stack(picked).sum())


@pytest.mark.parametrize("shape", [(2, 5), (0, 5), (2, 0)], ids=str)
def test_no_targets_no_loss(shape):
    # pitfall (Loss): a batch whose labels are all ignored; an empty batch: loss 0, gradients 0
    model = Case("additive").fresh()
    x = torch.zeros(shape, dtype=torch.long)
    loss = model.loss(x, torch.full(shape, -100))
    assert loss.item() == 0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_accumulation_by_target_tokens():
    # pitfall (Loss): samples of 11 and 101 tokens: one batch of 2 against two of 1, sums over all targets
    model = Case("additive", "local").model()
    x, y = tokens(2, 101), tokens(2, 101, seed=2)
    y[0, 11:] = -100
    together = torch.autograd.grad(model.loss(x, y), list(model.parameters()))
    parts = sum(token_loss(model(x[b : b + 1]), y[b : b + 1]) for b in range(2)) / 112
    for a, b in zip(together, torch.autograd.grad(parts, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b)


@every_case
def test_each_parameter_has_one_rule(case):
    # pitfall (Loss, optimiser): only weight matrices decay; every parameter is in exactly one group
    model = case.fresh(tie_embeddings=False, qk_norm=True)
    rules = model.param_rules()
    parameters = dict(model.named_parameters())
    assert rules.keys() == parameters.keys()
    for name, rule in rules.items():
        assert rule.lr_scale > 0
        if parameters[name].ndim < 2 or "norm" in name or "position_bias" in name or "sink" in name:
            assert not rule.decay, name
    for name in ("embedding.weight", "head.weight"):
        assert rules[name].decay
    assert all(
        r.decay for n, r in rules.items() if ".cores." in n and n.endswith((".qkv.weight", ".down.weight"))
    )


def test_tied_weights_have_one_rule():
    rules = Case("additive").fresh().param_rules()
    assert "head.weight" not in rules
    assert rules["embedding.weight"].decay


def test_init():
    torch.manual_seed(0)
    cfg = twoaxis.ModelConfig(vocab_size=300, d_model=64, n_blocks=2, init_std=0.05, tie_embeddings=False)
    model = twoaxis.Decoder(cfg)
    for name, p in model.named_parameters():
        if "norm" in name:
            assert bool((p == 1).all()), name
        else:
            output = name.endswith((".out.weight", ".down.weight"))
            expected = 0.05 / 4**0.5 if output else 0.05  # four sublayers write to the stream
            assert p.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(p.mean().item()) < 0.05 * expected, name


def test_dropout_is_off_in_evaluation():
    # pitfall (Loss, optimiser, randomness): dropout 0.5, eval: identical; no_grad alone does not count
    model = Case("additive", "parallel").fresh(dropout=0.5)
    x = tokens()
    assert model.eval()(x).equal(model(x))
    with torch.no_grad():
        assert not model.train()(x).equal(model(x))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": torch.zeros(2, 3)}, r"tokens must be integers \(B, T\), not torch.float32 \(2, 3\)"),
        ({"tokens": torch.zeros(3, dtype=torch.long)}, r"tokens must be integers \(B, T\)"),
        (
            {"segments": torch.zeros(2, 3, dtype=torch.long)},
            r"segments \(2, 3\) must have the shape of tokens",
        ),
        ({"positions": torch.zeros(5, dtype=torch.long)}, r"positions \(5,\) must be \(T,\) or \(B, T\)"),
        # pitfall (Configuration, export, cache interface): a tuple of tensors is refused with a clear message
        ({"cache": (torch.zeros(2, 3),)}, r"cache must be made by model.new_cache\(batch_size\), not tuple"),
    ],
    ids=["floats", "one axis", "segments", "positions", "tuple cache"],
)
def test_wrong_inputs_are_refused(given, message):
    given = {"tokens": tokens(), **given}
    with pytest.raises(InputError, match=message):
        Case("additive").fresh()(given.pop("tokens"), **given)
