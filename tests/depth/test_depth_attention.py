"""Depth-Attention against its equations written out, its anchors, and what it leaves in state and cache."""

import pytest
import torch
from points import CTX, model, perturb

import twoaxis
from twoaxis.ops import local_attention
from twoaxis.types import Reads

WINDOWED = ["short_swa(window=3)", "attention", "mlp"]


def by_the_paper(m, x: torch.Tensor, anchors: dict[int, list[int]]) -> torch.Tensor:
    """The stream after all blocks, attention by attention and head by head, from the cores' two halves."""
    keys, values, n = {}, {}, 0
    for block in m.blocks:
        for c, core in zip(block.connections, block.cores, strict=True):
            inner = c.norm(x)
            if not hasattr(core, "project"):
                x = x + core(Reads(inner), CTX)
                continue
            q, k, v = core.project(Reads(inner), CTX)
            group = q.shape[2] // k.shape[2]
            mixed = torch.empty_like(v)
            for h in range(v.shape[2]):
                pooled = q[:, :, h * group : (h + 1) * group].mean(2)
                read = [
                    *((keys[j][:, :, h], values[j][:, :, h]) for j in anchors[n]),
                    (k[:, :, h], v[:, :, h]),
                ]
                scores = torch.stack([(pooled * key).sum(-1) / k.shape[-1] ** 0.5 for key, _ in read])
                weights = scores.exp() / scores.exp().sum(0)
                mixed[:, :, h] = sum(
                    w[..., None] * value for w, (_, value) in zip(weights, read, strict=True)
                )
            keys[n], values[n] = k, mixed
            x = x + core.attend(q, k, mixed, CTX)
            n += 1
    return x


@pytest.mark.parametrize(
    ("options", "sequence", "anchors"),
    [
        ("", ["attention", "mlp"], {0: [], 1: [0], 2: [0], 3: [0, 2], 4: [0, 2]}),
        ("stride_attentions=1", ["attention", "mlp"], {n: list(range(n)) for n in range(5)}),
        ("stride_attentions=4, recent_attentions=1", ["attention", "mlp"],
         {0: [], 1: [0], 2: [0, 1], 3: [0, 2], 4: [0, 3]}),
        ("stride_attentions=3", ["attention(n_heads=4, n_kv_heads=2, qk_norm='head')"],
         {0: [], 1: [0], 2: [0], 3: [0], 4: [0, 3]}),
        ("stride_attentions=5", WINDOWED, {n: [j for j in (0, 5) if j < n] for n in range(10)}),
    ],
)  # fmt: skip
def test_equals_the_papers_sums(options: str, sequence: list[str], anchors: dict[int, list[int]]) -> None:
    m = perturb(model(f"depth_attention({options})", n_blocks=5, sequence=sequence).double())
    tokens = torch.randint(17, (2, 6))
    with torch.no_grad():
        expected = m.stream.norm(by_the_paper(m, m.embedding(tokens), anchors))
        final = m(tokens, return_states=True)[1]["final"]
    torch.testing.assert_close(final, expected, rtol=0, atol=1e-11)


def test_a_read_is_the_one_operator_with_a_source_per_layer() -> None:
    """One head's V~ of a token is local_attention of its query over (k_j, V~_j), layers as positions."""
    m = perturb(model("depth_attention(stride_attentions=1)", n_blocks=4).double())
    c, core = m.blocks[3].connections[0], m.blocks[3].cores[0]
    _, states = m(torch.randint(17, (2, 3)), return_states=True)
    state = states["block.3"]
    q, k, v = core.project(Reads(c.norm(state["stream"])), CTX)
    rows = (*state["sources"].sources, torch.cat((k, v), -1))
    mixed = c.mixed_values(q, rows)
    stack = torch.stack(rows, 3).flatten(0, 1)  # (B T, H, n, 2 D): layers are positions
    K, V = stack.chunk(2, -1)
    y = local_attention(q.flatten(0, 1).unsqueeze(2), K, V, None).squeeze(2).unflatten(0, (2, 3))
    torch.testing.assert_close(mixed, y, rtol=0, atol=1e-12)


def test_only_anchors_that_are_read_are_kept() -> None:
    m = model("depth_attention(stride_attentions=2, recent_attentions=1)", n_blocks=5)
    _, states = m(torch.randint(17, (1, 4)), return_states=True)
    kept = [states[f"block.{n}"]["sources"].index for n in range(6)]
    assert kept == [(), (0,), (0, 1), (0, 2), (0, 2, 3), ()]


def test_the_cache_is_that_of_a_plain_model_and_keeps_mixed_values() -> None:
    m, plain = (perturb(model(s, n_blocks=3).double()) for s in ("depth_attention", "additive"))
    assert m.new_cache(2, 9).nbytes == plain.new_cache(2, 9).nbytes
    assert sum(p.numel() for p in m.parameters()) == sum(p.numel() for p in plain.parameters())
    tokens = torch.randint(17, (2, 7))
    cache = m.new_cache(2)
    pieces = [m(part, cache=cache) for part in tokens.split([3, 1, 2, 1], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), m(tokens), rtol=0, atol=1e-12)


def test_one_attention_is_the_standard_transformer() -> None:
    ours, plain = (model(s, n_blocks=1) for s in ("depth_attention", "additive"))
    plain.load_state_dict(ours.state_dict())
    tokens = torch.randint(17, (2, 7))
    assert torch.equal(ours(tokens), plain(tokens))
    twice = model("depth_attention", n_blocks=2)
    standard = model("additive", n_blocks=2)
    standard.load_state_dict(twice.state_dict())
    assert not torch.allclose(twice(tokens), standard(tokens), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("sequence", "said"),
    [(["mlp"], "no block has one"), (["attention", "attention(n_kv_heads=1)", "mlp"], "one shape")],
)
def test_models_that_it_cannot_serve_are_refused(sequence: list[str], said: str) -> None:
    with pytest.raises(twoaxis.InputError, match=said):
        model("depth_attention", sequence=sequence)


@pytest.mark.parametrize("bad", ["stride_attentions=0", "stride_attentions=1.5", "recent_attentions=-1"])
def test_refuses(bad: str) -> None:
    with pytest.raises(twoaxis.InputError, match="allowed is"):
        twoaxis.parse_spec("depth", f"depth_attention({bad})")


def test_documents_do_not_mix() -> None:
    m = perturb(model("depth_attention", n_blocks=3).double())
    tokens, segments = torch.randint(17, (1, 6)), torch.tensor([[0, 0, 0, 1, 1, 1]])
    parts = torch.cat([m(part) for part in tokens.split(3, 1)], 1)
    torch.testing.assert_close(m(tokens, segments=segments), parts, rtol=0, atol=1e-12)
