"""Streams, ends by text, the penalty on repetition, prompt lookup: each against the plain way."""

import pytest
import torch
from test_generate import Scripted, model_of, tokens
from torch import Tensor

import configurations
import twoaxis
from configurations import Case
from twoaxis import InputError, RunError
from twoaxis.model import penalised
from twoaxis.model.lookup import accepted, draft, drafts

LETTERS = "abcdefghijk"


def decode(ids: list[int]) -> str:
    return "".join(LETTERS[i] for i in ids)


def repeating(batch: int = 1, length: int = 12) -> Tensor:
    return tokens(batch, 4).repeat(1, length)[:, :length]


def test_a_stream_is_what_generate_returns():
    model, row = model_of(), tokens()
    stream = twoaxis.generate_stream(model, row, 6)
    assert torch.is_grad_enabled()
    pieces = list(stream)
    assert [p.shape for p in pieces] == [(2, 1)] * 6
    assert torch.cat((row, *pieces), 1).equal(twoaxis.generate(model, row, 6))


def test_a_stream_may_be_left_and_the_mode_is_kept_between_steps():
    model = model_of(dropout=0.5).train()
    stream = twoaxis.generate_stream(model, tokens(), 6)
    first = next(stream)
    assert model.training
    assert torch.is_grad_enabled()
    assert first.equal(twoaxis.generate(model.eval(), tokens(), 1)[:, 9:])


def test_arguments_are_checked_before_the_first_step():
    with pytest.raises(InputError, match="max_new_tokens"):
        twoaxis.generate_stream(model_of(), tokens(), -1)
    with pytest.raises(InputError, match="text is made from one row"):
        twoaxis.generate_text(model_of(), tokens(2), 3, decode=decode)


def test_rows_end_by_text_across_tokens():
    model = Scripted([1, 2, 3, 4, 5], [1, 1, 2, 3, 4])
    made = twoaxis.generate(
        model, torch.zeros(2, 1, dtype=torch.long), 5, stop=["cd", "zz"], decode=decode, pad_id=9
    )
    assert made[:, 1:].tolist() == [[1, 2, 3, 9], [1, 1, 2, 3]]


def test_the_prompt_ends_nothing():
    made = twoaxis.generate(
        Scripted([4, 3, 4, 5]), torch.tensor([[3]]), 4, stop=["de"], decode=decode
    )  # "d" of the prompt and "e": no end
    assert made.tolist() == [[3, 4, 3, 4]]


def test_text_stops_before_the_stop_string():
    model, row = model_of(), tokens(1)
    whole = "".join(twoaxis.generate_text(model, row, 12, decode=decode))
    assert whole == decode(twoaxis.generate(model, row, 12)[0, 9:].tolist())
    stop = whole[5:7]
    assert "".join(twoaxis.generate_text(model, row, 12, decode=decode, stop=[stop])) == whole.split(stop)[0]


def test_penalised_logits():
    # arXiv 1909.05858, section 4.1, with negative scores multiplied
    logits = torch.tensor([[2.0, -2.0, 3.0, 0.0]])
    seen = torch.tensor([[True, True, False, True]])
    assert penalised(logits, seen, 2.0).tolist() == [[1.0, -4.0, 3.0, 0.0]]


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("lookup", [0, 3])
def test_repetition_is_penalised_as_written(use_cache, lookup):
    if lookup and not use_cache:
        return
    model, row, penalty = model_of(), tokens(2, 6), 1.3
    expected = row
    for _ in range(10):
        logits = model(expected)[:, -1]
        for b in range(2):
            for i in set(expected[b].tolist()):
                logits[b, i] = logits[b, i] / penalty if logits[b, i] > 0 else logits[b, i] * penalty
        expected = torch.cat((expected, logits.argmax(-1, keepdim=True)), 1)
    options = {"use_cache": use_cache, "prompt_lookup": lookup}
    made = twoaxis.generate(model, row, 10, repetition_penalty=penalty, **options)
    assert made.equal(expected)
    assert not made.equal(twoaxis.generate(model, row, 10))


def test_padding_and_other_documents_are_not_repeated():
    model, row = model_of(), tokens(1, 9)
    segments = torch.tensor([[-1, -1, 0, 0, 1, 1, 1, 1, 1]])
    made = twoaxis.generate(model, row, 6, repetition_penalty=2.0, segments=segments)
    assert made[:, 4:].equal(twoaxis.generate(model, row[:, 4:], 6, repetition_penalty=2.0))


@pytest.mark.parametrize("depth", [*twoaxis.methods("depth"), "ddl(value_dim=4, compressor='token')"])
def test_prompt_lookup_equals_greedy(depth):
    # pitfall (KV cache): drafted, verified and rejected tokens leave no trace
    model, row = model_of(depth), repeating(2, 9)
    plain = twoaxis.generate(model, row, 10)
    assert twoaxis.generate(model, row, 10, prompt_lookup=4).equal(plain)


@pytest.mark.parametrize("lookup", [1, 3, 20])
def test_prompt_lookup_of_any_length(lookup):
    model = model_of()
    for row in (repeating(3, 9), tokens(2, 1)):
        plain = twoaxis.generate(model, row, 14)
        assert twoaxis.generate(model, row, 14, prompt_lookup=lookup).equal(plain)


@pytest.mark.parametrize("sequence", list(configurations.SEQUENCES))
def test_prompt_lookup_with_every_core(sequence):
    model, row = model_of(sequence=sequence), repeating(2, 9)
    plain = twoaxis.generate(model, row, 10)
    assert twoaxis.generate(model, row, 10, prompt_lookup=4).equal(plain)


def test_prompt_lookup_with_padding_ends_and_stops():
    model, row = model_of(), repeating(3, 9)
    segments = torch.zeros_like(row)
    segments[0, :4] = -1
    free = twoaxis.generate(model, row, 12, segments=segments)[:, 9:]
    options = {"segments": segments, "end_ids": [int(free[0, 4])], "pad_id": 0}
    options |= {"stop": [decode(free[1, 5:7].tolist())], "decode": decode}
    plain = twoaxis.generate(model, row, 12, **options)
    assert twoaxis.generate(model, row, 12, prompt_lookup=5, **options).equal(plain)


def test_prompt_lookup_saves_passes():
    model = Case("additive", "standard").fresh(n_blocks=1).double().eval()
    with torch.no_grad():
        for block in model.blocks:
            for core in block.cores:
                for p in core.parameters():
                    p.zero_()
        model.head.weight.copy_(torch.eye(11, 12))
        model.embedding.weight.copy_(torch.eye(11, 12).roll(1, 0))  # i is followed by i - 1
    model.head.weight = torch.nn.Parameter(torch.eye(11, 12, dtype=torch.float64))
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    row = torch.arange(22).flip(0)[None] % 11
    made = twoaxis.generate(model, row, 12, prompt_lookup=5)
    assert made[0, 22:].tolist() == [(10 - i) % 11 for i in range(12)]
    assert len(passes) == 2  # 5 drafted and 1 more, twice


def test_drafts():
    row = torch.tensor([1, 2, 3, 9, 2, 3, 7, 1, 2, 3])
    assert draft(row, 4).tolist() == [9, 2, 3, 7]  # after the earlier 1 2 3, not the later 2 3
    assert draft(row[:6], 1).tolist() == [9]
    assert draft(torch.tensor([1, 2, 3]), 4).tolist() == []
    assert draft(torch.tensor([5]), 4).tolist() == []
    assert draft(torch.tensor([5, 5]), 4).tolist() == [5]
    both = torch.tensor([[1, 2, 3, 1], [4, 5, 6, 7]])
    assert drafts(both, 2).tolist() == [[2, 3], [7, 7]]
    assert drafts(both, 0).shape == (2, 0)
    assert drafts(both[1:], 3).shape == (1, 0)


def test_what_is_accepted_agrees_in_every_row_that_goes_on():
    chosen = torch.tensor([[1, 2, 3, 4], [1, 2, 9, 4]])
    going, ended = torch.tensor([[False], [False]]), torch.tensor([[False], [True]])
    assert accepted(torch.tensor([[1, 2, 3], [1, 2, 3]]), chosen, going) == 2
    assert accepted(torch.tensor([[1, 2, 3], [1, 2, 3]]), chosen, ended) == 3
    assert accepted(torch.tensor([[0, 2, 3], [1, 2, 9]]), chosen, going) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: allowed is above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf"),
        ({"stop": ["x"]}, "stop strings need decode="),
        ({"stop": "x", "decode": decode}, "give a list of strings"),
        ({"stop": [""], "decode": decode}, "stop string ''"),
        ({"prompt_lookup": -1}, "prompt_lookup=-1"),
        ({"prompt_lookup": 2, "temperature": 1.0}, "it needs temperature=0 and use_cache=True"),
        ({"prompt_lookup": 2, "use_cache": False}, "it needs temperature=0 and use_cache=True"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_met_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        twoaxis.generate(model_of(), tokens(), 3, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_no_numbers_end_in_one_line(temperature):
    model = model_of("additive")
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    with pytest.raises(RunError, match="logits are not finite numbers"):
        twoaxis.generate(model, tokens(1, 3), 2, temperature=temperature)
