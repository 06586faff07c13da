"""A window of each query's own: chunks of tokens that nobody sees beyond."""

import pytest
import torch

import twoaxis
from twoaxis.ops import local_attention, visible

CHUNK = 5


def seen(T: int, chunks: int) -> torch.Tensor:
    """Own chunk up to oneself, and chunks - 1 whole ones before, entry by entry."""
    return torch.tensor([[s <= t and s // CHUNK > t // CHUNK - chunks for s in range(T)] for t in range(T)])


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("T", [1, 4, 5, 6, 41])
def test_a_reach_keeps_to_chunks(T, chunks):
    reach = torch.arange(T) % CHUNK + 1 + CHUNK * (chunks - 1)
    assert visible(T, T, CHUNK * chunks, reach=reach).equal(seen(T, chunks))


@pytest.mark.parametrize("sinks", [0, 2], ids="sinks={}".format)
@pytest.mark.parametrize("extra", ["", "logits and bias"])
@pytest.mark.parametrize("rows", ["alike", "documents", "padded"])
@pytest.mark.parametrize(("Tq", "Tk"), [(1, 7), (37, 37), (3, 70), (70, 70)], ids=str)
def test_fast_path_equals_the_reference(Tq, Tk, rows, extra, sinks):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, n, 6, dtype=torch.float64, requires_grad=True)
        for heads, n in ((4, Tq), (2, Tk), (2, Tk))
    )
    position, given = torch.arange(Tk - Tq, Tk), {}
    if rows != "alike":
        ids = (torch.arange(Tk) // 13).repeat(2, 1)
        ids[1, : Tk // 3] = -1 if rows == "padded" else 9
        given["segments"], position = ids, (position % 13).expand(2, -1)
    if extra:
        given["sink_logits"], given["position_bias"] = torch.randn(4).double(), torch.randn(4, 10).double()
    results = []
    for backend in ("reference", "blocked", "auto"):
        reach = position % CHUNK + CHUNK + 1
        out = local_attention(q, k, v, 10, reach=reach, sink_tokens=sinks, backend=backend, **given)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for fast in results[1:]:
        torch.testing.assert_close(fast, results[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("reach", "window", "options", "message"),
    [
        (torch.ones(3, dtype=torch.long), 4, {}, "one per query"),
        (torch.ones(4), 4, {}, "give integers, one per query"),
        (torch.ones(4, dtype=torch.long), None, {}, "give the largest reach as the window"),
        (
            torch.ones(4, dtype=torch.long),
            4,
            {"backend": "sdpa"},
            "has no sink_logits, position_bias or reach",
        ),
    ],
    ids=["length", "dtype", "no window", "sdpa"],
)
def test_what_does_not_fit_is_refused(reach, window, options, message):
    q = torch.randn(1, 2, 4, 6)
    with pytest.raises(twoaxis.InputError, match=message):
        local_attention(q, q, q, window, reach=reach, **options)
