"""Decoding: greedy and sampled, ends, padding, modes, refusals."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import configurations
import twoaxis
from configurations import Case, perturb
from twoaxis import InputError
from twoaxis.model import choose

VOCAB = configurations.VOCAB


def model_of(depth: str = "additive", sequence: str = "local to global", **fields) -> twoaxis.Decoder:
    return Case(depth, sequence).model(**fields).eval()


def tokens(batch: int = 2, length: int = 9) -> Tensor:
    return configurations.tokens(batch, length)


class Scripted(nn.Module):
    """A model whose rows say what is written for them; counts how often it is asked."""

    def __init__(self, *rows: list[int]) -> None:
        super().__init__()
        self.cfg = SimpleNamespace(vocab_size=10)
        self.rows, self.asked = torch.tensor(rows), 0

    def new_cache(self, batch: int, max_length: int, max_rollback: int) -> None:
        return None

    def forward(self, row: Tensor, segments: None, cache: None, last: int) -> Tensor:
        step, self.asked = self.asked, self.asked + 1
        return nn.functional.one_hot(self.rows[:, step], 10)[:, None].double()


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("sequence", ["standard", "local to global", "parallel", "pattern"])
def test_greedy_is_the_argmax_of_a_whole_forward(sequence, use_cache):
    model, row = model_of(sequence=sequence), tokens()
    expected = row
    for _ in range(6):
        expected = torch.cat((expected, model(expected)[:, -1].argmax(-1, keepdim=True)), 1)
    assert twoaxis.generate(model, row, 6, use_cache=use_cache).equal(expected)


@pytest.mark.parametrize("depth", twoaxis.methods("depth"))
def test_with_and_without_a_cache(depth):
    model, row = model_of(depth), tokens(length=5)
    made = [
        twoaxis.generate(model, row, 4, 0.7, use_cache=use, generator=torch.Generator().manual_seed(4))
        for use in (True, False)
    ]
    assert made[0].shape == (2, 9)
    assert made[0].equal(made[1])
    assert made[0][:, :5].equal(row)


def test_rows_end_by_any_end_id_and_are_padded():
    # pitfall (Batches, heads): row 0 ends at step 2, row 1 at step 5, limit 8; several end ids
    model = Scripted([3, 8, 4, 4, 4, 4, 4, 4], [3, 3, 3, 3, 9, 4, 4, 4])
    made = twoaxis.generate(model, torch.zeros(2, 1, dtype=torch.long), 8, end_ids=[9, 8], pad_id=1)
    assert made[:, 1:].tolist() == [[3, 8, 1, 1, 1], [3, 3, 3, 3, 9]]  # stops after step 5
    assert model.asked == 5


def test_the_first_end_id_pads_by_default():
    model = Scripted([9, 4, 4], [3, 3, 8])
    made = twoaxis.generate(model, torch.zeros(2, 1, dtype=torch.long), 3, end_ids=[8, 9])
    assert made[:, 1:].tolist() == [[9, 8, 8], [3, 3, 8]]


def test_padding_alone_ends_nothing():
    made = twoaxis.generate(Scripted([5, 1, 5]), torch.zeros(1, 1, dtype=torch.long), 3, pad_id=1)
    assert made[:, 1:].tolist() == [[5, 1, 5]]


def test_each_row_equals_its_single_run():
    # pitfall (Batches, heads): each row equals its single run, the end token stays in the output
    model, row = model_of(), tokens(4, 6)
    free = twoaxis.generate(model, row, 8)[:, 6:]
    ends = [int(free[0, 1]), int(free[1, 4])]
    together = twoaxis.generate(model, row, 8, end_ids=ends, pad_id=0)
    for b in range(4):
        alone = twoaxis.generate(model, row[b : b + 1], 8, end_ids=ends, pad_id=0)[0]
        assert together[b, : len(alone)].equal(alone)
        assert not together[b, len(alone) :].any()
        assert int(alone[-1]) in ends or len(alone) == 14


@pytest.mark.parametrize("depth", twoaxis.methods("depth"))
def test_left_padded_rows_equal_their_own_runs(depth):
    # pitfall (Positions): lengths 3 and 7, 5 decode steps, a pad id different from the end id
    model, row = model_of(depth), tokens(2, 7)
    row[0, :4] = 5  # pads with an embedding like any other
    segments = torch.zeros(2, 7, dtype=torch.long)
    segments[0, :4] = -1
    alone = [twoaxis.generate(model, row[:1, 4:], 5), twoaxis.generate(model, row[1:], 5)]
    for use_cache in [True, False] if depth == "additive" else [True]:
        made = twoaxis.generate(model, row, 5, segments=segments, use_cache=use_cache)
        assert made[:1, 4:].equal(alone[0])
        assert made[1:].equal(alone[1])


def test_the_last_document_goes_on():
    model, row = model_of(), tokens(1, 8)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    for use_cache in (True, False):
        made = twoaxis.generate(model, row, 5, segments=segments, use_cache=use_cache)
        assert made[:, 3:].equal(twoaxis.generate(model, row[:, 3:], 5))


def test_prompts_longer_than_windows():
    model, row = model_of(sequence="local"), tokens(1, 40)
    assert twoaxis.generate(model, row, 6).equal(twoaxis.generate(model, row, 6, use_cache=False))


def test_modes_are_restored():
    # pitfall (Loss, optimiser, randomness): dropout 0.5, generation: identical outputs
    model = model_of(dropout=0.5).train()
    model.blocks[1].eval()  # e.g. a frozen block
    modes = {name: module.training for name, module in model.named_modules()}
    first, second = (twoaxis.generate(model, tokens(), 8) for _ in range(2))
    assert first.equal(second)
    assert first.equal(twoaxis.generate(model_of(dropout=0.5), tokens(), 8))
    assert {name: module.training for name, module in model.named_modules()} == modes
    with pytest.raises(RuntimeError, match="stop"):
        twoaxis.generate(model, tokens(), 8, on_token=_stop)
    assert {name: module.training for name, module in model.named_modules()} == modes


def _stop(new: Tensor) -> None:
    raise RuntimeError("stop")


def test_tokens_are_told_as_they_are_made():
    told: list[Tensor] = []
    made = twoaxis.generate(model_of(), tokens(), 4, on_token=told.append)
    assert torch.cat(told, 1).equal(made[:, 9:])
    assert not made.requires_grad


def test_seeds():
    model, row = model_of(), tokens(3)

    def drawn(seed: int) -> Tensor:
        return twoaxis.generate(model, row, 12, 1.5, generator=torch.Generator().manual_seed(seed))

    assert drawn(1).equal(drawn(1))
    assert not drawn(1).equal(drawn(2))


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"top_k": 3, "top_p": 0.01}], ids=str)
def test_the_narrowest_draw_is_greedy(options):
    model, row = model_of(), tokens()
    assert twoaxis.generate(model, row, 6, 1.0, **options).equal(twoaxis.generate(model, row, 6))
    assert twoaxis.generate(model, row, 6, 1e-30).equal(twoaxis.generate(model, row, 6))


@pytest.mark.parametrize(
    ("temperature", "options", "expected"),
    [
        (1.0, {}, [0.5, 0.3, 0.15, 0.05]),
        (0.5, {}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (1.0, {"top_k": 2}, [0.625, 0.375, 0, 0]),
        (1.0, {"top_k": 9}, [0.5, 0.3, 0.15, 0.05]),
        (1.0, {"top_p": 0.75}, [0.625, 0.375, 0, 0]),
        (1.0, {"top_p": 0.85}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (1.0, {"top_p": 1.0}, [0.5, 0.3, 0.15, 0.05]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(temperature, options, expected):
    rows = 40_000
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log().expand(rows, -1)  # not in order of probability
    drawn = choose(logits, temperature, generator=torch.Generator().manual_seed(0), **options)
    found = torch.bincount(drawn.flatten(), minlength=4)[[1, 3, 2, 0]] / rows
    exact = torch.tensor(expected)
    assert not found[exact == 0].any()
    assert (found - exact).abs().max() < 4 * 0.5 / rows**0.5  # four standard deviations at most


def test_nothing_to_write():
    row = tokens()
    made = twoaxis.generate(model_of(), row, 0)
    assert made.equal(row)
    assert twoaxis.generate(model_of(), row[:0], 3).shape == (0, 12)
    assert twoaxis.generate(model_of(), row[:0], 3, 1.0).shape == (0, 12)


def test_a_bfloat16_model_writes():
    torch.manual_seed(0)
    model = perturb(Case("additive", "local to global").fresh().bfloat16())
    row = tokens()
    assert twoaxis.generate(model, row, 5, 0.8, top_p=0.9).shape == (2, 14)
    assert twoaxis.generate(model, row, 5).dtype == row.dtype


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1: allowed is an integer of 0 or more"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0"),
        ({"temperature": -0.1}, "temperature=-0.1: allowed is 0, or 1e-30 or more"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0: allowed is 1 or more, or None"),
        ({"temperature": 1.0, "top_k": 2.0}, "top_k=2.0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0: allowed is above 0 up to 1, or None"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"top_k": 5}, "top_k and top_p need a temperature above 0"),
        ({"end_ids": [VOCAB]}, f"end_ids or pad_id has {VOCAB}: the model's ids are 0 to {VOCAB - 1}"),
        ({"pad_id": -1}, "end_ids or pad_id has -1"),
        ({"tokens": torch.zeros(2, 0, dtype=torch.long)}, "with T of 1 or more"),
        ({"tokens": torch.zeros(4, dtype=torch.long)}, r"give int64 ids \(B, T\)"),
        ({"tokens": torch.zeros(2, 4)}, "give int64 ids"),
        ({"tokens": torch.full((1, 3), VOCAB)}, f"tokens has {VOCAB}"),
        ({"tokens": torch.full((1, 3), -1)}, "tokens has -1"),
        ({"segments": torch.zeros(2, 3, dtype=torch.long)}, r"segments \(2, 3\): give one id per token"),
        ({"segments": torch.full((2, 9), -1)}, "put the padding on the left"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_met_is_refused(options, message):
    given = {"tokens": tokens(), "max_new_tokens": 3, **options}
    with pytest.raises(InputError, match=message) as caught:
        twoaxis.generate(model_of(), **given)
    assert "\n" not in str(caught.value)


def test_what_was_written_can_be_trained_on():
    """Decoding runs in inference mode; its tokens are ordinary ones all the same."""
    model = Case("additive").model().float()
    made = twoaxis.generate(model, torch.tensor([[1, 2]]), 3)
    streamed = list(twoaxis.generate_stream(model, torch.tensor([[1, 2]]), 3))
    for rows in (made, torch.cat(streamed, 1)):
        assert not rows.is_inference()
        model.loss(rows[:, :-1], rows[:, 1:]).backward()
