"""`twoaxis verify`: tables, JSON and exit codes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from twoaxis import ModelConfig
from twoaxis.cli.main import main
from twoaxis.ops import choice
from twoaxis.verify import backends, duality
from twoaxis.verify.cost import SMALL
from twoaxis.verify.scaling import Exponent
from twoaxis.verify.schemes import Cell
from twoaxis.verify.times import Timing

VECTORS = Path(__file__).parents[1] / "golden"


BOTH = [
    "depth_read", "delta_rewrite", "stream_read", "stream_scores", "stream_write", "hyper_gates", "mhc_gates",
    "hyper_pass", "mhc_pass",
    "mix", "token_mix", "head_mix",
    "depthwise_causal_conv", "rms_norm", "add_rms_norm", "swiglu", "rotate", "token_loss", "gated_mix",
    "adamw",
]  # fmt: skip


def twoaxis(capsys, *argv):
    """Exit code, standard output, standard error."""
    code = main(["verify", *map(str, argv)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_table(capsys):
    code, out, err = twoaxis(capsys)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "identity (float64 on cpu)" in lines[0]
    assert lines[-1] == "all 16 pass"
    assert all(line.startswith("pass ") for line in lines[1:-2])


def test_json(capsys):
    code, out, err = twoaxis(capsys, "--json", "--dtype", "float32", "--seed", "3")
    said = json.loads(out)
    assert (code, err, said["dtype"], said["failed"]) == (0, "", "float32", 0)
    assert set(said["rows"][0]) == {"name", "error", "bound", "passed"}
    assert all(row["passed"] and row["error"] <= row["bound"] for row in said["rows"])


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["table", "json"])
def test_a_row_that_fails_is_exit_code_1(capsys, monkeypatch, options):
    def broken(s):
        yield "one is two", 1.0
        yield "nan", float("nan")

    monkeypatch.setattr(duality, "identities", broken)
    code, out, _ = twoaxis(capsys, *options)
    assert code == 1
    if options:
        said = json.loads(out)
        assert said["failed"] == 2
        assert [(r["name"], r["passed"], r["error"]) for r in said["rows"][-2:]] == [
            ("one is two", False, 1.0),
            ("nan", False, "nan"),
        ]
    else:
        assert out.splitlines()[-1] == "2 of 14 FAILED"
        assert sum(line.startswith("FAILED") for line in out.splitlines()) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dtype", "half"], "allowed is float64"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--golden", "nowhere"], "nowhere is not a folder"),
        (["--golden", str(VECTORS), "--dtype", "float32"], "leave out --device and --dtype"),
        (["--goldn", "x"], "did you mean '--golden'?"),
        (["extra"], "extra"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, argv, message):
    code, out, err = twoaxis(capsys, *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_golden(capsys):
    code, out, err = twoaxis(capsys, "--golden", VECTORS / "mhc")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "13 cases: 11 ok, 0 FAILED, 2 not run"
    assert "not run" in out
    assert "mhc/lucidrains_layer: " in out


def test_golden_json_of_a_failure(capsys, tmp_path):
    folder = tmp_path / "dca"
    shutil.copytree(VECTORS / "dca", folder)
    path = folder / "grn_v3_M4_O1.safetensors"
    tensors = load_file(path)
    tensors["out.g"][0, 0, 0] = torch.inf
    save_file(tensors, path)
    code, out, _ = twoaxis(capsys, "--golden", tmp_path, "--json")
    said = json.loads(out)
    assert (code, said["count"]) == (1, {"ok": 3, "FAILED": 1, "not run": 0})
    (failed,) = [r for r in said["results"] if r["status"] == "FAILED"]
    assert failed["name"] == "dca/grn_v3_M4_O1"
    assert failed["detail"].startswith("out.g is off by")
    code, out, _ = twoaxis(capsys, "--golden", tmp_path)
    assert code == 1
    assert out.splitlines()[-1] == "4 cases: 3 ok, 1 FAILED, 0 not run"


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["table", "json"])
def test_nothing_run_is_exit_code_2(capsys, tmp_path, options):
    shutil.copytree(VECTORS / "dca", tmp_path / "lime")  # none of them looks like a case of LIMe
    code, out, err = twoaxis(capsys, "--golden", tmp_path, *options)
    assert code == 2
    assert err == f"twoaxis: none of the 4 cases in {tmp_path} could be run\n"
    assert "neither a router (in.S), a mix (in.H) nor a chain (in.x.0)" in out


def test_costs_are_measured(capsys, monkeypatch):
    monkeypatch.setattr("twoaxis.verify.cost.models", lambda: [ModelConfig(**SMALL)])
    monkeypatch.setattr("twoaxis.verify.scaling.exponents", lambda: [Exponent("scores", "T", 1.001, 1.0)])
    monkeypatch.setattr(
        "twoaxis.verify.schemes.cells", lambda: [Cell("ELC-BERT", "compute", "O(T)", "O(T L)", False)]
    )
    monkeypatch.setattr("twoaxis.verify.times.timings", lambda: [Timing("mlp", 4.0, 9.0)])
    code, printed, _ = twoaxis(capsys, "--cost")
    assert code == 0  # a time never fails it
    assert "saved bytes, checkpointed, additive" in printed
    assert "WRONG   ELC-BERT, compute: said O(T); counted O(T L)" in printed
    assert "differs  4.00 x the FLOPs, 9.00 x the time: mlp" in printed
    assert "not derived from options" not in printed
    monkeypatch.setattr("twoaxis.verify.scaling.exponents", lambda: [Exponent("scores", "T", 2.0, 1.0)])
    code, printed, _ = twoaxis(capsys, "--cost", "--json")
    data = json.loads(printed)
    assert code == 1
    assert data["failed"] == 1
    assert all(row["passed"] and row["stated"] == row["measured"] for row in data["numbers"])


def test_costs_are_measured_one_way(capsys):
    code, _, line = twoaxis(capsys, "--cost", "--dtype", "float32")
    assert code == 2
    assert "--cost measures in float32 on the CPU" in line


KERNELS = (
    "adamw",
    "mix",
    "gated_mix",
    "gated_pull",
    "token_mix",
    "causal_conv",
    "streams",
    "stream_pass",
    "depth_pull",
    "depth_read",
    "delta_rewrite",
    "local_attention",
    "few_tokens",
    "delta_step",
    "streams_step",
    "gates_step",
    "window_step",
)
STEPS = (
    "depth_read",
    "rows_read",
    "gated_mix",
    "made_mix",
    "delta_rewrite",
    "ddl",
    "mhc",
    "hyper",
    "soft_window",
    "window_read",
    "axis_gate",
)


def test_backends_table_and_json_agree(capsys):
    code, out, err = twoaxis(capsys, "--backends")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[-1].startswith("all ")
    code, out, _ = twoaxis(capsys, "--backends", "--json")
    said = json.loads(out)
    assert (code, said["failed"], said["requested"]) == (0, 0, "auto")
    assert len(said["rows"]) + len(said["used"]) == len(lines) - 5
    assert (
        f"kernels are built for {said['level']}, of {', '.join(said['levels'])} that"
        in lines[-len(said["used"]) - 4]
    )
    assert f"attention in bfloat16 is computed by {said['attention']}" == lines[-len(said["used"]) - 3]
    assert {(row["operator"], row["backend"]) for row in said["rows"]} == {
        *((name, backend) for name in BOTH for backend in ("plain", "native")),
        ("local_attention", "blocked"),
        ("local_attention", "sdpa"),
        ("local_attention", "native"),
        *((f"{name} step", "native") for name in STEPS),
    }
    assert all(row["missing"] or 0 < row["error"] <= row["bound"] for row in said["rows"])
    checked = {row["operator"] for row in said["rows"]} - {"adamw"}
    assert checked == {use["operator"] for use in said["used"]}
    assert {use["backend"] for use in said["used"] if use["call"].startswith("float64")} <= {
        "plain",
        "blocked",
        "sdpa",
    }


def test_backends_are_shown_as_they_are_measured(capsys, monkeypatch):
    """Kernels may have to be built first: nobody looks at an empty screen meanwhile."""

    def rows():
        yield backends.BackendRow("mix", "plain", "float32", 1e-7, 1e-5)
        assert capsys.readouterr().out.splitlines()[-1].endswith("mix                 plain    float32")
        yield backends.BackendRow("mix", "native", "float32", 1.0, 1e-5)

    monkeypatch.setattr(backends, "backends", rows)
    code, out, _ = twoaxis(capsys, "--backends")
    assert (code, out.splitlines()[-1]) == (1, "1 of 2 FAILED")


@pytest.mark.parametrize("requested", ["auto", "native"])
def test_a_backend_that_is_not_here_fails_only_if_asked_for(capsys, monkeypatch, requested):
    monkeypatch.setattr(choice, "_found", dict.fromkeys(KERNELS, "no compiler"))
    monkeypatch.setattr(choice, "_noted", set())
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
    with choice.requesting(requested):
        rows = list(backends.backends())
        missing = [row for row in rows if row.missing]
        assert {row.backend for row in missing} == {"native"}
        assert [row.passed for row in missing] == [requested == "auto"] * len(missing)
    code, out, _ = twoaxis(capsys, "--backends")
    assert code == 0
    here = len(rows) - len(missing)
    assert out.splitlines()[-1] == f"all {here} pass; {len(missing)} are not here"
    assert {row.missing for row in missing} == {"no compiler"}


def test_a_kernel_that_does_not_compile_has_failed(capsys, monkeypatch):
    reason = "g++ cannot compile mix.cpp: error: expected ';'"
    rows = [backends.BackendRow("mix", "native", "float32", None, 1e-5, reason)]
    monkeypatch.setattr(backends, "backends", lambda: iter(rows))
    code, out, _ = twoaxis(capsys, "--backends")
    assert (code, out.splitlines()[-1]) == (1, "1 of 1 FAILED")
    assert reason in out


def test_a_wrong_backend_is_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(backends, "_error", lambda *_: 0.5)
    code, out, _ = twoaxis(capsys, "--backends")
    assert code == 1
    assert out.splitlines()[-1].endswith("FAILED")
