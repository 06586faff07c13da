"""However tokens are fed, the same logits: chunks, rollback and redo, beams, padding, documents.

The standard stream with every kind of window; `tests/test_registry.py` does the same for all depth methods.
"""

import pytest
import torch
from torch import Tensor

import twoaxis
from configurations import perturb

SEQUENCES = {
    "full": ["attention", "mlp"],
    "w=1": ["short_swa(window=1)", "mlp"],
    "w=2": ["short_swa(window=2)", "mlp"],
    "w=7": ["short_swa(window=7, position='bias', sink=True)", "mlp"],
    "local to global": ["short_swa(window=4)", "attention", "mlp"],
    "parallel": ["parallel(short_swa(window=3), attention, mlp)"],
    "pattern": ["attention(window=4, pattern='SSL', n_kv_heads=1, n_heads=2)", "mlp"],
}
VOCAB, T = 17, 24
every = pytest.mark.parametrize("sequence", SEQUENCES)
quiet = torch.no_grad()


def build(sequence: str, n_blocks: int = 3) -> twoaxis.Decoder:
    torch.manual_seed(3)
    cfg = twoaxis.ModelConfig(
        vocab_size=VOCAB, d_model=16, n_blocks=n_blocks, n_heads=2, sequence=SEQUENCES[sequence]
    )
    return perturb(twoaxis.Decoder(cfg).double()).eval()


def tokens(batch: int = 2, length: int = T, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def fed(model: twoaxis.Decoder, x: Tensor, sizes: list[int], **cache: int | None) -> Tensor:
    memory = model.new_cache(len(x), **cache)
    pieces = x.split(sizes, 1)
    return torch.cat([model(piece, cache=memory) for piece in pieces], 1)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@every
@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, T])
@quiet
def test_chunks(sequence, size):
    # pitfall (KV cache): prompt 24, chunk sizes 1, 3, 4, 5, 8, 24; then 16 decode steps
    model, x = build(sequence), tokens(length=T + 16)
    prompt = [size] * (T // size) + ([T % size] if T % size else [])
    max_length = T + 16 if size == 3 else None
    same(fed(model, x, prompt + [1] * 16, max_length=max_length), model(x))


@every
@pytest.mark.parametrize("rejected", [1, 2, 3])
@quiet
def test_drafts_and_their_rejection(sequence, rejected):
    # pitfall (KV cache): 7 tokens in, draft 3 one by one, reject 2, continue: as if never drafted
    model, x, other = build(sequence), tokens(), tokens(seed=1)
    cache = model.new_cache(2, max_rollback=3)
    model(x[:, :7], cache=cache)
    drafted = torch.cat((x[:, :7], other[:, :3]), 1)
    steps = [model(drafted[:, i : i + 1], cache=cache) for i in range(7, 10)]
    same(torch.cat(steps, 1), model(drafted)[:, 7:])
    cache.drop_last(rejected)
    kept = torch.cat((drafted[:, : 10 - rejected], x[:, 10 - rejected :]), 1)
    assert cache.length == 10 - rejected
    same(model(kept[:, cache.length :], cache=cache), model(kept)[:, 10 - rejected :])


@every
@quiet
def test_a_batch_rolled_back_wholly(sequence):
    # pitfall (Local convolution state): prefill 5, decode a batch of 3, roll back 3, decode 3 others
    model, x, other = build(sequence), tokens(), tokens(seed=1)
    cache = model.new_cache(2, max_rollback=3)
    model(x[:, :5], cache=cache)
    model(other[:, :3], cache=cache)
    cache.drop_last(3)
    same(model(x[:, 5:8], cache=cache), model(x[:, :8])[:, 5:])


@every
@quiet
def test_a_rollback_that_cannot_be_met_changes_nothing(sequence):
    model, x = build(sequence), tokens()
    cache = model.new_cache(2)
    model(x[:, :15], cache=cache)
    if sequence in ("full", "w=1"):  # all earlier rows are there, or none is needed
        cache.drop_last(5)
    else:
        with pytest.raises(twoaxis.InputError, match="cannot take back 5 of 15 tokens"):
            cache.drop_last(5)
    assert cache.length == (10 if sequence in ("full", "w=1") else 15)
    start = cache.length
    same(model(x[:, start:], cache=cache), model(x)[:, start:])


@every
@quiet
def test_an_emptied_cache_is_new(sequence):
    # pitfall (KV cache): truncate-to-0 leaves an empty, reusable cache
    model, x, other = build(sequence), tokens(), tokens(seed=1)
    cache = model.new_cache(2)
    model(other, cache=cache, segments=torch.arange(T).expand(2, -1) // 5)
    cache.truncate_to(0)
    same(model(x, cache=cache), model(x))


@every
@quiet
def test_beams(sequence):
    # pitfall (KV cache): 3 beams, parents (2,0,0) after step 1, (1,1,2) after step 2: as re-run from scratch
    model, x = build(sequence), tokens(batch=3, length=6)
    cache = model.new_cache(3)
    rows = x[:, :4]
    model(rows, cache=cache)
    for step, parents in enumerate(([2, 0, 0], [1, 1, 2])):
        new = tokens(batch=3, length=1, seed=10 + step)
        cache.reorder(torch.tensor(parents))
        rows = torch.cat((rows[torch.tensor(parents)], new), 1)
        same(model(new, cache=cache), model(rows)[:, -1:])


@every
@pytest.mark.parametrize("explicit", [False, True], ids=["", "explicit positions"])
@quiet
def test_left_padding(sequence, explicit):
    # pitfall (Positions): left-padded lengths 3 and 7, explicit positions or not, 5 decode steps
    model, x = build(sequence), tokens(length=12)
    segments = torch.zeros(2, 12, dtype=torch.long)
    segments[0, :4] = -1  # of the 7 prompt tokens, 3 are real
    positions = (torch.arange(12) - torch.tensor([[4], [0]])).clamp(min=0) if explicit else None
    cache = model.new_cache(2)
    out = [
        model(
            x[:, a:b],
            segments=segments[:, a:b],
            positions=None if positions is None else positions[:, a:b],
            cache=cache,
        )
        for a, b in [(0, 7), *((i, i + 1) for i in range(7, 12))]
    ]
    same(torch.cat(out, 1)[1:], model(x[1:]))
    same(torch.cat(out, 1)[:1, 4:], model(x[:1, 4:]))


@every
@pytest.mark.parametrize("size", [1, 3, 8, 12], ids=lambda n: f"chunks of {n}")
@pytest.mark.parametrize("batch", [1, 2])
@quiet
def test_packed_documents(sequence, batch, size):
    # pitfall (Packed documents): [6][6] and [2][1][5], with a cache and without, batch 1 and 2
    model, x = build(sequence), tokens(batch, 12)
    for lengths in ([6, 6], [2, 1, 5, 4]):
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(batch, -1)
        alone = torch.cat([model(doc) for doc in x.split(lengths, 1)], 1)
        same(model(x, segments=ids), alone)
        cache = model.new_cache(batch)
        pieces = zip(x.split(size, 1), ids.split(size, 1), strict=True)
        same(torch.cat([model(t, segments=s, cache=cache) for t, s in pieces], 1), alone)


@pytest.mark.parametrize("sequence", ["w=7", "local to global"])
@quiet
def test_the_position_after_300_tokens(sequence):
    # pitfall (Positions): feed 300 tokens one at a time; the reported position is 300, not the window
    model, x = build(sequence, n_blocks=1), tokens(1, 301)
    cache = model.new_cache(1)
    for i in range(300):
        model(x[:, i : i + 1], cache=cache)
    assert cache.length == 300
    same(model(x[:, 300:], cache=cache), model(x)[:, 300:])


@every
@quiet
def test_empty_feeds(sequence):
    # pitfall (Batches, heads): B=0, T=4; B=2, T=0: empty outputs, caches unchanged
    model, x = build(sequence), tokens()
    assert model(x[:0, :4]).shape == (0, 4, VOCAB)
    cache = model.new_cache(2)
    model(x[:, :9], cache=cache)
    size = cache.nbytes
    assert model(x[:, :0], cache=cache).shape == (2, 0, VOCAB)
    assert (cache.length, cache.nbytes) == (9, size)
    same(model(x[:, 9:], cache=cache), model(x)[:, 9:])


@quiet
def test_a_cache_of_another_batch_is_refused():
    model, x = build("full"), tokens(3)
    with pytest.raises(twoaxis.InputError, match="the cache was made for batch 2 and tokens have 3 rows"):
        model(x, cache=model.new_cache(2))
    cache = model.new_cache(3, max_length=5)
    model(x[:, :4], cache=cache)
    with pytest.raises(twoaxis.InputError, match="made for max_length=5 tokens and needs 6"):
        model(x[:, 4:6], cache=cache)
    same(model(x[:, 4:5], cache=cache), model(x[:, :5])[:, 4:])  # the refusal left nothing behind
