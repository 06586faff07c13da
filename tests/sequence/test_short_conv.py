"""ShortConv against its equation, its start, its state through feeds and rollback."""

import pytest
import torch
import torch.nn.functional as F
from cores import at_once, build, in_steps, inputs, layout, memory

import twoaxis
from twoaxis import InputError, spec
from twoaxis.types import Context, Reads


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def convolved(x, weight, bias=None):
    """torch's own convolution, channels first, k - 1 zeros in front."""
    rows = F.pad(x.mT, (weight.shape[1] - 1, 0))
    return F.conv1d(rows, weight[:, None], bias, groups=len(weight)).mT


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_depthwise_is_its_equation(kernel, bias, activation):
    core, x = build(f"short_conv(kernel={kernel}, bias={bias}, activation={activation!r})"), inputs(2)
    expected = convolved(x, core.conv.weight, core.conv.bias)
    close(at_once(core, x), F.silu(expected) if activation == "silu" else expected)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_lfm2_is_its_equation(bias):
    core, x = build(f"short_conv(form='lfm2', kernel=3, bias={bias})"), inputs(2)
    first, second, u = core.into(x).chunk(3, -1)
    close(at_once(core, x), core.out(second * convolved(first * u, core.conv.weight, core.conv.bias)))


def test_start_of_the_taps():
    """U(-1/sqrt(K), 1/sqrt(K)) as torch's Conv1d; "identity" is the identity."""
    torch.manual_seed(0)
    cfg = spec.parse_spec("sequence", "short_conv(kernel=4, bias=True)")
    core = twoaxis.sequence.ShortConv(cfg, layout(d_model=4000), 0)
    for p in (core.conv.weight, core.conv.bias):
        assert 0.49 < p.abs().max() <= 0.5
        assert abs(p.std() - 0.5 / 3**0.5) < 0.01
    cfg = spec.parse_spec("sequence", "short_conv(bias=True, start='identity')")
    core = twoaxis.sequence.ShortConv(cfg, layout(), 0).double()
    assert at_once(core, inputs(2)).equal(inputs(2))


@pytest.mark.parametrize("prefill", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("form", ["depthwise", "lfm2"])
def test_state_after_any_prefill(form, prefill):
    # pitfall (Local convolution state): kernel 4; prefill 0 to 4, then 5 decode steps; chunks 1+1+1+2
    core, x = build(f"short_conv(form={form!r})"), inputs(2, prefill + 5)
    close(in_steps(core, x, [prefill] + [1] * 5), at_once(core, x))
    close(in_steps(core, x, [prefill, 1, 1, 1, 2]), at_once(core, x))


def test_the_state_is_the_last_inputs_oldest_first():
    core, x = build("short_conv(kernel=3)"), inputs(2, 7)
    cache = memory(core, 2, max_rollback=1)
    for part in x.split([1, 4, 2], 1):
        cache.begin(part.shape[1], None, None)
        core(Reads(part), Context(cache=cache))
        cache.advance(part.shape[1])
    (slot,) = cache.slots.values()
    assert slot.entries()["u"].equal(x[:, 3:])
    assert slot.nbytes == 2 * (2 + 1 + 1) * 24 * 8


@pytest.mark.parametrize("core", ["short_conv", "canon", "token_shift", "short_conv(form='lfm2')"])
def test_short_documents_and_padding(core):
    # pitfall (Packed documents): kernel 4, docs of 2, 1 and 5 tokens: also shorter than the kernel
    # pitfall (Local convolution state): prompts of 1 and 6 tokens, left padded, pads not zero
    module, x = build(core), inputs(2, 8)
    ids = torch.tensor([[0] * 2 + [1] + [2] * 5] * 2)
    alone = torch.cat([at_once(module, part) for part in x.split([2, 1, 5], 1)], 1)
    for y in (
        at_once(module, x, ids),
        in_steps(module, x, [3, 1, 4], ids),
        in_steps(module, x, [1] * 8, ids),
    ):
        close(y, alone)
    ids = torch.zeros(2, 8, dtype=torch.long)
    ids[0, :5] = -1  # of 6 prompt tokens one is real
    for y in (at_once(module, x, ids), in_steps(module, x, [6, 1, 1], ids)):
        close(y[0, 5:], at_once(module, x[:1, 5:])[0])
        close(y[1], at_once(module, x[1:])[0])
        assert not y[0, :5].any()


@pytest.mark.parametrize("core", ["short_conv", "canon", "token_shift", "short_conv(form='lfm2')"])
def test_a_batch_taken_back_wholly(core):
    # pitfall (Local convolution state): prefill 5, decode 3, roll back 3, decode 3 others
    module, x, other = build(core), inputs(2, 8), inputs(2, 3) + 1
    cache = memory(module, 2, max_rollback=3)

    def feed(part):
        cache.begin(part.shape[1], None, None)
        y = module(Reads(part), Context(cache=cache))
        cache.advance(part.shape[1])
        return y

    feed(x[:, :5])
    feed(other)
    cache.drop_last(3)
    close(feed(x[:, 5:]), at_once(module, x)[:, 5:])
    with pytest.raises(InputError, match="cannot take back"):
        cache.drop_last(7)


@pytest.mark.parametrize("kernel", [0, -1])
@pytest.mark.parametrize("name", ["short_conv", "canon"])
def test_kernels_without_taps_are_refused(name, kernel):
    with pytest.raises(InputError, match=rf"{name}\(kernel={kernel}\): allowed is 1 or more taps"):
        spec.parse_spec("sequence", f"{name}(kernel={kernel})")


def test_on_the_branches_of_attention():
    """The convolution of DeltaNet and its relatives: q, k and v each through their own, SiLU, no bias."""
    conv = "short_conv(activation='silu')"
    core, x = build(f'attention(q="{conv}", k="{conv}", v="{conv}", n_heads=4, n_kv_heads=2)'), inputs(2)
    sizes = [24, 12, 12]
    parts = [
        F.silu(convolved(p, core.mixers[name].conv.weight)).unflatten(-1, (-1, 6))
        for name, p in zip("qkv", core.qkv(x).split(sizes, -1), strict=True)
    ]
    plain = build("attention(n_heads=4, n_kv_heads=2)")
    with torch.no_grad():
        plain.out.weight.copy_(core.out.weight)
    close(at_once(core, x), plain.attend(*parts, Context()))
