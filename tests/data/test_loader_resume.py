import json
from itertools import islice

import numpy as np
import pytest
import torch

from twoaxis.data import Loader, TokenFile
from twoaxis.errors import InputError

PACKINGS = pytest.mark.parametrize("packing", ["stream", "documents"])


def tokens_of(*lengths):
    """Documents of these lengths whose ids are 0, 1, 2, ...: a token's id is its place in the file."""
    ends = np.cumsum(lengths)
    documents = [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    return TokenFile.pack(documents, vocab_size=70000, n_bytes=int(ends[-1]), tokenizer="t", fingerprint="f")


def same(left, right):
    pairs = list(zip(left, right, strict=True))
    for a, b in pairs:
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.targets, b.targets)
        assert (a.segments is None) == (b.segments is None)
        assert a.segments is None or torch.equal(a.segments, b.segments)
    return bool(pairs)


# pitfalls, Saving: "run 30 batches, save, resume, run 10; compare batch ids with one run of 40 -> same ids"
# and "save in the middle of epoch 2 of a shuffled set, resume -> remaining ids are those of epoch 2's order"
@PACKINGS
@pytest.mark.parametrize("done", [0, 7, 30, 31], ids=lambda n: f"after-{n}")
def test_a_resumed_stream_goes_on_as_if_never_stopped(packing, done):
    def loader():
        return Loader(tokens_of(60, 75, 65), 9, 2, 1, packing=packing)  # 11 batches per epoch

    whole = list(islice(loader(), 40))
    first = loader()
    list(islice(first, done))
    state = json.loads(json.dumps(first.state_dict()))  # plain values only
    assert done not in (30, 31) or state["epoch"] == 2
    resumed = loader()
    list(islice(resumed, 3))  # wherever it stood
    resumed.load_state_dict(state)
    assert same(islice(resumed, 40 - done), whole[done:])


def test_a_file_on_disk_resumes_one_in_memory(tmp_path):
    tokens = tokens_of(60)
    first = Loader(tokens, 9, 2, 1)
    next(first)
    resumed = Loader(tokens.write(tmp_path / "a.tokens"), 9, 2, 1)
    resumed.load_state_dict(first.state_dict())
    assert same([next(resumed)], [next(first)])


# pitfalls, Parallel training: "save on 2 processes, resume on 1 and on 3" (the data side)
@pytest.mark.parametrize(("batch_size", "world_size"), [(6, 1), (2, 3), (1, 6)])
def test_another_number_of_ranks_goes_on_from_the_same_row(batch_size, world_size):
    tokens = tokens_of(200)
    saved = [Loader(tokens, 9, 3, 1, rank=r, world_size=2) for r in range(2)]
    for rank in saved:
        list(islice(rank, 8))
    assert saved[0].state_dict() == saved[1].state_dict()
    now = [Loader(tokens, 9, batch_size, 1, rank=r, world_size=world_size) for r in range(world_size)]
    for rank in now:
        rank.load_state_dict(saved[0].state_dict())
    for _ in range(5):
        before = torch.cat([next(rank).tokens for rank in saved])
        assert torch.equal(torch.cat([next(rank).tokens for rank in now]), before)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"tokens": tokens_of(59, 1)}, "tokens"),
        ({"seq_len": 8}, "seq_len"),
        ({"seed": 2}, "seed"),
        ({"packing": "documents"}, "packing"),
        ({"shuffle": False}, "shuffle"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_state_of_other_data_or_settings_is_refused(changed, name):
    settings = {"tokens": tokens_of(60), "seq_len": 9, "batch_size": 2, "seed": 1}
    state = Loader(**settings).state_dict()
    with pytest.raises(InputError, match=f"saved with {name}="):
        Loader(**settings | changed).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [{"position": 99}, {"position": -1}, {"position": 1.0}, {"epoch": None}, {"epok": 1}],
    ids=str,
)
def test_a_damaged_state_is_refused(change):
    loader = Loader(tokens_of(60), 9, 2, 1)
    with pytest.raises(InputError):
        loader.load_state_dict(loader.state_dict() | change)
