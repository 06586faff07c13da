import gc

import pytest
import torch

from twoaxis import Decoder, ModelConfig, methods
from twoaxis.data import Batch, load_corpus, load_tokenizer, tokenize
from twoaxis.errors import InputError
from twoaxis.train import TrainConfig
from twoaxis.train.precision import Master, computing_in
from twoaxis.train.session import Session, accumulate

PRECISIONS = ["float32", "autocast", "bf16_master"]


def model_of(depth="additive", **fields):
    torch.manual_seed(0)
    return Decoder(
        ModelConfig(**{"vocab_size": 20, "d_model": 16, "n_blocks": 2, "n_heads": 2, "depth": depth} | fields)
    )


def batch_of(*lengths, width=None):
    """One row per length: that many targets, then padding."""
    width = width or max(lengths)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 20, (len(lengths), width + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row, length in enumerate(lengths):
        targets[row, length:] = -100
    return Batch(tokens[:, :-1], targets, None)


def gradients(model, batches, precision="float32"):
    master = Master(model, precision)
    loss, targets, _ = accumulate(model, master, batches, precision)
    found = {name: p.grad.clone() for name, p in master.named.items()}
    return loss, targets, found


def session_of(text, cfg):
    return Session(cfg, tokenize(load_corpus(text).train, load_tokenizer("byte")))


# pitfalls, Loss: "samples of 11 and 101 tokens: batch 2 x accumulation 1 against batch 1 x accumulation 2
# -> same gradient and same logged loss"
def test_the_loss_is_the_mean_over_all_targets_of_all_micro_batches():
    whole = batch_of(11, 101)
    rows = [Batch(whole.tokens[i : i + 1], whole.targets[i : i + 1], None) for i in (0, 1)]
    once = gradients(model_of().double(), [whole])
    twice = gradients(model_of().double(), rows)
    assert once[1] == twice[1] == 112
    assert once[0] == pytest.approx(twice[0], rel=1e-12)
    for name in once[2]:
        torch.testing.assert_close(once[2][name], twice[2][name], rtol=1e-9, atol=1e-13)
    mean_of_means = sum(gradients(model_of().double(), [row])[0] for row in rows) / 2
    assert abs(mean_of_means - once[0]) > 1e-4  # the mistake would show


# pitfalls, Loss: "a batch whose labels are all ignored; also an empty batch -> loss 0, gradients 0, step
# counted and reported; every loss variant behaves the same"
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", ["ignored", "empty", "both"])
def test_without_targets_the_loss_and_every_gradient_are_zero(case, precision):
    empty = Batch(torch.zeros(0, 7, dtype=torch.int64), torch.zeros(0, 7, dtype=torch.int64), None)
    batches = {"ignored": [batch_of(0, 0, width=7)], "empty": [empty], "both": [empty, batch_of(0, width=7)]}[
        case
    ]
    loss, targets, found = gradients(model_of(), batches, precision)
    assert (loss, targets) == (0, 0)
    assert all(not grad.any() for grad in found.values())


def test_an_ignored_micro_batch_changes_nothing():
    with_it = gradients(model_of().double(), [batch_of(5, 8), batch_of(0, width=8)])
    without = gradients(model_of().double(), [batch_of(5, 8)])
    assert with_it[:2] == without[:2]
    assert all(torch.equal(with_it[2][name], without[2][name]) for name in without[2])


def test_a_step_without_targets_is_counted_and_reported(text, tiny):
    session = session_of(text, tiny())
    session.loader = iter([batch_of(0, 0, width=12), batch_of(12, 12)])
    row = session.step()
    assert (row["step"], row["targets"], row["loss"], row["grad_norm"]) == (1, 0, 0, 0)
    assert row["tokens"] == 24
    row = session.step()
    assert (row["step"], row["targets"]) == (2, 24)
    assert row["loss"] > 1


@pytest.mark.parametrize("depth", sorted(methods("depth")))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_precision_keeps_its_dtypes(depth, precision):
    model = model_of(depth)
    master = Master(model, precision)
    loss, *_ = accumulate(model, master, [batch_of(6, 6), batch_of(3, 6)], precision)
    assert 2 < loss < 4
    wanted = torch.bfloat16 if precision == "bf16_master" else torch.float32
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert {p.dtype for p in master.named.values()} == {torch.float32}
    assert {p.grad.dtype for p in master.named.values() if p.grad is not None} == {torch.float32}
    with computing_in(precision, torch.device("cpu")):
        states = model(batch_of(6).tokens, return_states=True)[1]
    leaves = torch.utils._pytree.tree_leaves([states["block.0"], states["block.2"]])
    assert {leaf.dtype for leaf in leaves} == {torch.float32}  # the state's dtype survives autocast


def test_bf16_masters_gain_what_bfloat16_would_lose(text, tiny):
    session = session_of(text, tiny(precision="bf16_master", lr=1e-5, warmup_steps=0))
    before = {name: p.detach().clone() for name, p in session.master.named.items()}
    session.step()
    gain = session.master.named["stream.norm.weight"] - before["stream.norm.weight"]
    assert (gain.abs() > 0).all()
    assert torch.equal(
        session.model.stream.norm.weight.float(), before["stream.norm.weight"]
    )  # ones: 1e-5 is rounded away
    for name, weight in session.model.named_parameters():
        assert torch.equal(weight, session.master.named[name].bfloat16())


def test_gradients_of_micro_batches_add_up_in_float32():
    batches = [batch_of(length, width=9) for length in (9, 7, 5, 3)]
    exact = gradients(model_of(), batches)[2]["embedding.weight"]
    found = gradients(model_of(), batches, "bf16_master")[2]["embedding.weight"]
    assert not torch.equal(found, found.bfloat16().float())  # a sum in bfloat16 would be bfloat16 numbers
    assert (found - exact).norm() < 0.05 * exact.norm()


def live_tensors():
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    in_graphs = sum(t.grad_fn is not None for t in tensors)
    return {"all": len(tensors), "in graphs": in_graphs, "bytes": sum(t.nbytes for t in tensors)}


# pitfalls, Depth states: "20 training steps with depth-state statistics and loss history switched on; count
# live graph tensors -> memory after step 20 equals memory after step 2; anything kept across steps is
# detached"
@pytest.mark.parametrize(
    "run", [{}, {"precision": "bf16_master", "accumulation": 2, "checkpointing": True}], ids=str
)
@pytest.mark.usefixtures("forgetful")
def test_steps_leave_nothing_behind(run, text, tiny):
    session = session_of(text, tiny(model={"depth": "attnres"}, steps=100, **run))
    history = [session.step() for _ in range(2)]
    early = live_tensors()
    history += [session.step() for _ in range(18)]
    late = live_tensors()
    assert late == early
    assert late["in graphs"] == 0
    assert all(isinstance(value, int | float) for row in history for value in row.values())


@pytest.mark.parametrize("depth", ["additive", "attnres"])
def test_checkpointing_changes_no_gradient(depth, text, tiny):
    rows = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        session = session_of(text, tiny(model={"depth": depth}, checkpointing=checkpointing))  # dropout is on
        torch.manual_seed(4)
        row = session.step()
        rows.append((row["loss"], row["grad_norm"]))
    assert rows[0] == pytest.approx(rows[1], rel=1e-6)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch older than 2.13")
@pytest.mark.parametrize("depth", ["additive", "dynamic_window"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_chunked_loss_gives_the_same_gradients(precision, depth):
    """With a term of the method's own too; bfloat16 logits are rounded, chunked ones are not."""
    batches = [batch_of(6, 6), batch_of(3, 6)]
    found = []
    for chunked in (False, True):
        model = model_of(depth)
        master = Master(model, precision)
        loss, _, terms = accumulate(model, master, batches, precision, 0.5, chunked=chunked)
        found.append((loss, terms, {n: p.grad for n, p in master.named.items() if p.grad is not None}))
    exact = {} if precision == "float32" else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(found[1], found[0], **exact)


@pytest.mark.parametrize("field", ["pipeline", "data_parallel", "tensor_parallel"])
def test_several_processes_have_no_chunked_loss(field):
    with pytest.raises(InputError, match=r"chunked_loss=True.*allowed is False over several processes"):
        TrainConfig(**{field: 2}, accumulation=2, chunked_loss=True)
