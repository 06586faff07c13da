"""Which methods are the duality paper's read D, and exactly how: the map's claims, one test each.

Each method runs as its own class; D is `ops.local_attention` on the transposed stack, see dual.py. `depth_window`,
the read itself, is in test_depth_window.py; what is no instance is in test_map_counter.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from dual import CLOSE, EPS, WIDTH, D, Sources, attnres_read, moved_by_reordering, walk
from points import perturb
from torch import Tensor

import twoaxis
from twoaxis.ops import depth_read, mix, rms
from twoaxis.types import Context, Reads


def test_attnres_is_an_instance_on_the_stack_of_outputs():
    """[v; 1] with W_Q = 0 but for its last row sqrt(d) w, keys rms(v) diag(g), W_V = I, full memory."""
    steps = walk("attnres")
    assert len(steps) == 7
    for c, state, V in steps[1:]:  # the first sublayer has one source; the last step is the read-out
        z = attnres_read(c, V)
        torch.testing.assert_close(c.mixture(state), z, **CLOSE)


def test_attnres_is_none_without_the_constant_coordinate():
    """A bias-free query is odd: with -v for the newest source, D turns round what it thinks of the others."""
    a, b, v = torch.randn(3, 2, 3, WIDTH, dtype=torch.float64)
    W_Q, W_K = torch.randn(2, WIDTH, WIDTH, dtype=torch.float64)

    def preference(read: Callable[[Sources], Tensor], newest: Tensor) -> Tensor:
        """log of the weight of a over that of b; a, b and v are independent, so the weights can be solved for."""
        stack = torch.stack((a, b, newest), -1)
        weights = torch.linalg.lstsq(stack, read((a, b, newest)).unsqueeze(-1)).solution.squeeze(-1)
        return (weights[..., 0] / weights[..., 1]).log()

    def linear(sources: Sources) -> Tensor:
        return D(sources, 0.1 * W_Q, W_K, as_query=lambda v: v, as_key=lambda v: rms(v, EPS))

    c = walk("attnres")[2][0]
    torch.testing.assert_close(preference(linear, -v), -preference(linear, v), rtol=0, atol=1e-9)
    torch.testing.assert_close(preference(c.route, -v), preference(c.route, v), rtol=0, atol=1e-9)
    assert (preference(c.route, v).abs() > 1e-3).all()  # so it is no odd function of v


def test_attnres_with_a_query_of_the_newest_source():
    """W_Q free, on the same normed rows as the keys."""
    for c, state, V in walk("attnres(query='input')")[1:]:
        normed = {"as_query": lambda v: rms(v, EPS), "as_key": lambda v: rms(v, EPS)}
        z = D(V, WIDTH**0.5 * c.route.query.mT, c.route.key_gain.diag(), **normed)
        torch.testing.assert_close(c.mixture(state), z, **CLOSE)


def test_attnres_with_a_window_of_eight_and_the_embeddings():
    """K = 8 and one source that is always visible."""
    steps = walk("attnres(window_sources=8)", n_blocks=6)
    assert len(steps[-1][2]) == 13
    for c, state, V in steps[1:]:
        z = attnres_read(c, V, window=8, sink_tokens=1)
        torch.testing.assert_close(c.mixture(state), z, **CLOSE)


def block_stack(V: Sources, size: int) -> Sources:
    """[b_0, .., b_{n-1}, p]: the embeddings, the sums of closed depth-blocks, the open one."""
    outputs = V[1:]
    return (V[0], *(sum(outputs[i : i + size]) for i in range(0, len(outputs), size)))


def test_block_attnres_is_an_instance_on_its_own_stack():
    for c, state, V in walk("attnres(block_sublayers=4)")[1:]:
        z = attnres_read(c, block_stack(V, 4))
        torch.testing.assert_close(c.mixture(state), z, **CLOSE)


def test_block_attnres_is_none_on_the_stack_of_outputs():
    """There its weights are alike inside a block and do not sum to 1, and the order of older outputs counts."""
    c, state, V = walk("attnres(block_sublayers=4)")[-1]
    _, a = depth_read(
        c.route.query, block_stack(V, 4), key_gain=c.route.key_gain, key_norm_eps=EPS, return_weights=True
    )
    expanded = [a[..., 0], *(a[..., 1 + i // 4] for i in range(6))]
    torch.testing.assert_close(c.mixture(state), mix(V, expanded), **CLOSE)
    total = sum(expanded)
    assert ((total - 1).abs() > 0.1).all()
    assert (total - total.mean()).abs().max() > 0.1  # nor to any constant, which W_V could hold
    assert moved_by_reordering(lambda sources: c.route(block_stack(sources, 4)), V) > 0.1


def test_delta_attnres_reads_an_instance_and_adds_it():
    for c, state, V in walk("delta_attnres")[2:-1]:
        z = attnres_read(c, V)
        torch.testing.assert_close(c.mixture(state), state["stream"] + z, **CLOSE)
        torch.testing.assert_close(state["stream"], sum(V), **CLOSE)


def test_heads_are_multi_head_attention():
    """One key norm before the split, a constant query per head, W_V = W_O = I."""
    for c, state, V in walk("attnres(heads=3)")[1:]:
        z = attnres_read(c, V, heads=3)
        torch.testing.assert_close(c.mixture(state), z, **CLOSE)


def test_low_rank_keys_are_a_selector():
    """W_K takes the last R features, normed over those alone."""
    for c, state, V in walk("attnres(key_rank=5)")[1:]:
        z = attnres_read(c, V, rank=5)
        torch.testing.assert_close(c.mixture(state), z, **CLOSE)


class Inside:
    """Depth-Attention's read of given inputs u_j (B, T, d): each layer has a core of its own, or all the same."""

    def __init__(self, stride: int, one_core: bool) -> None:
        torch.manual_seed(7)
        cfg = twoaxis.ModelConfig(
            vocab_size=3,
            d_model=WIDTH,
            n_blocks=3,
            n_heads=2,
            depth=f"depth_attention(stride_attentions={stride})",
        )
        model = perturb(twoaxis.Decoder(cfg).double(), 0.5)
        self.connections = [block.connections[0] for block in model.blocks]
        self.cores = [model.blocks[0 if one_core else n].cores[0] for n in range(3)]

    def __call__(self, u: Sources) -> Tensor:
        """V~ of the last layer, its heads side by side."""
        rows: list[Tensor] = []
        for c, core, x in zip(self.connections, self.cores, u, strict=True):
            q, k, v = core.project(Reads(x), Context())
            rows.append(torch.cat((k, v), -1))
            seen = [rows[j] for j in sorted(c.anchors[len(rows) - 1])]
            if seen:
                mixed = c.mixed_values(q, (*seen, rows[-1]))
                rows[-1] = torch.cat((k, mixed), -1)
        return rows[-1][..., c.key_width :].flatten(2)


def test_depth_attention_with_shared_weights_and_no_recursion():
    """Every layer reads the first alone, whose values are unmixed: D of two heads on the stack [u_0, u_2]."""
    read = Inside(stride=3, one_core=True)
    u = tuple(torch.randn(3, 2, 4, WIDTH, dtype=torch.float64))
    W = [w.mT for w in read.cores[0].qkv.weight.chunk(3)]
    torch.testing.assert_close(read(u), D((u[0], u[2]), *W, heads=2), **CLOSE)


def test_depth_attention_is_none_with_recursion():
    u = tuple(torch.randn(3, 2, 4, WIDTH, dtype=torch.float64))
    assert moved_by_reordering(Inside(stride=1, one_core=True), u) > 0.1


def test_depth_attention_is_none_with_weights_of_each_layer():
    """Of equal sources D is linear, x W_V: twice the input gives twice the output."""
    u = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    once, twice = (Inside(stride=3, one_core=False)((x, x, x)) for x in (u, 2 * u))
    assert (twice - 2 * once).abs().max() > 0.1
    once, twice = (Inside(stride=3, one_core=True)((x, x, x)) for x in (u, 2 * u))
    torch.testing.assert_close(twice, 2 * once, **CLOSE)
