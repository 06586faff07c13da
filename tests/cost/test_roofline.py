"""The roofline against arithmetic by hand: limits, launches, stages, slices, memory."""

import dataclasses

import pytest

from twoaxis.cost import cost
from twoaxis.cost.fit import memory
from twoaxis.cost.hardware import Hardware, hardware
from twoaxis.cost.load import Load
from twoaxis.cost.mesh import Mesh
from twoaxis.cost.roofline import predict, tape_of, times
from twoaxis.cost.sizes import size, with_methods
from twoaxis.cost.works import Work, works
from twoaxis.errors import InputError

MACHINE = Hardware(
    name="toy",
    matrix_tflops={"float32": 1e-6},  # a million FLOPs a second
    memory_gb_per_s=1e-6,  # a thousand bytes a second
    memory_gb=1e9,
    link_gb_per_s=1e9,
    launch_us=1e6,  # a second each
)
SMALL = dataclasses.replace(size("tiny").model, n_blocks=4, d_model=32)
LOAD = Load(seq_len=24, dtype="float32", micro_batches=3, execution="eager")
FAST = dataclasses.replace(MACHINE, launch_us=None)


def test_a_kernel_takes_what_limits_it():
    work = [
        Work("mlp", True, 3e6, 1000, 1),  # 3 s of arithmetic, 1 s of memory
        Work("depth", False, 9e6, 2000, 1),  # not on matrix units: 2 s of memory
    ]
    found = times(work, MACHINE, "float32")
    assert (found.arithmetic, found.memory, found.launch, found.launches) == (3.0, 2.0, 2.0, 2)


@pytest.mark.parametrize(("asynchronous", "seconds"), [(True, 5.0), (False, 7.0)], ids=["gpu", "cpu"])
def test_launches_hide_behind_the_device_only_where_it_runs_apart(asynchronous, seconds):
    found = times([Work("mlp", False, 0, 5000, 2)], MACHINE, "float32")
    assert found.on(dataclasses.replace(MACHINE, asynchronous=asynchronous)) == seconds


def test_many_launches_set_the_time_of_an_asynchronous_device():
    found = times([Work("mlp", False, 0, 1000, 30)], MACHINE, "float32")
    assert found.on(MACHINE) == 30.0


@pytest.mark.parametrize("execution", ["eager", "fused"])
@pytest.mark.parametrize("depth", ["additive", "attnres", "ddl", "muddformer"])
def test_works_have_the_flops_bytes_and_launches_of_the_cost(execution, depth):
    model = with_methods(SMALL, depth)
    forward, backward = works(tape_of(model, LOAD), execution)
    total = cost(model, 1, 24)
    assert sum(w.flops for w in forward) == total.flops_forward
    assert sum(w.flops for w in backward) == total.flops_backward
    eager = execution == "eager"
    moved = (
        (total.bytes_eager_forward, total.bytes_eager_backward)
        if eager
        else (total.bytes_forward, total.bytes_backward)
    )
    launched = (
        (total.launches_forward, total.launches_backward)
        if eager
        else (total.launches_fused_forward, total.launches_fused_backward)
    )
    assert (sum(w.nbytes for w in forward), sum(w.nbytes for w in backward)) == moved
    assert (sum(w.launches for w in forward), sum(w.launches for w in backward)) == launched


def test_attention_has_one_exponential_for_each_visible_pair_and_head():
    model, t = dataclasses.replace(SMALL, n_blocks=1), 24
    (work,) = [w for w in works(tape_of(model, LOAD), "eager")[0] if w.part == "attention" and w.exponentials]
    assert work.exponentials == model.n_heads * t * (t + 1) / 2


def test_a_pipeline_waits_p_minus_1_stages_of_a_step():
    one, four = predict(SMALL, FAST, LOAD), predict(SMALL, FAST, LOAD, Mesh(pp=4))
    assert (one.bubble, one.sent_bytes) == (0.0, 0)
    assert four.bubble == pytest.approx(3 / (3 + LOAD.micro_batches), rel=1e-6)
    assert four.sent_bytes == 24 * 32 * 4
    assert four.device == pytest.approx(one.device / 4)
    many = predict(SMALL, FAST, dataclasses.replace(LOAD, micro_batches=10**12), Mesh(pp=4))
    assert 0 < many.bubble < 1e-11


def test_slow_links_bound_a_pipeline_of_a_history_before_one_of_a_stream():
    slow = dataclasses.replace(FAST, link_gb_per_s=1e-7, matrix_tflops={"float32": 1.0}, memory_gb_per_s=1.0)
    stream, history = (
        predict(with_methods(SMALL, d), slow, LOAD, Mesh(pp=4)) for d in ("additive", "attnres")
    )
    assert history.sent_bytes > stream.sent_bytes
    assert history.bound == "sending"
    assert history.seconds > stream.seconds


def test_slices_of_products_halve_the_work_and_add_all_reduces():
    wired = dataclasses.replace(FAST, link_gb_per_s=1e-6)  # a thousand bytes a second
    one, two = predict(SMALL, wired, LOAD), predict(SMALL, wired, LOAD, Mesh(tp=2))
    assert two.device == pytest.approx(one.device / 2)
    sublayers, sent = 8, 24 * 32 * 4
    assert two.tensor == pytest.approx(2 * sublayers * sent / 1000)  # forward and backward, 2 (P - 1) / P = 1


def test_a_window_sends_its_halo_where_attention_sends_the_rest():
    wired = dataclasses.replace(FAST, link_gb_per_s=1e-6)
    full = predict(SMALL, wired, LOAD, Mesh(cp=2))
    local = predict(
        dataclasses.replace(SMALL, sequence=["short_swa(window=4)", "mlp"]), wired, LOAD, Mesh(cp=2)
    )
    row = 2 * 32 * 4  # key and value of a token
    assert full.sequence == pytest.approx(2 * 4 * 12 * row / 1000)
    assert local.sequence == pytest.approx(2 * 4 * 3 * row / 1000)


def test_recomputing_blocks_adds_a_forward_pass():
    plain, again = (predict(SMALL, FAST, dataclasses.replace(LOAD, checkpointing=c)) for c in (False, True))
    ahead = times(works(tape_of(SMALL, LOAD), "eager")[0], FAST, "float32")
    assert again.device - plain.device == pytest.approx(ahead.device)


def test_decoding_passes_every_stage_in_turn():
    load = dataclasses.replace(LOAD, decoding=True)
    one, four = predict(SMALL, FAST, load), predict(SMALL, FAST, load, Mesh(pp=4))
    assert four.seconds == pytest.approx(one.seconds, rel=1e-6)
    assert one.launches < predict(SMALL, FAST, LOAD).launches


def test_parts_of_the_context_each_read_all_weights_in_decoding():
    """Four parts hold a quarter of the keys each: more than a quarter of the time is left, less than all."""
    model, machine = size("llama-1b").model, hardware("h100")
    for length, least, most in ((128, 0.95, 1.0), (131072, 0.25, 0.6)):
        load = Load(batch_size=1, seq_len=length, dtype="bfloat16", decoding=True)
        one, four = (predict(model, machine, load, Mesh(cp=cp)).device for cp in (1, 4))
        assert least < four / one < most


def test_sending_over_an_unknown_link_is_refused_in_one_line():
    lonely = dataclasses.replace(FAST, link_gb_per_s=None)
    with pytest.raises(InputError, match="no known bandwidth among 2 devices"):
        predict(SMALL, lonely, LOAD, Mesh(tp=2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_memory_is_16_bytes_a_weight_and_what_the_cost_saves(dtype):
    load = dataclasses.replace(LOAD, dtype=dtype)
    total = cost(SMALL, 1, 24, dtype=dtype)
    found = memory(tape_of(SMALL, load), load, Mesh(), total.parameters, total.decode_state_bytes)
    assert found.model == 16 * total.parameters
    assert found.activations == total.saved_bytes
    assert found.checkpointed == total.saved_bytes_checkpointed + total.recomputed_bytes
    assert found.checkpointed < found.activations


def test_memory_is_split_by_the_mesh():
    load, total = LOAD, cost(SMALL, 1, 24)
    parts = (tape_of(SMALL, load), load)
    spread = memory(*parts, Mesh(tp=2, pp=2, dp=4), total.parameters, 0)
    assert spread.model == total.parameters / 4 * (8 + 8 / 4)
    assert spread.activations < total.saved_bytes


def test_a_faster_machine_is_faster():
    model, load = size("small").model, Load(seq_len=1024)
    old, new = (predict(model, hardware(name), load).seconds for name in ("a100", "h100"))
    assert new < old
