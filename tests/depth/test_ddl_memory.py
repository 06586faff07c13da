"""The memory over tokens of DDL's convolutions: EC in open, TC at every sublayer and at the end."""

from typing import Any

import points
import pytest
import torch
from points import perturb
from torch import Tensor

from twoaxis import Decoder

SPECS = [
    "ddl(value_dim=3)",
    "ddl(value_dim=3, compressor='token')",
    "ddl(value_dim=2, compressor='token', kernel=2)",
]


def model(spec: str) -> Decoder:
    return perturb(points.model(spec).double(), 0.2)


def fed(m: Decoder, tokens: Tensor, chunks: list[int], **options: Any) -> Tensor:
    """Logits of tokens fed in chunks to a fresh cache."""
    cache, ids = m.new_cache(tokens.shape[0]), options.get("segments")
    outputs, start = [], 0
    for n in chunks:
        given = {} if ids is None else {"segments": ids[:, start : start + n]}
        outputs.append(m(tokens[:, start : start + n], cache=cache, **given))
        start += n
    assert start == tokens.shape[1]
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("prefill", [0, 1, 2, 3, 4])
def test_prefill_then_steps_equal_one_shot(spec: str, prefill: int) -> None:
    """Pitfall: kernel 4, prefill 0 .. 4, then 5 steps (the official TC decode fails below k-1 tokens)."""
    m, tokens = model(spec), torch.randint(17, (2, prefill + 5))
    torch.testing.assert_close(fed(m, tokens, [prefill, 1, 1, 1, 1, 1]), m(tokens), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("chunks", [[1, 1, 1, 2, 6], [7, 4], [0, 11], [3, 0, 8]], ids=str)
def test_chunks_equal_one_shot(spec: str, chunks: list[int]) -> None:
    """Pitfall: chunks 1+1+1+2 -> state is old state followed by new inputs, last k-1 kept."""
    m, tokens = model(spec), torch.randint(17, (2, 11))
    torch.testing.assert_close(fed(m, tokens, chunks), m(tokens), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("chunks", [[8], [3, 1, 4], [1] * 8], ids=str)
def test_packed_documents_equal_separate_runs(spec: str, chunks: list[int]) -> None:
    """Pitfall: kernel 4, docs of 2, 1 and 5 tokens in one row, with and without a cache."""
    m, tokens, lengths = model(spec), torch.randint(17, (2, 8)), [2, 1, 5]
    ids = torch.tensor([0, 0, 1, 2, 2, 2, 2, 2]).expand(2, -1)
    alone = torch.cat([m(part) for part in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(m(tokens, segments=ids), alone, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(fed(m, tokens, chunks, segments=ids), alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_do_not_cross_documents(spec: str) -> None:
    """Pitfall: change doc 1 -> doc 2's outputs and gradients do not move."""
    m, ids = model(spec), torch.tensor([[0] * 6 + [1] * 6])
    tokens = torch.randint(17, (1, 12))
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % 17
    assert torch.equal(m(tokens, segments=ids)[:, 6:], m(other, segments=ids)[:, 6:])
    x = torch.randn(1, 12, 24, dtype=torch.float64, requires_grad=True)
    m.embedding.register_forward_hook(lambda module, given, out: x)
    m(tokens, segments=ids)[:, 6:].sum().backward()
    assert not x.grad[:, :6].any()
    assert x.grad[:, 6:].ne(0).any(-1).all()


@pytest.mark.parametrize("spec", SPECS)
def test_left_padding_equals_unbatched_rows(spec: str) -> None:
    """Pitfall: prompts of 1 and 6 tokens, left padded, non-zero pad embedding; then three decode steps."""
    m, tokens = model(spec), torch.randint(17, (2, 9))
    ids = torch.tensor([[-1] * 5 + [0] * 4, [0] * 9])
    positions = torch.stack((torch.tensor([0] * 5 + [0, 1, 2, 3]), torch.arange(9)))
    cache = m.new_cache(2)
    parts = [
        m(tokens[:, a:b], segments=ids[:, a:b], positions=positions[:, a:b], cache=cache)
        for a, b in ((0, 6), (6, 7), (7, 8), (8, 9))
    ]
    whole = m(tokens, segments=ids, positions=positions)
    for logits in (torch.cat(parts, 1), whole):
        torch.testing.assert_close(logits[:1, 5:], m(tokens[:1, 5:]), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(logits[1:], m(tokens[1:]), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("spec", SPECS)
def test_rollback_forgets_a_rejected_draft(spec: str) -> None:
    """Pitfall: prefill 5, draft 3, roll all 3 back, decode 3 others -> equals a run without the draft."""
    m, tokens, draft = model(spec), torch.randint(17, (2, 8)), torch.randint(17, (2, 3))
    cache = m.new_cache(2, max_rollback=3)
    m(tokens[:, :5], cache=cache)
    m(draft, cache=cache)
    cache.drop_last(3)
    after = torch.cat([m(tokens[:, i : i + 1], cache=cache) for i in range(5, 8)], 1)
    torch.testing.assert_close(after, m(tokens)[:, 5:], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("spec", SPECS)
def test_beams_carry_their_own_rows(spec: str) -> None:
    """Pitfall: parents (2, 0, 0), then (1, 1, 2): every row's state follows, duplicates are copies."""
    m, beams = model(spec), torch.randint(17, (3, 5))
    cache = m.new_cache(3)
    m(beams, cache=cache)
    for parents in (torch.tensor([2, 0, 0]), torch.tensor([1, 1, 2])):
        cache.reorder(parents)
        beams = torch.cat((beams[parents], torch.randint(17, (3, 1))), 1)
        logits = m(beams[:, -1:], cache=cache)
        torch.testing.assert_close(logits, m(beams)[:, -1:], rtol=1e-11, atol=1e-11)


def test_each_call_of_the_shared_compressor_has_its_own_slot() -> None:
    cache = model("ddl(value_dim=3, compressor='token')").new_cache(2)
    own = sorted(name for name in cache.slots if ".cores." not in name)
    sites = [f"blocks.{b}.connections.{i}.memory" for b in range(2) for i in range(2)]
    assert own == [*sites, "stream.expand.memory", "stream.memory"]
    assert all(cache[name].rows == 4 for name in own)
    assert [name for name in model("ddl(value_dim=3)").new_cache(2).slots if ".cores." not in name] == [
        "stream.expand.memory"
    ]


def test_kept_rows_have_the_states_precision() -> None:
    """A bfloat16 model with a float32 state keeps float32 rows, so that decoding equals the parallel pass."""
    m = model("ddl(value_dim=3, compressor='token')").bfloat16()
    assert m.new_cache(2)["stream.memory"].nbytes == 2 * 4 * 24 * 3 * torch.float32.itemsize
    tokens = torch.randint(17, (2, 6))
    torch.testing.assert_close(fed(m, tokens, [2, 1, 3]), m(tokens), rtol=0.02, atol=0.02)
