"""Who sees whom in every core, at once and through a memory."""

import itertools

import pytest
import torch
from cores import WAYS, WINDOWED, at_once, build, in_steps, inputs

from twoaxis import InputError, spec
from twoaxis.types import Context, Reads

way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_core = pytest.mark.parametrize("core", WINDOWED)


@way
@every_core
def test_exactly_the_window_moves(core, way):
    # pitfall (Windows and causal masks): one layer, w=4, T=12; token j moves j..j+w-1, no others
    window, module, x = WINDOWED[core], build(core), inputs()
    before = way(module, x)
    for j in (0, 3, 7, 11):
        changed = x.clone()
        changed[:, j] += 1
        moved = (way(module, changed) != before).any(-1)[0].nonzero().flatten().tolist()
        assert moved == list(range(j, min(12, j + window)))


@way
@every_core
def test_every_way_of_feeding_is_the_same(core, way):
    module, x = build(core), inputs(2)
    torch.testing.assert_close(way(module, x), at_once(module, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("stored", [5, 9], ids=lambda n: f"{n} keys fed")
def test_one_query_sees_the_newest_w_keys(stored):
    # pitfall (Windows and causal masks): a cache that holds more, Tq=1: the newest w keys only
    module, x = build("short_swa(window=4)"), inputs(length=stored + 1)
    newest = at_once(module, x[:, -4:])[:, -1:]  # rotation is relative: the window alone decides
    torch.testing.assert_close(in_steps(module, x, [stored, 1])[:, -1:], newest, rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2])
@every_core
def test_new_queries_are_the_last_positions(core, count):
    # pitfall (Windows and causal masks): Tq=1 or 2 new queries against Tk=5 keys see keys 0..(Tk-Tq+i)
    module, x = build(core), inputs(length=5)
    together = in_steps(module, x, [5 - count, count])
    torch.testing.assert_close(together, at_once(module, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", ["rope", "bias", "none"])
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("window", [1, 3, 20])
@torch.no_grad()
def test_short_swa_is_its_equation(window, sink, position):
    """y_t = W_o concat_h softmax_s(q_t . k_s / sqrt(D) + bias) v_s, written as loops over t, h and s."""
    core = build(f"short_swa(window={window}, sink={sink}, position={position!r}, n_heads=4, n_kv_heads=2)")
    x = inputs(length=7)
    q, k, v = core.project(Reads(x))
    if position == "rope":
        q, k = (turned(t) for t in (q, k))
    heads = torch.zeros(1, 7, 4, 6, dtype=torch.float64)
    for t, h in itertools.product(range(7), range(4)):
        seen = range(max(0, t - window + 1), t + 1)
        scores = [float(q[0, t, h] @ k[0, s, h // 2]) / 6**0.5 for s in seen]
        if position == "bias":
            scores = [a + float(core.position_bias[h, t - s]) for a, s in zip(scores, seen, strict=True)]
        if sink:
            scores.append(float(core.sink_logits[h]))
        weights = torch.tensor(scores, dtype=torch.float64)
        for a, s in zip(weights.softmax(0), seen, strict=False):
            heads[0, t, h] += a * v[0, s, h // 2]
    torch.testing.assert_close(at_once(core, x), core.out(heads.flatten(2)), rtol=0, atol=1e-11)


def turned(x: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """Pairs (i, i + D/2) as complex numbers, multiplied by e^(i t base^(-2i/D))."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    rates = torch.tensor([base ** (-i / half) for i in range(half)], dtype=torch.float64)
    turn = torch.polar(torch.ones(()).double(), torch.arange(x.shape[1])[:, None] * rates)[:, None]
    return torch.cat(((z * turn).real, (z * turn).imag), -1)


@way
def test_query_heads_share_key_heads_in_order(way):
    # pitfall (Batches, heads): 4 query heads, 2 key heads: heads 0,1 use key head 0 and 2,3 use key head 1
    core, x = build("short_swa(window=4, n_heads=4, n_kv_heads=2)"), inputs()
    with torch.no_grad():
        core.out.weight.copy_(torch.eye(24))
        core.qkv.weight[24 + 12 : 24 + 12 + 6] = 0  # the values of key head 0
    heads = way(core, x).unflatten(-1, (4, 6)).abs().amax((0, 1, 3))
    assert heads[:2].tolist() == [0, 0]
    assert heads[2:].min() > 0.1


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("attention(n_heads=5)", {}, "heads must divide d_model"),
        ("attention(n_heads=4, n_kv_heads=3)", {}, "key/value heads must divide heads"),
        ("attention(n_heads=8)", {}, "rotation needs an even width"),
        ("short_swa(n_heads=0)", {}, r"short_swa\(n_heads=0\): allowed is 1 or more"),
    ],
)
def test_heads_that_do_not_divide_are_refused(text, fields, message):
    with pytest.raises(InputError, match=message):
        build(text, **fields)


def test_odd_heads_do_without_rotation():
    core = build("short_swa(n_heads=8, position='bias', window=3)")  # heads of width 3
    assert at_once(core, inputs()).shape == (1, 12, 24)


@pytest.mark.parametrize("pattern", ["SL", "SSSL", "L", "SLL"])
def test_pattern_alternates_over_blocks(pattern):
    windows = [build(f"attention(window=4, pattern={pattern!r})", block).window for block in range(9)]
    assert windows == [4 if pattern[b % len(pattern)] == "S" else None for b in range(9)]


@pytest.mark.parametrize("text", ["attention(pattern='SL')", "attention(pattern='', window=3)"])
def test_pattern_needs_a_window_and_letters(text):
    with pytest.raises(InputError, match=r"allowed is a word of S \(short\) and L \(full\)"):
        spec.parse_spec("sequence", text)


@pytest.mark.parametrize("core", ["attention", "attention(window=4)", "short_swa(window=3)"])
def test_rotation_is_relative(core):
    module, x = build(core), inputs()
    shifted = module(Reads(x), Context(positions=torch.arange(1000, 1012)))
    torch.testing.assert_close(shifted, at_once(module, x), rtol=0, atol=1e-11)
    spread = module(Reads(x), Context(positions=torch.arange(0, 24, 2)))
    assert not torch.allclose(spread, shifted)


def test_the_301st_token_is_turned_for_position_300():
    # pitfall (Positions): w=4, feed 300 tokens one at a time
    module, x = build("short_swa(window=4)"), inputs(length=301)
    stepped = in_steps(module, x, [1] * 301)
    at_300 = module(Reads(x[:, -4:]), Context(positions=torch.arange(297, 301)))[:, -1]
    torch.testing.assert_close(stepped[:, -1], at_300, rtol=0, atol=1e-12)
