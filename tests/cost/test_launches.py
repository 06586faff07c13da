"""Launches and bytes kernel by kernel, against what torch's dispatcher sees of a real step."""

import pytest
from cases import full
from kernels import counted

import configurations
import twoaxis
from configurations import Case
from twoaxis.verify.cost import widest
from twoaxis.verify.saved import saved_bytes

B, T = 2, 13
PLAIN = (
    "local to global",
    "parallel",
    "grouped",
    "pattern",
    "canon",
    "convolutions",
)  # without blocked attention
EXACT = [Case(name) for name in twoaxis.methods("depth")] + [Case("additive", name) for name in PLAIN]
OTHERS = [case for case in configurations.pairwise() if case not in EXACT]
LONG = [Case(d) for d in ("attnres", "ddl", "hybrid", "depth_window", "hyper_connections", "mhc")]
LONG += [Case("additive", "local to global", 40), Case("additive", "bias and sink", 40)]
LONG += [Case("additive", name) for name in ("canon", "convolutions", "local mixers inside")]
LONG += [Case("ddl(value_dim=4, compressor='token')")]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_launches_forward_are_those_of_the_dispatcher(case):
    cost = twoaxis.cost(case.config(), B, T)
    forward, backward = counted(widest(case.fresh()), configurations.tokens(B, T))
    assert cost.launches_forward == forward.launches
    assert (
        0.45 * forward.nbytes < cost.bytes_eager_forward < 1.05 * forward.nbytes
    )  # temporaries of operators
    assert cost.launches_backward < backward.launches  # one a gradient; torch composes many of several
    assert 0.2 * backward.nbytes < cost.bytes_eager_backward < backward.nbytes


@pytest.mark.parametrize("case", [full(case) for case in OTHERS], ids=str)
def test_other_options_launch_about_as_much(case):
    cost = twoaxis.cost(case.config(), B, T)
    forward, backward = counted(widest(case.fresh()), configurations.tokens(B, T))
    assert 0.4 * forward.launches < cost.launches_forward <= forward.launches  # masks of blocks are left out
    assert 0.4 * forward.nbytes < cost.bytes_eager_forward < 1.05 * forward.nbytes
    assert cost.launches_backward < backward.launches


@pytest.mark.parametrize("case", LONG, ids=str)
def test_native_kernels_keep_what_is_stated(case):
    tokens, model = configurations.tokens(B, 70), widest(case.fresh())
    cost = twoaxis.cost(case.config(), B, 70, backend="native")
    assert cost.saved_bytes == saved_bytes(model, tokens, tokens.clone(), "native")
    model.checkpointing = True
    assert cost.saved_bytes_checkpointed == saved_bytes(model, tokens, tokens.clone(), "native")


@pytest.mark.parametrize("depth", ["attnres", "delta_attnres", "depth_window", "ddl", "ddl(value_dim=4)"])
def test_native_kernels_move_and_launch_less_and_compute_the_same(depth):
    plain, native = (twoaxis.cost(Case(depth).config(), B, 70, backend=b) for b in ("plain", "native"))
    assert native.launches_forward < plain.launches_forward
    assert native.bytes_eager_forward < plain.bytes_eager_forward
    assert native.flops == plain.flops
    assert 0 <= plain.bytes_moved - native.bytes_moved <= 16  # the plain read's placeholder of no key norm


def test_a_native_read_moves_its_sources_and_its_result_once():
    """n sources read, the result written, one dot and one norm factor for each source and token, two for each token."""
    cfg = twoaxis.ModelConfig(
        vocab_size=11, d_model=64, n_blocks=3, n_heads=2, depth="attnres", sequence=["mlp(hidden=8)"]
    )
    reads = [k for k in _tape(cfg, "native").kernels if k.name == "depth_read"]
    u, w = 4 * B * T * 64, 4 * 64
    for n, read in zip((2, 3, 4), reads, strict=True):
        assert read.native
        assert read.moved == (n + 1) * u + 2 * (n + 1) * 4 * B * T + w


def test_calls_that_no_kernel_covers_stay_plain():
    for case in (Case("attnres(heads=3)"), Case("ddl(value_dim=3)"), Case("additive", "chunks")):
        assert {k.name for k in _tape(case.config(), "native").kernels if k.native} <= {
            "norm",
            "swiglu",
            "rotate",
            "token_loss",
        }
    short = _tape(Case("additive").config(), "native", 64)
    assert not any(k.name == "native attention" for k in short.kernels)
    assert any(k.name == "native attention" for k in _tape(Case("additive").config(), "native", 65).kernels)


def test_an_unknown_backend_is_refused():
    with pytest.raises(twoaxis.InputError, match="backend='cuda': allowed is 'plain' or 'native'"):
        twoaxis.cost(Case("additive").config(), 1, 2, backend="cuda")


def _tape(cfg, backend, seq_len=T):
    from twoaxis.cost import traced

    return traced(cfg, B, seq_len, backend=backend)
