"""AdamW in one pass and torch's way are one optimiser: same weights, same state, each goes on from the other."""

import pytest
import torch
from torch import nn

from twoaxis import ParamRule
from twoaxis.data import load_corpus, load_tokenizer, tokenize
from twoaxis.ops import choice
from twoaxis.ops.native import adamw
from twoaxis.train import TrainConfig, one_pass, optimizer
from twoaxis.train.optimizer import Optimizer
from twoaxis.train.randomness import isolated
from twoaxis.train.session import Session

pytestmark = pytest.mark.skipif(choice.library("adamw") is None, reason="adamw cannot be built here")
SHAPES = {"matrix": (33, 7), "table": (64, 24), "scalar": (), "empty": (0, 3), "odd": (5,), "never": (4,)}
RULES = {n: ParamRule(decay=len(s) > 1, lr_scale=3.0 if n == "odd" else 1.0) for n, s in SHAPES.items()}
WAYS = ("auto", "plain")


def numbers(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Trained:
    """Masters, their bfloat16 weights if `low`, and an optimiser over them."""

    def __init__(self, low=True, shapes=SHAPES, rules=RULES, **options):
        self.masters = {n: nn.Parameter(numbers(shape, i)) for i, (n, shape) in enumerate(shapes.items())}
        self.low = {n: nn.Parameter(p.detach().bfloat16()) for n, p in self.masters.items()} if low else {}
        cfg = TrainConfig(weight_decay=0.1, **options)
        self.optimizer = Optimizer(self.masters, rules, cfg, None, self.low)

    def step(self, number, scale=0.37):
        for i, (name, master) in enumerate(self.masters.items()):
            grad = 0.1 * numbers(master.shape, 100 * number + i)
            master.grad = None
            if name != "never" and (name != "odd" or number % 3):
                if self.low:
                    self.low[name].grad = grad.bfloat16()
                else:
                    master.grad = grad
        self.optimizer.step(1e-2 / (1 + number), scale)
        for weight in self.low.values():
            weight.grad = None


@pytest.fixture
def passes(monkeypatch):
    """How often an update was one pass, or was left to torch."""
    found = []

    def watched(*args):
        found.append(one_pass.in_one_pass(*args))
        return found[-1]

    monkeypatch.setattr(optimizer, "in_one_pass", watched)
    return found


def agree(one, other):
    state = one.optimizer.state()
    assert set(state) == set(other.optimizer.state())
    for name, master in one.masters.items():
        torch.testing.assert_close(master, other.masters[name], rtol=1e-6, atol=1e-7)
        if one.low:
            assert one.low[name].equal(master.bfloat16())
            assert one.low[name].dtype == torch.bfloat16
    for key, value in other.optimizer.state().items():
        assert state[key].dtype == value.dtype
        torch.testing.assert_close(state[key], value, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("low", [True, False], ids=["bf16", "fp32"])
def test_fifty_steps_are_torchs(low, kind, monkeypatch, passes):
    shapes = SHAPES | {"blocks.0.cores.0.out.weight": (8, 8)}
    rules = RULES | {"blocks.0.cores.0.out.weight": ParamRule(decay=True)}
    both = [Trained(low, shapes, rules, optimizer=kind) for _ in WAYS]
    for number in range(50):
        for way, one in zip(WAYS, both, strict=True):
            monkeypatch.setenv("TWOAXIS_BACKEND", way)
            one.step(number)
    agree(*both)
    assert passes.count(True) == 50
    assert passes.count(False) == (150 if kind == "muon" else 50)
    assert not any(key.startswith("never/") for key in both[0].optimizer.state())
    assert both[0].optimizer.state()["odd/step"] == 33


def test_each_goes_on_from_the_others_state(monkeypatch, passes):
    mixed, torchs = Trained(), Trained()
    for number in range(12):
        monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
        torchs.step(number)
        monkeypatch.setenv("TWOAXIS_BACKEND", WAYS[number // 3 % 2])
        if number % 6 == 3:  # by way of what a checkpoint has
            saved, masters = mixed.optimizer.state(), mixed.masters
            mixed = Trained()
            mixed.optimizer.load_state({key: value.clone() for key, value in saved.items()})
            with torch.no_grad():
                for name, master in masters.items():
                    mixed.masters[name].copy_(master)
                    mixed.low[name].copy_(master)
        mixed.step(number)
    assert passes.count(True) == 6
    agree(mixed, torchs)


def test_what_does_not_lie_side_by_side_goes_torchs_way(monkeypatch, passes):
    both = [Trained() for _ in WAYS]
    for one in both:
        table = one.masters["table"]
        table.data = table.detach().T.contiguous().T
    for number in range(5):
        for way, one in zip(WAYS, both, strict=True):
            monkeypatch.setenv("TWOAXIS_BACKEND", way)
            one.step(number)
    assert passes == [False] * 10
    agree(*both)


def test_torchs_step_is_kept_where_one_pass_gains_nothing(passes):
    Trained(low=False).step(0, scale=1.0)
    assert passes == []


def test_a_sum_in_float32_goes_before_what_backward_left():
    """A gradient at the master and one at its weight are added."""
    one, other = Trained(), Trained()
    for trained, split in ((one, True), (other, False)):
        for name, master in trained.masters.items():
            first, second = numbers(master.shape, 7), numbers(master.shape, 8).bfloat16()
            master.grad = first if split else first + second
            trained.low[name].grad = second if split else None
        trained.optimizer.step(1e-2, 0.5)
    agree(one, other)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_is_that_of_torchs_way(accumulation, tiny, text, monkeypatch):
    cfg = tiny(
        {"dropout": 0.0, "tie_embeddings": True}, precision="bf16_master", accumulation=accumulation,
        batch_size=2 // accumulation, grad_clip=0.5, lr=1e-4,
    )  # fmt: skip
    tokens = tokenize(load_corpus(text).train, load_tokenizer("byte"))
    update, dtypes = adamw.update, []

    def watched(lib, parts, *rest):
        dtypes.append({part.grad.dtype for part in parts})
        return update(lib, parts, *rest)

    monkeypatch.setattr(adamw, "update", watched)
    with isolated(cfg.seed):
        ours = Session(cfg, tokens)
    with isolated(cfg.seed):
        theirs = Session(cfg, tokens)
    rows = [ours.step() for _ in range(3)]
    assert dtypes == [{torch.bfloat16 if accumulation == 1 else torch.float32}] * 3
    monkeypatch.setattr(optimizer, "in_one_pass", lambda *_: False)
    for row in rows:
        again = theirs.step()
        assert row["grad_norm"] == pytest.approx(again["grad_norm"], rel=1e-5)
        assert row["loss"] == pytest.approx(again["loss"], rel=1e-5)
        assert row["grad_norm"] > cfg.grad_clip
    assert len(dtypes) == 3
    for name, weight in ours.model.named_parameters():
        master = ours.master.named[name]
        torch.testing.assert_close(master, theirs.master.named[name], rtol=1e-4, atol=1e-6)
        assert weight.equal(master.bfloat16())
    assert all(p.grad is None for p in ours.master.named.values()) == (accumulation == 1)
