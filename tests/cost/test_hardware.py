"""Machines, meshes and model sizes: figures with sources, and one clear line for what does not fit."""

import json
import sys

import pytest

from twoaxis.cost import cost
from twoaxis.cost.calibrate import calibrate, store
from twoaxis.cost.hardware import Hardware, hardware, presets, read_machine
from twoaxis.cost.mesh import Mesh
from twoaxis.cost.sizes import size, sizes
from twoaxis.errors import InputError

FIGURES = ("matrix_tflops", "memory_gb_per_s", "memory_gb", "link_gb_per_s", "network_gb_per_s", "launch_us")


@pytest.mark.parametrize("name", list(presets()))
def test_every_figure_has_a_source_and_what_has_none_is_unknown(name):
    machine = presets()[name]
    for figure in FIGURES:
        source = machine.sources.get(figure) or machine.sources.get("all")
        assert source, f"{name}: {figure} has no source"
        if source.startswith("unknown"):
            assert getattr(machine, figure) is None
        if getattr(machine, figure) is None and figure != "matrix_tflops" and "all" not in machine.sources:
            assert source.startswith("unknown"), f"{name}: {figure} is missing but has a source"


def test_presets_cover_the_machines_of_the_design():
    assert {"h100", "h200", "a100", "b200", "mi300x", "rtx4090", "tpu-v5e", "m3-max", "cpu"} <= set(presets())


def test_rates_follow_the_measured_curve_between_its_points():
    machine = Hardware(name="x", copy_curve=((1e3, 10.0), (1e5, 20.0)), memory_gb_per_s=5.0)
    assert machine.memory_rate(1.0) == 10e9
    assert machine.memory_rate(1e4) == pytest.approx(15e9)  # halfway in the logarithm
    assert machine.memory_rate(1e9) == 20e9
    assert Hardware(name="y", memory_gb_per_s=5.0).memory_rate(1e4) == 5e9


def test_sending_is_by_link_among_neighbours_and_by_network_beyond():
    h100 = hardware("H100")
    assert (h100.send_rate(8), h100.send_rate(16)) == (450e9, 50e9)
    assert hardware("m3-max").send_rate(2) is None


def test_a_dtype_without_a_known_rate_is_refused_in_one_line():
    with pytest.raises(InputError, match="m3-max has no known bfloat16 matrix rate; known are float32"):
        hardware("m3-max").matrix_rate("bfloat16")


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: hardware("h10"), "did you mean 'h100'"),
        (lambda: hardware("none.json"), "is no machine's file"),
        (lambda: size("llama-2b"), "model 'llama-2b' is not known"),
        (lambda: size("none.json"), "give a folder that twoaxis.save wrote"),
        (lambda: Mesh.parse("dp=8,xp=2"), "'xp=2' is no axis"),
        (lambda: Mesh.parse("dp=8,dp=2"), "give each axis once"),
        (lambda: Mesh.parse("pp=0"), "1 or more"),
        (lambda: Mesh.parse("dp=" + "9" * 5000), "an axis has 1 to 999999999 devices"),
        (lambda: Mesh.parse("dp=-1"), "'dp=-1' is no axis with a number; an axis has 1 to"),
        (lambda: Mesh.parse("pp=3").check(size("llama-1b").model, 64), "pp=3 does not divide n_blocks=16"),
        (
            lambda: Mesh.parse("pp=32").check(size("llama-1b").model, 64),
            "pp=32 does not divide n_blocks=16; the nearest is pp=16",
        ),
        (lambda: Mesh.parse("tp=5").check(size("llama-1b").model, 64), "tp=5 does not divide n_heads=32"),
        (lambda: Mesh.parse("cp=5").check(size("llama-1b").model, 64), "cp=5 does not divide seq_len=64"),
        (
            lambda: Mesh.parse("cp=7").check(size("llama-1b").model, 10**15),
            "cp=7 does not divide seq_len=10*; the nearest is cp=8",
        ),
    ],
    ids=[
        "hardware",
        "machine-file",
        "model",
        "model-file",
        "axis",
        "twice",
        "zero",
        "too-many-digits",
        "negative",
        "pp",
        "more-stages-than-blocks",
        "tp",
        "cp",
        "cp-of-many-tokens",
    ],
)
def test_impossible_requests_get_one_line(call, line):
    with pytest.raises(InputError, match=line) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_mesh_is_read_and_written_alike():
    mesh = Mesh.parse("dp=8, tp=2,pp=4")
    assert (mesh.devices, str(mesh)) == (64, "dp=8,tp=2,pp=4,cp=1")
    assert Mesh.parse(str(mesh)) == mesh
    assert Mesh.parse("") == Mesh()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-1b", 1_235_814_400), ("llama-8b", 8_030_261_248), ("llama-70b", 70_553_706_496)],
)
def test_llama_sizes_have_the_published_parameters(name, parameters):
    assert cost(sizes()[name].model, 1, 8).parameters == parameters


def test_calibration_gives_a_whole_machine_and_is_read_back(tmp_path, monkeypatch):
    module = sys.modules[calibrate.__module__]
    monkeypatch.setattr(module, "SECONDS", 1e-4)
    monkeypatch.setattr(module, "COPIES", (1 << 12, 1 << 16))
    monkeypatch.setattr(module, "PRODUCTS", ((8, 8, 8), (32, 32, 32)))
    machine = calibrate("cpu")
    store(machine, tmp_path / "new" / "machine.json")
    found = read_machine(tmp_path / "new" / "machine.json")
    assert found == machine
    assert (
        min(found.launch_us, found.memory_gb_per_s, found.softmax_gb_per_s, found.matrix_tflops["float32"])
        > 0
    )
    assert not found.asynchronous
    assert [x for x, _ in found.copy_curve] == [2.0 * (1 << 12), 2.0 * (1 << 16)]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"name": "x", "memory_gbs": 1}, "did you mean 'memory_gb'"),
        ({"name": "x", "memory_gb": -1}, "allowed is a positive number"),
        ({"memory_gb": 1}, "it has no name"),
        ({"name": 3}, "name=3: allowed is text"),
        ({"name": "x", "asynchronous": "no"}, "allowed is true or false"),
        ({"name": "x", "matrix_tflops": "fast"}, "allowed is a table"),
        ({"name": "x", "matrix_tflops": {"float32": float("nan")}}, "allowed is a positive number"),
        ({"name": "x", "copy_curve": [[1]]}, "allowed are pairs"),
        ({"name": "x", "copy_curve": 3}, "allowed are pairs"),
        ({"name": "x", "gemm_curve": [[1, -2]]}, "allowed is a positive number"),
        ({"name": "x", "gemm_curve": [[2, 1], [2, 1]]}, "in the order of their sizes"),
    ],
    ids=[
        *("field", "negative", "nameless", "name", "asynchronous", "rates", "nan"),
        *("triple", "no-curve", "negative-rate", "order"),
    ],
)
def test_a_damaged_machine_file_is_refused_in_one_line(tmp_path, data, line):
    (tmp_path / "m.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(InputError, match=line):
        hardware(str(tmp_path / "m.json"))
