"""Speed in turns, saved bytes, decode state."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from twoaxis.cost import cost
from twoaxis.model import ModelConfig
from twoaxis.study import measure as room
from twoaxis.study.measure import WARMUP, Measured, decode_state_bytes, measure, saved_bytes
from twoaxis.train import TrainConfig
from twoaxis.train.session import Session


@pytest.fixture
def configs(training: TrainConfig) -> dict[str, TrainConfig]:
    rows = {"a": "additive", "b": "denseformer", "c": "hyper_connections"}
    return {
        n: dataclasses.replace(training, model=dataclasses.replace(training.model, depth=d))
        for n, d in rows.items()
    }


def test_rows_take_turns_there_and_back(
    configs: dict[str, TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    # pitfalls: methods A,B,C then C,B,A; warm-up and repeats are stated; median and spread shown
    order: list[str] = []
    seconds = iter(range(1, 100))

    def step(session: Session) -> float:
        order.append(next(n for n, cfg in configs.items() if cfg is session.cfg))
        return float(next(seconds))

    monkeypatch.setattr(room, "_timed_step", step)
    told: list[tuple[int, int]] = []
    found = measure(configs, turns=3, on_turn=lambda *turn: told.append(turn))
    assert "".join(order) == "abccbaabccba"
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    work = configs["a"].tokens_per_step
    assert WARMUP == 1
    assert found["a"].first_step_seconds == 1.0
    assert found["a"].tokens_per_second == [work / 6, work / 7, work / 12]
    assert found["c"].tokens_per_second == [work / 4, work / 9, work / 10]


def test_measuring_is_repeatable_and_leaves_the_generators_alone(configs: dict[str, TrainConfig]) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, again = (measure({"c": configs["c"]}, turns=1)["c"] for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert (first.saved_bytes, first.decode_state_bytes) == (again.saved_bytes, again.decode_state_bytes)
    assert all(rate > 0 for rate in first.tokens_per_second)


def test_summary_has_median_and_range() -> None:
    found = Measured(
        tokens_per_second=[3.0, 1.0, 2.0, 9.0], first_step_seconds=5.0, saved_bytes=1, decode_state_bytes=2
    ).to_dict()
    assert (found["median"], found["low"], found["high"]) == (2.5, 1.0, 9.0)


class TwoLayers(nn.Module):
    """loss = mean(relu(x W)^2): keeps x, and the result of relu twice, for relu and for the square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def loss(
        self, tokens: torch.Tensor, targets: torch.Tensor, segments: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = tokens.float().reshape(-1, 8)  # (B T / 8, 8)
        return torch.relu(x @ self.weight).square().mean()


def test_saved_bytes_count_each_storage_once_without_parameters(training: TrainConfig) -> None:
    from twoaxis.data import load_corpus, load_tokenizer, prepare

    corpus = load_corpus(training.data)
    session = Session(training, prepare(corpus, load_tokenizer("byte"))[0])
    session.model = TwoLayers()  # type: ignore[assignment]
    assert saved_bytes(session) == 2 * (2 * 16 * 4)  # x and relu(x W), 32 float32 each; W left out


def test_saved_bytes_grow_with_the_batch(training: TrainConfig) -> None:
    one, three = (
        measure({"a": dataclasses.replace(training, batch_size=b)}, turns=1)["a"].saved_bytes for b in (1, 3)
    )
    assert 2.5 * one < three < 3.2 * one


@pytest.mark.parametrize("sequence", [["attention", "mlp"], ["short_swa(window=3)", "attention", "mlp"]])
def test_decode_state_is_what_the_cost_model_says(sequence: list[str]) -> None:
    from twoaxis import Decoder

    cfg = ModelConfig(d_model=16, n_blocks=2, n_heads=2, sequence=sequence)
    assert decode_state_bytes(Decoder(cfg), 11) == cost(cfg, 1, 11).decode_state_bytes
