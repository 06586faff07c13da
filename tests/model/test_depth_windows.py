"""The depth window as a rule at run time: by block, by call, by position, and equal to a fixed window when constant."""

import pytest
import torch

import twoaxis
from configurations import Case, perturb, tokens
from twoaxis import depth_windows, generate

FULL = [
    "depth_window",
    "depth_window(heads=3, position='bias', shared=False)",
    "depth_window(heads=2, position='rope', output=True)",
    "depth_window(window_blocks=3, injection='gated')",
    "dynamic_window(window_blocks=4)",
]


def model_of(spec, **fields):
    return Case(spec, "local to global").model(n_blocks=5, **fields)


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("spec", [s for s in FULL if "dynamic" not in s])
def test_a_constant_rule_is_the_fixed_window(spec, window):
    model = model_of(spec)
    options = spec.removeprefix("depth_window").strip("()").replace("window_blocks=3, ", "")
    fixed = model_of(f"depth_window(window_blocks={window}, {options})".replace(", )", ")"))
    weights = model.state_dict()
    own = {
        n: weights[n][..., : w.shape[-1]] if n.endswith(".bias") else weights[n]
        for n, w in fixed.state_dict().items()
    }
    fixed.load_state_dict(own)
    x = tokens()
    whole, expected = model(x), fixed(x)
    constant = torch.tensor(window)
    for rule in (
        window,
        lambda block, positions: window,
        lambda block, positions: constant.expand(positions.shape),
    ):
        with depth_windows(model, rule):
            assert torch.equal(model(x), expected)
    assert torch.equal(model(x), whole)
    assert not torch.equal(whole, expected) or "window_blocks=3" in spec


@pytest.mark.parametrize("spec", FULL)
def test_by_block(spec):
    """A window of one in every block but the fourth: the same as one call with that rule, block by block."""
    model, x, asked = model_of(spec), tokens(), []

    def rule(block, positions):
        asked.append((block, positions.tolist()))
        return 3 if block == 3 else 1

    with depth_windows(model, rule):
        _, states = model(x, return_states=True)
    assert asked == [(block, list(range(13))) for block in range(5)]
    read = model.blocks[3].connections[0]
    seen = {**states["block.3"], "sources": states["block.3"]["sources"].last(3)}
    torch.testing.assert_close(
        read.read_depth(states["block.3"], twoaxis.Context(depth_window=rule)),
        read.read_depth(seen),
        rtol=0,
        atol=0,
    )


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[13], [1] * 13, [4, 5, 4]], ids=str)
@pytest.mark.parametrize("spec", FULL)
def test_by_remaining_context(spec, sizes):
    """Fewer states the fuller the context: the same logits however tokens are fed, and as token by token."""
    model, x = model_of(spec), tokens()

    def rule(block, positions):
        return 1 + (2 * (12 - positions)) // 12

    cache, parts = model.new_cache(2), []
    with depth_windows(model, rule):
        whole = model(x)
        for part in x.split(sizes, 1):
            parts.append(model(part, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    for position, window in ((0, 3), (7, 1), (12, 1)):
        with depth_windows(model, window):  # up to its own place a token has the window of its place
            alone = model(x)
        close = torch.allclose(alone[:, position], whole[:, position], rtol=0, atol=1e-12)
        assert close == (position == 0), position  # later tokens also attend to tokens that read further back


def test_gradients_under_recomputation_obey_the_rule_of_the_forward_pass():
    model, x = model_of("depth_window"), tokens()
    found = []
    for checkpointing in (False, True):
        model.checkpointing = checkpointing
        model.zero_grad()
        with depth_windows(model, lambda block, positions: 1 + positions % 3):
            loss = model.loss(x, x)
        loss.backward()  # the rule is off by now
        found.append({n: p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_generation_obeys_the_rule():
    model, x = model_of("depth_window"), tokens(1, 5)
    model.eval()
    with depth_windows(model, 1):
        short = generate(model, x, 6)
    cfg = model_of("depth_window(window_blocks=1)")
    cfg.load_state_dict({n: w for n, w in model.state_dict().items() if n in cfg.state_dict()})
    assert torch.equal(short, generate(cfg, x, 6))


def test_rules_nest_and_end():
    model, x = model_of("depth_window"), tokens()
    plain = model(x)
    with depth_windows(model, 1):
        one = model(x)
        with depth_windows(model, 2):
            assert not torch.equal(model(x), one)
        assert torch.equal(model(x), one)
    assert torch.equal(model(x), plain)
    with pytest.raises(RuntimeError, match="stop"), depth_windows(model, 1):
        raise RuntimeError("stop")
    assert torch.equal(model(x), plain)


def test_no_tokens():
    model = model_of("depth_window")
    with depth_windows(model, lambda block, positions: 1 + positions):
        assert model(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, 11)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (0, "gave 0 at block 0: allowed is 1 to 3, the states"),
        (True, "gave True"),
        (2.0, "gave 2.0"),
        (4, "gave 4 at block 0: allowed is 1 to 3"),
        (lambda block, positions: positions, "gave 0 at block 0"),
        (lambda block, positions: positions.float() + 1, r"gave torch.float32 at block 0: allowed is int64"),
        (
            lambda block, positions: torch.ones(2, dtype=torch.int64),
            r"shape \(2,\) at block 0: allowed is one number",
        ),
        (lambda block, positions: torch.ones(2, 1, dtype=torch.int64), r"\(2, 1\) .* \(13,\) or \(2, 13\)"),
    ],
    ids=["0", "True", "2.0", "wider", "tensor with 0", "floats", "too few", "one a row"],
)
def test_refuses_windows_that_are_none(rule, said):
    model = model_of("depth_window(window_blocks=3)")
    with depth_windows(model, rule), pytest.raises(twoaxis.InputError, match=said):
        model(tokens())


def test_refuses_methods_without_a_window():
    model = perturb(Case("additive").fresh())
    said = "additive has no depth window to narrow; methods that have: depth_window, dynamic_window"
    with pytest.raises(twoaxis.InputError, match=said), depth_windows(model, 1):
        pass
