"""The kernel of mixes by weights of each token, and of a source's gradient from them, against plain sums in float64."""

import pytest
import torch
from agreement import error, results
from native_cases import needs_kernel

from twoaxis.ops import choice, reference, token_mix
from twoaxis.ops.native import token_mix as native
from twoaxis.ops.token_mix import back, sums
from twoaxis.ops.token_pull import TokenMixed, gathered

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SIZES = ((1, 24), (33, 33), (129, 344), (2, 3))


def bound(dtype):
    return 1e-5 + torch.finfo(dtype).eps / 2


@needs_kernel("token_mix")
@DTYPES
@pytest.mark.parametrize("many", [1, 2, 3, 4, 5, 9])
def test_sums_and_their_gradients(many, dtype):
    """Odd widths, few tokens, every way to group sources and sums, and sources of which some need no gradient."""
    library = choice.library("token_mix")
    for (N, d), n in zip(SIZES * 2, (1, 2, 3, 4, 5, 7, 9, 13), strict=True):
        w, rows = torch.randn(N, many, n), [torch.randn(N, d).to(dtype) for _ in range(n)]
        grads = [torch.randn(N, d).to(dtype) for _ in range(many)]
        wide = w.double(), [x.double() for x in rows]
        for one, other in zip(native.sums(library, w, rows), sums(*wide), strict=True):
            assert error(one, other) <= bound(dtype)
        for needed in ([True] * n, [False] * n, [i % 3 != 1 for i in range(n)]):
            dw, dx = native.back(library, w, rows, grads, needed)
            exact = back(*wide, [g.double() for g in grads], needed)
            assert error(dw, exact[0]) <= 1e-5
            for one, other, want in zip(dx, exact[1], needed, strict=True):
                assert (one is None) == (other is None) == (not want)
                assert one is None or error(one, other) <= bound(dtype)


@needs_kernel("token_mix")
@DTYPES
def test_what_sources_gather(dtype):
    """Of mixes whose sums have not all a gradient; for one source, or for those before it as well."""
    library = choice.library("token_mix")
    for N, d in SIZES:
        x, left, wide = torch.randn(N, d).to(dtype), [], []
        for s, many in enumerate((1, 4, 2, 3)):
            w = torch.randn(N, many, s + 5)
            grads = {o: torch.randn(N, d).to(dtype) for o in range(many) if many < 3 or o != 1}
            left.append((TokenMixed(w, grads, ()), s + 3))
            wide.append((TokenMixed(w.double(), {o: g.double() for o, g in grads.items()}, ()), s + 3))
        for many in (1, 2, 3, 4):
            found = native.gathered(library, x, left, many)
            for k, one in enumerate(found):
                exact = gathered(x.double(), [(mix, i - k) for mix, i in wide])
                assert error(one, exact) <= bound(dtype)
                assert error(gathered(x, [(mix, i - k) for mix, i in left]), exact) <= bound(dtype)
        with pytest.raises(TypeError):
            native.gathered(library, x, left, 5)
        with pytest.raises(TypeError):
            native.gathered(library, x.double(), left, 1)


@needs_kernel("token_mix")
@DTYPES
def test_the_operator_takes_it(dtype, counting, monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")
    library = counting("token_mix")
    for lead in ((2, 5), (0, 4), ()):
        w, sources = torch.randn(*lead, 3, 2), [torch.randn(*lead, 9).to(dtype) for _ in range(2)]
        found, exact = (
            results(
                lambda w, *xs, f=f: torch.stack(f(xs, w)), [w.to(t), *(x.to(t or dtype) for x in sources)]
            )
            for f, t in ((token_mix, None), (reference.token_mix, torch.float64))
        )
        for one, other in zip(found, exact, strict=True):
            assert error(one, other) <= bound(one.dtype)
    assert library.calls == ["token_mix", "token_mix_back"] * 2


@needs_kernel("token_mix")
def test_a_sum_without_a_gradient_of_sources_in_another_layout():
    torch.manual_seed(0)
    x, w = torch.randn(6, 5, 1).transpose(0, 2).requires_grad_(), torch.randn(1, 5, 2, 1, requires_grad=True)
    found, exact = (
        torch.autograd.grad(f((x,), w)[1].square().sum(), (x, w)) for f in (token_mix, reference.token_mix)
    )
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other)
