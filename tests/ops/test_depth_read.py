"""depth_read: the fast path against the plain one, and the plain one against the equation."""

import pytest
import torch
from agreement import agree, error, results
from read_cases import LEAD, call, case, randn

from twoaxis.errors import InputError
from twoaxis.ops import depth_read, local_attention, reference

NAMES = [
    "static",
    "token",
    "static gain",
    "token gain raw scale",
    "static raw",
    "static gain normed",
    "token gain scale normed bias",
    "static bias",
]


@pytest.mark.parametrize("normalize", ["softmax", "sigmoid", "none"])
@pytest.mark.parametrize("heads", [1, 3], ids=["one head", "three heads"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference(name, heads, normalize):
    for n in (1, 2, 7):
        for d in (3, 24, 33):
            leaves, rest = case(name, n, d)
            rest |= {"heads": heads, "normalize": normalize}
            inputs = [*leaves.values(), *(randn(*LEAD, d) for _ in range(n))]
            agree(
                call(depth_read, leaves, rest, n), call(reference.depth_read, leaves, rest, n), inputs, 2e-13
            )


@pytest.mark.parametrize("lead", [(), (4,), (2, 1), (3, 2, 5), (1, 700), (0, 4), (2, 0)], ids=str)
def test_any_leading_shape(lead, monkeypatch):
    """Pitfall: B=0, T=4; B=2, T=0 -> empty outputs of the right shape. And 700 tokens are cut into chunks."""
    monkeypatch.setattr("twoaxis.ops.precision.CHUNK", 1 << 12)
    for name in ("static gain normed", "token gain normed bias"):
        leaves, rest = case(name, 3, 24, lead)
        inputs = [*leaves.values(), *(randn(*lead, 24) for _ in range(3))]
        agree(call(depth_read, leaves, rest, 3), call(reference.depth_read, leaves, rest, 3), inputs, 1e-12)


def test_reference_is_the_equation():
    query, gain, bias, sources = randn(6), randn(6), randn(3), [randn(6) for _ in range(3)]
    out, weights = reference.depth_read(
        query, sources, key_gain=gain, key_norm_eps=0.1, scale=0.5, heads=2, bias=bias, return_weights=True
    )
    for h, part in enumerate((slice(0, 3), slice(3, 6))):
        keys = [gain * v / (v.square().mean() + 0.1).sqrt() for v in sources]
        logits = torch.stack([0.5 * query[part] @ key[part] for key in keys]) + bias
        alpha = logits.exp() / logits.exp().sum()
        assert error(weights[h], alpha) < 1e-15
        assert error(out[part], sum(a * v[part] for a, v in zip(alpha, sources, strict=True))) < 1e-15


def test_weights_are_returned_and_differentiable():
    sources = [randn(*LEAD, 6) for _ in range(3)]
    for heads, shape in ((1, (2, 5, 3)), (2, (2, 5, 2, 3))):

        def weights(read, query, *sources, heads=heads):
            return read(query, sources, heads=heads, return_weights=True)[1]

        inputs = [randn(6), *sources]
        found = results(lambda *x, f=weights: f(depth_read, *x), inputs)
        wanted = results(lambda *x, f=weights: f(reference.depth_read, *x), inputs)
        assert found[0].shape == shape
        assert max(error(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-14


def test_biases_per_token_and_source():
    leaves = [randn(*LEAD), torch.tensor(0.5, dtype=torch.float64), randn(*LEAD)]
    inputs = [randn(6), *leaves, *(randn(*LEAD, 6) for _ in range(3))]
    found, wanted = (
        lambda query, *x, read=read: read(query, x[3:], bias=x[:3], heads=2)
        for read in (depth_read, reference.depth_read)
    )
    agree(found, wanted, inputs, 1e-13)
    fixed = depth_read(inputs[0], inputs[4:], bias=(0.0, -torch.inf, 1.5))
    assert error(fixed, depth_read(inputs[0], inputs[4::2], bias=torch.tensor([0.0, 1.5]))) < 1e-15


@pytest.mark.parametrize("normalize", ["softmax", "sigmoid", "none"])
def test_hidden_sources(normalize):
    """Pitfall: a row whose mask is all False -> exactly 0, gradients 0, no NaN; other rows unchanged."""
    hide = torch.zeros(2, 5)
    hide[0, 1] = -torch.inf
    sources = [randn(*LEAD, 6) for _ in range(2)]

    def f(query, *sources, read=depth_read):
        return read(query, sources, bias=(hide, hide), normalize=normalize)

    out, dquery, *dsources = results(f, [randn(6), *sources])
    agree(f, lambda *x: f(*x, read=reference.depth_read), [randn(6), *sources], 1e-13)
    assert all(x.isfinite().all() for x in (out, dquery, *dsources))
    assert all((x[0, 1] == 0).all() for x in (out, *dsources))


def test_one_token_depth_read_is_attention_along_depth():
    """The duality at the operator: sources are keys and values of a step of local_attention over depth."""
    query, sources = randn(*LEAD, 6), [randn(*LEAD, 6) for _ in range(4)]
    stack = torch.stack([x.flatten(0, 1) for x in sources], dim=1)[:, None]  # (B T, 1, depth, d)
    step = local_attention(query.reshape(10, 1, 1, 6), stack, stack, 3)
    read = depth_read(query, sources[-3:], key_norm_eps=None, scale=6**-0.5)
    assert error(read, step.view(2, 5, 6)) < 1e-15


def test_absorbed_projections():
    """A query W_K q on raw states, W_V once after mixing, equals projecting every state."""
    W_K, W_V, q = randn(6, 4), randn(6, 4), randn(*LEAD, 4)
    sources = [randn(*LEAD, 6) for _ in range(3)]
    absorbed = depth_read(q @ W_K.T, sources, key_norm_eps=None) @ W_V
    logits = torch.stack([(q * (x @ W_K)).sum(-1) for x in sources])
    explicit = sum(a[..., None] * (x @ W_V) for a, x in zip(logits.softmax(0), sources, strict=True))
    assert error(absorbed, explicit) < 1e-14


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(5)}, r"query \(5,\)"),
        ({"query": torch.zeros(5, 6)}, r"query \(5, 6\)"),
        ({"sources": ()}, "at least one"),
        ({"sources": torch.zeros(3, 2, 5, 6)}, "not a stacked tensor"),
        ({"sources": (torch.zeros(2, 5, 6), torch.zeros(2, 4, 6))}, "of one shape"),
        ({"key_gain": torch.zeros(5)}, "key_gain"),
        ({"normalize": "relu"}, "normalize='relu'"),
        ({"heads": 4}, "heads=4"),
        ({"heads": True}, "heads=True"),
        ({"output_gain": torch.zeros(6)}, "output_eps too"),
        ({"bias": torch.zeros(3)}, "3 entries for 2 sources"),
        ({"bias": (0.0, torch.zeros(5))}, r"a bias of shape \(5,\)"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_bad_input_is_refused_in_one_line(change, message):
    arguments = {"query": torch.zeros(6), "sources": (torch.zeros(2, 5, 6),) * 2} | change
    for read in (depth_read, reference.depth_read):
        with pytest.raises(InputError, match=message) as refused:
            read(**arguments)
        assert "\n" not in str(refused.value)
