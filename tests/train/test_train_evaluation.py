import math

import pytest
import torch
import torch.nn.functional as F

from twoaxis import Decoder, InputError, ModelConfig
from twoaxis.data import TokenFile
from twoaxis.train import evaluate


def model_of(**fields):
    torch.manual_seed(0)
    return Decoder(ModelConfig(**{"vocab_size": 20, "d_model": 16, "n_blocks": 2, "n_heads": 2} | fields))


def tokens_of(*lengths, bytes_per_token=1):
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 20, (length,), generator=generator).numpy() for length in lengths]
    size = sum(lengths) * bytes_per_token
    return TokenFile.pack(documents, vocab_size=20, n_bytes=size, tokenizer="t", fingerprint="f")


# pitfalls, Evaluation: "documents of 3 and 9 tokens scored in batch 1, 2 and 8 -> same totals and same
# number of counted tokens"
@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("seq_len", [2, 5, 16])
def test_totals_do_not_depend_on_the_batch_size(seq_len, packing):
    model, tokens = model_of().double(), tokens_of(3, 9)
    scores = [evaluate(model, tokens, seq_len, batch, packing=packing) for batch in (1, 2, 8)]
    assert {score.tokens for score in scores} == {11 if packing == "stream" else 10}
    for score in scores[1:]:
        assert score.nats == pytest.approx(scores[0].nats, rel=1e-12)


def test_the_score_is_the_loss_of_every_token_after_the_first():
    model, tokens = model_of().double(), tokens_of(12, bytes_per_token=3)
    ids = torch.tensor(tokens.ids.astype("int64"))
    with torch.no_grad():
        expected = F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="sum").item()
    score = evaluate(model, tokens, seq_len=11, batch_size=4)
    assert score.tokens == 11
    assert score.nats == pytest.approx(expected, rel=1e-12)
    assert score.loss == pytest.approx(expected / 11)
    assert score.bytes == 33
    assert score.bits_per_byte == pytest.approx(expected / math.log(2) / 33)
    first = evaluate(model, tokens, seq_len=11, batch_size=4, max_tokens=4)
    with torch.no_grad():
        expected = F.cross_entropy(model(ids[None, :4])[0], ids[1:5], reduction="sum").item()
    assert first.tokens == 4
    assert first.nats == pytest.approx(expected, rel=1e-12)


def test_documents_are_scored_as_if_alone():
    model, tokens = model_of().double(), tokens_of(3, 9)
    ids = torch.tensor(tokens.ids.astype("int64"))
    with torch.no_grad():
        alone = [
            F.cross_entropy(model(d[None, :-1])[0], d[1:], reduction="sum").item() for d in ids.split([3, 9])
        ]
    together = evaluate(model, tokens, seq_len=12, batch_size=1, packing="documents")
    assert together.nats == pytest.approx(sum(alone), rel=1e-12)


# pitfalls, Loss: "dropout 0.5, eval mode, two forward passes -> identical outputs; switching no_grad alone
# does not count as evaluation mode"
@pytest.mark.parametrize("training", [True, False], ids=["from-training", "from-evaluation"])
def test_dropout_is_off_and_the_mode_comes_back(training):
    model, tokens = model_of(dropout=0.5).train(training), tokens_of(40)
    scores = {evaluate(model, tokens, 8, 2).nats for _ in range(2)}
    assert len(scores) == 1
    assert scores == {evaluate(model.eval(), tokens, 8, 2).nats}
    evaluate(model.train(training), tokens, 8, 2)
    assert model.training is training
    with torch.no_grad():
        ids = torch.arange(20)[None]
        assert torch.equal(model.train()(ids), model(ids)) is False


def test_the_mode_comes_back_after_an_error():
    model = model_of().train()
    with pytest.raises(IndexError):
        evaluate(
            model,
            TokenFile.pack([[1, 99]], vocab_size=100, n_bytes=2, tokenizer="t", fingerprint="f"),
            1,
            1,
            None,
        )
    assert model.training


@pytest.mark.parametrize("tokens", [tokens_of(1), tokens_of()], ids=["one", "none"])
def test_too_few_tokens_are_refused(tokens):
    with pytest.raises(InputError, match="tokens"):
        evaluate(model_of(), tokens, 4, 1)


def test_one_token_documents_hold_no_target():
    with pytest.raises(InputError, match="no token of this text is a target"):
        evaluate(model_of(), tokens_of(1, 1, 1), 4, 1, packing="documents")


def test_autocast_scores_close_to_float32():
    model, tokens = model_of(), tokens_of(200)
    exact, rounded = (evaluate(model, tokens, 20, 3, precision=p).loss for p in ("float32", "autocast"))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.01)
