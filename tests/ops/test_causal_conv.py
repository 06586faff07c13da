"""The depthwise causal convolution against its plain twin: history, document borders, padding, dtypes."""

import pytest
import torch

from twoaxis import InputError
from twoaxis.ops import depthwise_causal_conv, reference


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("past", [0, 1, 3, 5])
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("ids", [False, True], ids=["one_document", "documents"])
def test_equals_its_plain_twin(kernel: int, past: int, tokens: int, ids: bool) -> None:
    torch.manual_seed(0)
    x, weight, history = draw(2, tokens, 3), draw(3, kernel), draw(2, past, 3)
    segments = torch.randint(-1, 2, (2, past + tokens)).sort(1).values if ids else None
    leaves = [t.requires_grad_() for t in (x, weight, history)]
    fast = depthwise_causal_conv(x, weight, history=history, segments=segments)
    plain = reference.depthwise_causal_conv(x, weight, history=history, segments=segments)
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
    if tokens:
        cotangent = torch.randn_like(fast)
        ours = torch.autograd.grad(fast, leaves, cotangent, materialize_grads=True)
        theirs = torch.autograd.grad(plain, leaves, cotangent, materialize_grads=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_last_tap_meets_the_current_token() -> None:
    x = draw(1, 4, 1)
    y = depthwise_causal_conv(x, torch.tensor([[0.0, 1.0]], dtype=x.dtype))
    assert torch.equal(y, x)
    y = depthwise_causal_conv(x, torch.tensor([[1.0, 0.0]], dtype=x.dtype))
    assert torch.equal(y[:, 1:], x[:, :-1])
    assert torch.equal(y[:, 0], torch.zeros_like(y[:, 0]))


def test_channels_may_be_several_dimensions_and_broadcast() -> None:
    x, weight = draw(2, 5, 3), draw(3, 2, 4)
    y = depthwise_causal_conv(x.unsqueeze(-1), weight)
    flat = depthwise_causal_conv(x.repeat_interleave(2, -1), weight.flatten(0, 1))
    torch.testing.assert_close(y.flatten(2), flat)


@pytest.mark.parametrize("lengths", [(2, 1, 5), (1, 1, 1), (8,)], ids=str)
def test_each_document_equals_its_own_run(lengths: tuple[int, ...]) -> None:
    """Pitfall: docs of 2, 1 and 5 tokens in one row, kernel 4 -> each equals its own separate run."""
    x, weight = draw(1, sum(lengths), 3), draw(3, 4)
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    packed = depthwise_causal_conv(x, weight, segments=segments)
    alone = [depthwise_causal_conv(part, weight) for part in x.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


def test_padding_is_zeroed_before_and_after() -> None:
    """Pitfall: left padded, pad embedding non-zero -> each row equals its unbatched run."""
    x, weight = draw(2, 6, 3), draw(3, 4)
    segments = torch.tensor([[-1] * 5 + [0], [0] * 6])
    y = depthwise_causal_conv(x, weight, segments=segments)
    torch.testing.assert_close(y[:1, 5:], depthwise_causal_conv(x[:1, 5:], weight))
    assert torch.equal(y[0, :5], torch.zeros_like(y[0, :5]))
    x[0, 0] = torch.nan
    assert depthwise_causal_conv(x, weight, segments=segments)[0].isfinite().all()


@pytest.mark.parametrize("chunks", [(5, 5), (1, 1, 2, 6), (4, 1, 1, 4), (0, 10)], ids=str)
def test_chunks_equal_one_shot(chunks: tuple[int, ...]) -> None:
    """Pitfall: prefill lengths 0 .. 4, chunks 1+1+1+2 -> state is old state followed by new inputs."""
    x, weight = draw(2, 10, 3), draw(3, 4)
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    parts = [
        depthwise_causal_conv(x[:, s : s + n], weight, history=x[:, :s])
        for s, n in zip(starts, chunks, strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), depthwise_causal_conv(x, weight))


def test_bfloat16_sums_in_float32_and_is_cast_once() -> None:
    x, weight = draw(2, 9, 3, dtype=torch.bfloat16), draw(3, 4, dtype=torch.float32)
    exact = reference.depthwise_causal_conv(x.double(), weight.double())
    with torch.autocast("cpu", torch.bfloat16):
        y = depthwise_causal_conv(x, weight)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, exact.bfloat16(), rtol=2**-8, atol=1e-6)


def test_views_and_empty_batches() -> None:
    x, weight = draw(3, 2, 6).transpose(0, 1), draw(4, 6).T[:, 1:]
    torch.testing.assert_close(
        depthwise_causal_conv(x, weight), depthwise_causal_conv(x.contiguous(), weight.contiguous())
    )
    assert depthwise_causal_conv(draw(0, 4, 3), draw(3, 4)).shape == (0, 4, 3)


@pytest.mark.parametrize(
    ("shapes", "word"),
    [
        ({"x": (2, 5, 3), "weight": (4, 4)}, "weight"),
        ({"x": (2, 5), "weight": (3, 4)}, "x"),
        ({"x": (2, 5, 3), "weight": (3, 0)}, "k >= 1"),
        ({"x": (2, 5, 3), "weight": (3, 4), "history": (1, 2, 3)}, "history"),
        ({"x": (2, 5, 3), "weight": (3, 4), "segments": (2, 4)}, "segments"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_refuses_what_it_does_not_define(shapes: dict[str, tuple[int, ...]], word: str) -> None:
    tensors = {k: torch.zeros(s, dtype=torch.int64 if k == "segments" else None) for k, s in shapes.items()}
    with pytest.raises(InputError, match=word):
        depthwise_causal_conv(**tensors)
