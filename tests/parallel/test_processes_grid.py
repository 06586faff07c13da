"""Data parallel, sharded, tensor parallel, and each with a pipeline: gradients, norms and steps equal one process.

The process that runs the tests computes the same configuration alone: as many micro-batches, one after another.
"""

import pytest
import torch

from configurations import depths
from parallel.grid import descended
from twoaxis import methods

CLOSE = {"float64": {"rtol": 1e-10, "atol": 1e-12}, "float32": {"rtol": 1e-5, "atol": 1e-6}}
DDP, FSDP = {"data_parallel": 2}, {"data_parallel": 2, "sharding": "fsdp"}
INTERLEAVED = {"pipeline": 2, "pipeline_virtual": 2, "pipeline_schedule": "interleaved"}


def full(*case):
    """A case of the full tier; the default cases cover what it shows pairwise."""
    return pytest.param(*case, marks=pytest.mark.full)


def equal(world, size, depth, options, *, dtype="float64", alone=None, close=None, **more):
    """Run on `size` processes and on this one (with the options `alone` besides), and hold one to the other."""
    answers = world(size).run("grid.descended", depth, options, dtype=dtype, **more)
    told, expected = descended(depth, options | (alone or {}), dtype=dtype, **more)
    close = close or CLOSE[dtype]
    for found, _ in answers:
        for ours, theirs in zip(found, told, strict=True):
            assert ours == pytest.approx(theirs, rel=close["rtol"])
    whole = answers[0][1]
    assert whole.keys() == expected.keys()
    assert all(whole is None for _, whole in answers[1:])
    for name, tensor in expected.items():
        torch.testing.assert_close(whole[name], tensor, **close, msg=lambda m, n=name: f"{n}: {m}")


# 2 processes with batch b equal one with batch 2b: rows are dealt in one order, losses divided by all targets
@pytest.mark.parametrize(
    ("depth", "options"),
    [
        ("attnres", DDP),
        ("hyper_connections", FSDP),  # has parameters of one number, which stay whole
        ("depth_window", FSDP),  # shares modules over blocks
        full("hyper_connections", DDP),
        full("depth_window", DDP),
    ],
    ids=str,
)
def test_rows_over_two_processes(world, depth, options):
    equal(world, 2, depth, options, alone={"data_parallel": 1, "batch_size": 4})


@pytest.mark.parametrize(
    ("depth", "options"),
    [
        ("denseformer", DDP | {"pipeline": 2}),
        ("hyper_connections", FSDP | INTERLEAVED),
        ("denseformer", FSDP | {"pipeline": 2}),  # pushes sums, with weights of later blocks
        full("attnres", FSDP | INTERLEAVED),
        full("depth_window", DDP | INTERLEAVED),
        full("residual_scalars", FSDP | {"pipeline": 2, "pipeline_schedule": "gpipe"}),
    ],
    ids=str,
)
def test_rows_and_a_pipeline(world, depth, options):
    equal(world, 4, depth, options)


# embeddings, final norm and head in shares: a tied table is on the first and the last process, counted once
@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        {"fields": {"tie_embeddings": True}},
        {"fields": {"tie_embeddings": False}},
        {"fields": {"history": "recompute"}},
        {"checkpointing": True},
    ],
    ids=str,
)
def test_the_ends_of_a_pipeline_in_shares(world, more):
    equal(world, 4, "attnres", FSDP | {"pipeline": 2}, **more)


@pytest.mark.parametrize(
    ("depth", "options"),
    [
        ("denseformer", FSDP),
        full("additive", FSDP),
        full("additive", DDP),
        full("additive", DDP | {"pipeline": 2}),
    ],
    ids=str,
)
def test_float32(world, depth, options):
    equal(world, 2 * options.get("pipeline", 1), depth, options, dtype="float32")


@pytest.mark.full
@pytest.mark.parametrize("options", [DDP, FSDP], ids=str)
@pytest.mark.parametrize("depth", depths())
def test_every_method_over_rows(world, depth, options):
    equal(world, 2, depth, options)


@pytest.mark.full
@pytest.mark.parametrize("options", [DDP, FSDP], ids=str)
@pytest.mark.parametrize("depth", methods("depth"))
def test_every_method_over_rows_and_a_pipeline(world, depth, options):
    equal(world, 4, depth, options | {"pipeline": 2})


@pytest.mark.parametrize(
    ("depth", "more"),
    [
        ("attnres", {"checkpointing": True}),
        ("attnres", {"fields": {"history": "recompute"}}),
        ("denseformer", {"fields": {"history": "int8"}}),
        ("additive", {"fields": {"tie_embeddings": False}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_what_is_kept_for_backward_changes_nothing(world, depth, more, options):
    equal(world, 2, depth, options, **more)


# bfloat16 weights with float32 masters are FSDP's mixed precision
@pytest.mark.parametrize("options", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_bfloat16_with_float32_masters(world, options):
    close = {"rtol": 0.03, "atol": 2e-3}
    equal(world, 2, "attnres", options | {"precision": "bf16_master"}, dtype="float32", steps=1, close=close)


MUON = {"optimizer": "muon"}


# matrices are orthogonalised whole, of rows that shares divide unevenly and of heads
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, FSDP),
        (2, {"tensor_parallel": 2}),
        full(4, FSDP | {"tensor_parallel": 2}),
        full(4, FSDP | {"pipeline": 2}),
    ],
    ids=str,
)
def test_muon_over_shares(world, size, options):
    equal(world, size, "attnres", options | MUON, fields={"d_model": 12, "n_heads": 2})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (FSDP | {"compile": True}, "not supported together"),
        (DDP | {"pipeline": 2}, "start as many, or give sizes"),
    ],
    ids=["compile", "grid"],
)
def test_what_does_not_fit_is_refused_on_every_process(world, options, said):
    for answer in world(2).run("grid.refused", "additive", options):
        assert said in answer
        assert len(answer.splitlines()) == 1


TP = {"tensor_parallel": 2}
GROUPED = {"d_model": 16, "n_heads": 4, "n_kv_heads": 2, "qk_norm": True}


@pytest.mark.parametrize(
    ("depth", "sequence"),
    [
        ("denseformer", "standard"),
        ("muddformer", "standard"),  # separate inputs for q, k, v
        ("lime", "standard"),  # reaches inside attention, which stays whole
        full("ddl", "standard"),
        full("hybrid", "standard"),
    ],
)
def test_heads_and_widths_over_two_processes(world, depth, sequence):
    equal(world, 2, depth, TP, sequence=sequence, fields=GROUPED)


def test_what_belongs_to_a_head_is_divided_with_it(world):
    blocks = ["short_swa(window=3, position='bias', sink=True, value='key')", "parallel(attention, mlp)"]
    blocks += ["mlp(act='gelu')", "short_conv", "attention(q='canon')"]
    equal(world, 2, "additive", TP, fields={"sequence": blocks})


@pytest.mark.parametrize(
    ("depth", "options"),
    [
        ("attnres", TP | FSDP),
        ("depth_window", TP | {"pipeline": 2}),
        full("attnres", TP | DDP),
        full("denseformer", TP | INTERLEAVED),
    ],
    ids=str,
)
def test_heads_with_rows_or_a_pipeline(world, depth, options):
    equal(world, 4, depth, options, fields={"qk_norm": True})


@pytest.mark.full
@pytest.mark.parametrize("depth", depths())
def test_every_method_over_heads(world, depth):
    equal(world, 2, depth, TP, fields={"qk_norm": True})


def test_heads_that_do_not_divide_are_refused(world):
    for said in world(2).run("grid.refused", "additive", TP | {"fields": {"n_heads": 3}}):
        assert said == "tensor_parallel=2: blocks.0.cores.0 has 3 heads, which 2 does not divide"
