"""The dry run against a real run: weights, gradients, optimiser; presets, meshes, refusals."""

import dataclasses
import json

import pytest
import torch

from twoaxis.cli.main import main
from twoaxis.cost import cost
from twoaxis.cost.hardware import hardware
from twoaxis.cost.mesh import Mesh
from twoaxis.cost.sizes import size
from twoaxis.data import load_corpus, load_tokenizer, tokenize
from twoaxis.errors import InputError
from twoaxis.model import Decoder, ModelConfig
from twoaxis.ops.native import adamw
from twoaxis.train import TrainConfig
from twoaxis.train.dry_run import dry_run
from twoaxis.train.optimizer import Optimizer
from twoaxis.train.precision import Master
from twoaxis.train.session import Session

SMALL = ModelConfig(vocab_size=37, d_model=24, n_blocks=4, n_heads=2, depth="ddl")


def config(model=SMALL, **options):
    return TrainConfig(model=model, **{"seq_len": 5, "batch_size": 2, "device": "cpu", **options})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bf16_master"])
def test_what_is_trained_is_what_a_step_allocates(optimizer, precision):
    cfg = config(optimizer=optimizer, precision=precision)
    (needs,) = dry_run(cfg).ranks
    model = Decoder(cfg.model)
    rules = model.param_rules()
    master = Master(model, precision)
    trained = Optimizer(master.named, rules, cfg)
    tensors = {id(p): p for p in (*model.parameters(), *master.named.values())}.values()
    for p in tensors:
        p.grad = torch.zeros_like(p)
    trained.step(1e-3)
    assert needs.parameters == sum(p.numel() for p in model.parameters()) == cost(cfg.model, 2, 5).parameters
    assert needs.weights == sum(p.nbytes for p in tensors)
    assert needs.gradients == sum(p.grad.nbytes for p in tensors)
    assert needs.optimizer == sum(t.nbytes for t in trained.state().values())


@pytest.mark.parametrize("depth", ["ddl", "attnres", "hyper_connections"])
def test_one_process_keeps_what_the_cost_says(depth):
    model = dataclasses.replace(SMALL, depth=depth)
    (needs,) = dry_run(config(model, accumulation=3)).ranks
    total = cost(model, 2, 5)
    assert needs.activations + needs.state == total.saved_bytes - 8  # training knows the number of targets
    (again,) = dry_run(config(model, checkpointing=True)).ranks
    assert again.activations + again.state == total.saved_bytes_checkpointed - 8
    assert again.recomputed == total.recomputed_bytes
    assert (needs.live, needs.sent) == (1, {"pipeline": 0, "tensor": 0, "data": 0})


def test_what_waits_on_the_host_is_not_on_the_device():
    plain, host, cores = (dry_run(config(saved=way)).ranks[0] for way in ("all", "host", "cores"))
    assert host.activations + host.state < 0.1 * (plain.activations + plain.state)
    assert host.host > 0.9 * (plain.activations + plain.state)
    assert 0 < host.recomputed < host.host / 2
    assert cores.activations + cores.state < plain.activations + plain.state
    assert plain.host == cores.host == 0


def test_slices_and_copies_divide_what_they_should():
    one = dry_run(config()).ranks[0]
    two = dry_run(config(), Mesh(tp=2, dp=4)).ranks[0]
    block = 4 * (24 * 72 + 24 * 24 + 3 * 24 * 64)  # products of attention and MLP in 4 blocks
    assert one.parameters - two.parameters == block // 2
    assert two.activations < one.activations
    assert two.nbytes(True) - two.gathered == two.shared.nbytes + two.activations + two.state
    assert two.shared.nbytes == pytest.approx(
        (two.weights + two.gradients + two.optimizer) / 4, rel=0.1
    )  # rows round up
    tokens = 2 * 5 * 24 * 4
    assert two.sent == {"pipeline": 0, "tensor": 2 * 8 * tokens, "data": 2 * 3 * 4 * two.parameters // 4}


# without a pipeline FSDP sums gradients with the last micro-batch; until then each process has all of them
def test_gradients_wait_whole_for_the_last_micro_batch():
    one, four = (dry_run(config(accumulation=n), Mesh(dp=4)).ranks[0] for n in (1, 4))
    assert four.nbytes(True) - one.nbytes(True) == four.pending == four.gradients


def test_one_copy_has_no_shares():
    for needs in dry_run(config(accumulation=4, pipeline=2)).ranks + dry_run(config(accumulation=4)).ranks:
        assert needs.nbytes(True) == needs.nbytes(False)


def test_it_fits_where_its_bytes_do(capsys):
    flags = [*FLAGS, "--mesh", "dp=4", "--json"]
    assert main(flags) == 0
    needed = json.loads(capsys.readouterr().out)["peak_bytes"]
    assert needed["sharded"] < needed["whole"]
    for way, room, fits in (("whole", 1.001, True), ("whole", 0.999, False), ("sharded", 0.999, False)):
        assert main([*flags, "--memory-gb", str(room * needed[way] / 1e9)]) == 0
        told = json.loads(capsys.readouterr().out)["fits"]
        assert told[way] is fits
        assert told["whole"] <= told["sharded"]


PRESETS = [("llama-1b", "additive", 1.24e9), ("llama-8b", "attnres(block_sublayers=8)", 8.03e9)]
BIG = pytest.param("llama-70b", "ddl(value_dim=2)", 70.6e9, marks=pytest.mark.full)


@pytest.mark.parametrize(("name", "depth", "numbers"), [*PRESETS, BIG])
def test_presets_are_planned_without_their_weights(name, depth, numbers):
    model = dataclasses.replace(size(name).model, depth=depth, state_dtype="bfloat16")
    cfg = config(model, seq_len=512, batch_size=1, precision="bf16_master", accumulation=8)
    cfg = dataclasses.replace(cfg, pipeline=4, pipeline_virtual=2, pipeline_schedule="interleaved")
    found = dry_run(cfg, Mesh(dp=8, tp=4), hardware("h100"))
    ends = 2 if model.tie_embeddings else 1  # a tied table is on the first and the last rank
    whole = dry_run(cfg).ranks
    table = model.vocab_size * model.d_model
    assert sum(r.parameters for r in whole) == pytest.approx(numbers + (ends - 1) * table, rel=0.01)
    assert [r.live for r in found.ranks] == [11, 9, 7, 5]
    assert found.peak(sharded=True) < found.peak(sharded=False)
    assert 0 < found.line.bubble < 0.5


FLAGS = ["train", "--dry-run", "--size", "1b", "--seq-len", "256", "--batch-size", "1", "--accumulation", "4"]


def test_the_command_says_what_fits_where(capsys):
    mesh = ["--mesh", "dp=4,tp=2,pp=2", "--hardware", "h100", "--precision", "bf16_master"]
    assert main([*FLAGS, *mesh, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["mesh"] == {"dp": 4, "tp": 2, "pp": 2, "cp": 1}
    assert told["memory_bytes"] == 80e9
    assert told["fits"] == {"whole": True, "sharded": True}
    first = told["ranks"][0]
    assert first["live"] == 2
    trained = ("weights", "gradients", "optimizer", "activations", "state", "recomputed")
    assert first["bytes"]["whole"] == sum(first[part] for part in trained)
    assert main([*FLAGS, *mesh]) == 0
    text = capsys.readouterr().out
    assert "16 processes" in text
    assert "fits" in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mesh", "pp=2,tp=3"], "tp=3 does not divide n_heads=32"),
        (["--mesh", "pp=2", "--pipeline", "4"], "--pipeline 4"),
        (["--size", "2b"], "1b, 8b, 70b"),
        (["--precision", "autocast"], "autocast"),
        (["--chunked-loss"], "no --chunked-loss"),
        (["--memory-gb", "-1"], "above 0"),
        (["--mesh", "tp=2", "--compile"], "compile with tensor_parallel=2"),
        (["--mesh", "pp=2", "--dropout", "0.1"], "dropout=0.1"),
        (["--pipeline-plan", "--pipeline", "2"], "give one of them"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_cannot_be_counted_is_refused_in_one_line(flags, said, capsys):
    assert main([*FLAGS, *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") <= 2


@pytest.mark.parametrize("flags", [["--out", "nowhere"], ["--pipeline-plan", "--pipeline", "2"]], ids="".join)
def test_a_mesh_without_a_dry_run_is_refused(flags, capsys):
    assert main(["train", "--mesh", "dp=2", *flags]) == 2
    assert "--mesh" in capsys.readouterr().err


def test_a_network_that_runs_again_is_not_counted():
    with pytest.raises(InputError, match="history='recompute'"):
        dry_run(config(dataclasses.replace(SMALL, depth="attnres", history="recompute")))


def test_a_rounded_history_is_counted_as_it_is_kept():
    model = dataclasses.replace(SMALL, depth="attnres", history="int8")
    (needs,) = dry_run(config(model)).ranks
    assert needs.activations + needs.state == cost(model, 2, 5).saved_bytes - 8


@pytest.mark.parametrize(("accumulation", "share"), [(1, 3), (2, 1)], ids=["one micro-batch", "two"])
def test_gradients_of_bf16_master_at_their_peak(accumulation, share, tiny, text, monkeypatch):
    """In bfloat16 beside their sums in float32; of one micro-batch the count is an upper bound, and says so."""
    cfg = tiny(precision="bf16_master", accumulation=accumulation, batch_size=2 // accumulation)
    session, seen = Session(cfg, tokenize(load_corpus(text).train, load_tokenizer("byte"))), []

    def looking(method):
        def run(*args, **kwargs):
            tensors = (*session.model.parameters(), *session.master.named.values())
            seen.append(sum(p.grad.nbytes for p in tensors if p.grad is not None))
            return method(*args, **kwargs)

        return run

    monkeypatch.setattr(Master, "collect", looking(Master.collect))
    monkeypatch.setattr(Optimizer, "step", looking(Optimizer.step))
    session.step()
    (needs,) = dry_run(cfg).ranks
    assert max(seen) <= needs.gradients
    if adamw.library(list(session.master.named.values())) is not None:
        assert max(seen) * share == needs.gradients


@pytest.mark.parametrize("accumulation", ["1", "2"])
def test_the_command_says_where_gradients_are_at_most(accumulation, capsys):
    flags = ["--size", "1b", "--seq-len", "256", "--batch-size", "1", "--precision", "bf16_master"]
    assert main(["train", "--dry-run", *flags, "--accumulation", accumulation]) == 0
    assert ("gradients: at most" in capsys.readouterr().out) == (accumulation == "1")
