import numpy as np
import pytest
import torch

from twoaxis.data import TokenFile, eval_batches
from twoaxis.errors import InputError


def tokens_of(*lengths):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 50, length) for length in lengths]
    return TokenFile.pack(documents, vocab_size=50, n_bytes=sum(lengths), tokenizer="t", fingerprint="f")


def score(batches):
    """Summed loss of a fixed bigram table in float64, and the number of targets."""
    table = torch.randn(50, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(
        -1
    )
    losses = []
    for batch in batches:
        scored = batch.targets != -100
        losses += (-table[batch.tokens[scored], batch.targets[scored]]).tolist()
    return sum(losses), len(losses)


# pitfalls, Evaluation: "documents of 3 and 9 tokens scored in batch 1, 2 and 8 -> same totals and same number
# of counted tokens"
@pytest.mark.parametrize("seq_len", [1, 4, 5, 11, 12, 100])
@pytest.mark.parametrize(("packing", "counted"), [("stream", 11), ("documents", 10)])
def test_totals_and_counts_do_not_depend_on_the_batch_size(packing, counted, seq_len):
    tokens = tokens_of(3, 9)
    scores = [score(eval_batches(tokens, seq_len, batch, packing=packing)) for batch in (1, 2, 8)]
    assert scores[0] == scores[1] == scores[2]
    assert scores[0][1] == counted


@pytest.mark.parametrize("n", [2, 7, 8, 9, 33])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_token_after_the_first_is_a_target_once(n, batch_size):
    tokens = TokenFile.pack([np.arange(n)], vocab_size=n, n_bytes=n, tokenizer="t", fingerprint="f")
    batches = list(eval_batches(tokens, 4, batch_size))
    targets = torch.cat([batch.targets for batch in batches]).flatten()
    inputs = torch.cat([batch.tokens for batch in batches]).flatten()
    assert targets[targets != -100].tolist() == list(range(1, n))
    assert torch.equal(inputs[targets != -100] + 1, targets[targets != -100])
    assert all(batch.tokens.shape[1] == 4 for batch in batches)


@pytest.mark.parametrize("max_tokens", [1, 4, 6, 31, 32, 99])
def test_max_tokens_scores_the_first_targets_only(max_tokens):
    tokens = tokens_of(33)
    batches = list(eval_batches(tokens, 4, 3, max_tokens))
    targets = torch.cat([batch.targets for batch in batches]).flatten()
    assert targets[targets != -100].tolist() == tokens.ids[1 : max_tokens + 1].tolist()
    assert all((batch.targets != -100).any(dim=1).all() for batch in batches)  # no row for nothing


def test_padding_is_marked_and_documents_are_told_apart():
    (batch,) = eval_batches(tokens_of(2, 1, 4), 5, 8, packing="documents")
    assert batch.segments.tolist() == [[0, 0, 1, 2, 2], [0, 0, -1, -1, -1]]
    assert (batch.targets == -100).tolist() == [
        [False, True, True, False, False],
        [False, True, True, True, True],
    ]
    assert batch.tokens[1, 2:].tolist() == [0, 0, 0]


def test_bad_arguments_fail_at_the_call():
    with pytest.raises(InputError, match="at least 2 tokens"):
        eval_batches(tokens_of(1), 4, 1)
    for arguments in ({"seq_len": 0}, {"batch_size": 0}, {"max_tokens": 0}, {"packing": "docs"}):
        with pytest.raises(InputError, match=next(iter(arguments))):
            eval_batches(tokens_of(9), **{"seq_len": 4, "batch_size": 1} | arguments)
