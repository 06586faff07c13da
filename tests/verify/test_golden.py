"""Every recorded vector, and proof that a wrong number in any of its tensors is found."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import twoaxis
from twoaxis.verify.golden import Case, NotRun, family_of, golden, run_folder
from twoaxis.verify.golden.folder import SIGNS, run_pair
from twoaxis.verify.golden.registry import _RUNNERS, runners

VECTORS = Path(__file__).parents[1] / "golden"
FILES = sorted(path.with_suffix("") for path in VECTORS.glob("*/*.json"))
NOT_RUN = {  # and a word of the reason
    "lucidrains_layer": "each stream alone",
    "static_orthostochastic": "orthostochastic",
}
RUN = [stem for stem in FILES if stem.name not in NOT_RUN]


def label(stem: Path) -> str:
    return f"{stem.parent.name}/{stem.name}"


def test_the_vectors_are_all_there():
    families = {stem.parent.name for stem in FILES}
    assert families == set(runners()) & {path.name for path in VECTORS.iterdir() if path.is_dir()}
    assert len(FILES) == 120


@pytest.mark.parametrize("stem", FILES, ids=label)
def test_vector(stem):
    result = run_pair(stem, VECTORS)
    if stem.name in NOT_RUN:
        assert (result.status, result.output_error) == ("not run", None)
        assert NOT_RUN[stem.name] in result.detail
        return
    assert (result.status, result.detail) == ("ok", "")
    assert result.output_error <= result.output_bound
    recorded = json.loads(stem.with_suffix(".json").read_text())["tensors"]
    if any(name.startswith(("grad.", "d_", "dq")) for name in recorded):
        assert result.gradient_error <= result.gradient_bound
    else:
        assert result.gradient_error is None


def copied(stem: Path, folder: Path) -> Path:
    """The pair in a folder of its own, under the family's name."""
    target = folder / stem.parent.name
    target.mkdir(parents=True, exist_ok=True)
    for suffix in (".json", ".safetensors"):
        shutil.copy(stem.with_suffix(suffix), target)
    return target / stem.name


def changed(tensor: torch.Tensor, whole: bool) -> torch.Tensor:
    """One entry, or all, moved by a hundredth of the largest (at least of 1); integers by one."""
    if not tensor.is_floating_point():
        return ~tensor if tensor.dtype == torch.bool else (tensor + 1) % 2
    size = 0.01 * (1 + torch.rand(tensor.shape)) * torch.randn(tensor.shape).sign()  # no shift of logits
    noise = size.to(tensor.dtype) * tensor.abs().max().clamp(min=1)
    one = torch.zeros_like(tensor).flatten()
    one[-1] = 1
    return tensor + noise * (1 if whole else one.view(tensor.shape))


CHANGED = [
    "delta_attnres/delta_null_source",
    "elc_bert/weighted_output_standin",
    "lime/attention_chain_N3",
    "lime/dynamic_M3_V3_softmax",
    "muddformer/da_module_round64_off",
    "value_residual/svformer_chain_N3",
    "attnres_read/fla_window3_plus_sink",
    "attnres_block/stack_sum_readout",
    "dca/grn_v3_M4_O1",
    "dca/block_M3",
    "ddl/block_cc",
    "ddl/expanded_rewrite_mlp_beta",
    "denseformer/dwa_L5_k2_p1",
    "hc/layer_dynamic_tanh",
    "mhc/deepseek_layer_bigeps",
    "mhc/lite_layer",
    "mhc/static_sinkhorn",
    "sliding-window-attention/gptoss_sink_w5",
    "sliding-window-attention/hf_core_hq4_hkv2_w2",
    "sliding-window-attention/hf_module_rope_w5",
    "sliding-window-attention/lucidrains_exact_n4",
    "sliding-window-attention/lucidrains_block_rotary_n6",
    "canon/layer_ABCD_qknorm_rope2",
    "canon/op_k4_res1_act1",
    "shortconv/causal_conv_k4_b1_silu1_h01",
    "shortconv/causal_conv_k2_b0_silu0_h00",
    "shortconv/lfm2_block_k4",
    "shortconv/token_shift",
    "shortconv/varlen_states",
]


@pytest.mark.parametrize("case", CHANGED)
def test_a_change_in_any_tensor_is_found(tmp_path, case):
    """An entry of an output, gradient or cotangent, or an input or parameter: the case fails, every time."""
    stem = copied(VECTORS / case, tmp_path)
    path = stem.with_suffix(".safetensors")
    tensors = load_file(path)
    results = ("out", "grad", "cot", "d_", "dq", "dk", "dv", "dsink", "rec.", "weights")
    passed = []
    for name, tensor in tensors.items():
        idle = f"grad.{name}" in tensors and not tensors[f"grad.{name}"].any()  # weights of a single source
        save_file({**tensors, name: changed(tensor, whole=not name.startswith(results))}, path)
        if not idle and run_pair(stem, tmp_path).status != "FAILED":
            passed.append(name)
    assert passed == []


@pytest.mark.parametrize("case", CHANGED)
def test_a_nan_is_found(tmp_path, case):
    stem = copied(VECTORS / case, tmp_path)
    path = stem.with_suffix(".safetensors")
    tensors = load_file(path)
    name = next(n for n in tensors if n.startswith(("out", "streams", "state")))
    tensors[name].flatten()[0] = torch.nan
    save_file(tensors, path)
    assert run_pair(stem, tmp_path).status == "FAILED"


def options_of(meta: dict) -> dict:
    """Where a JSON keeps its options."""
    return next((meta[key] for key in ("config", "hyper", "params") if key in meta), meta)


@pytest.mark.parametrize("stem", RUN, ids=label)
def test_an_unknown_option_is_not_run(tmp_path, stem):
    stem = copied(stem, tmp_path)
    path = stem.with_suffix(".json")
    meta = json.loads(path.read_text())
    options_of(meta)["bilinear_warp"] = True
    path.write_text(json.dumps(meta))
    result = run_pair(stem, tmp_path)
    assert result.status == "not run"
    assert "bilinear_warp" in result.detail


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("dca/gpt_first_last_k2_L5", "k", 1),
        ("dca/block_M3", "heads", 4),
        ("dca/block_M3", "rms_eps", 1e-6),
        ("sliding-window-attention/hf_core_hq4_hkv2_w5", "w", 4),
        ("sliding-window-attention/hf_module_rope_w5", "rope_theta", 500.0),
        ("sliding-window-attention/hf_module_rope_w5", "scale", 1.0),
        ("sliding-window-attention/lucidrains_exact_n4", "look_backward", 2),
        ("sliding-window-attention/lucidrains_block_n4", "look_backward", 2),
        ("sliding-window-attention/lucidrains_block_n4", "window_size", 5),
        ("canon/layer_ABCD", "rope_theta", 500.0),
        ("canon/layer_ABCD", "canon_set", "ABC"),
        ("canon/layer_BD_rope2", "rms_eps", 0.1),
        ("canon/op_k3_res1_act0", "residual", False),
        ("shortconv/causal_conv_k4_b1_silu1_h01", "silu", False),
        ("shortconv/causal_conv_k2_b0_silu0_h00", "ring_slots", 3),
        ("shortconv/lfm2_block_k3", "bias", True),
        ("sliding-window-attention/lucidrains_exact_n4", "rotary", True),
        ("attnres_block/stack_final_read", "layers_per_block", 1),
        ("attnres_full/stack_fla", "eps", 0.1),
        ("ddl/block_cc", "k_eps", 0.5),
        ("delta_attnres/delta_block_as_released", "layers_per_block", 2),
        ("delta_attnres/delta", "eps", 0.1),
        ("lime/attention_chain_N3", "mask", "none"),
        ("lime/dynamic_M4_V1_relu", "gate", "softmax"),
        ("muddformer/da_prepostnorm_jax", "eps", 0.1),
        ("value_residual/resformer_chain_N3", "mask", "none"),
        ("mhc/deepseek_layer_bigeps", "eps", 0.3),
        ("mhc/deepseek_layer_bigeps", "norm_eps", 0.05),
        ("mhc/paperform_layer_2it", "sinkhorn_iters", 3),
        ("denseformer/dwa_L7_k3_p2", "dilation_k", 2),
    ],
)
def test_another_value_of_an_option_never_passes(tmp_path, case, key, value):
    stem = copied(VECTORS / case, tmp_path)
    path = stem.with_suffix(".json")
    meta = json.loads(path.read_text())
    options = options_of(meta)
    assert key in options
    options[key] = value
    path.write_text(json.dumps(meta))
    assert run_pair(stem, tmp_path).status != "ok"


@pytest.mark.parametrize(
    ("case", "key"),
    [("dca/grn_v3_M4_O1", "outputs"), ("canon/op_k3_res1_act0", "kernel"), ("attnres_read/fla_plain", "eps")],
)
def test_what_the_json_leaves_out_is_said_by_name(tmp_path, case, key):
    stem = copied(VECTORS / case, tmp_path)
    path = stem.with_suffix(".json")
    meta = json.loads(path.read_text())
    del options_of(meta)[key]
    path.write_text(json.dumps(meta))
    result = run_pair(stem, tmp_path)
    assert (result.status, result.detail) == ("not run", f"the JSON says nothing of {key!r}")


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_half_a_pair_is_not_run(tmp_path, kind):
    stem = copied(VECTORS / "dca/grn_v3_M4_O1", tmp_path)
    stem.with_suffix(f".{kind}").unlink()
    (result,) = run_folder(tmp_path)
    assert (result.status, result.detail) == ("not run", f"grn_v3_M4_O1.{kind} is missing")


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_damaged_file_is_not_run(tmp_path, size):
    stem = copied(VECTORS / "dca/grn_v3_M4_O1", tmp_path)
    path = stem.with_suffix(".safetensors")
    path.write_bytes(path.read_bytes()[:size])
    (result,) = run_folder(tmp_path)
    assert result.status == "not run"
    assert "damaged" in result.detail


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"tensors": []}', "{'a': 1}"])
def test_a_damaged_json_is_not_run(tmp_path, text):
    stem = copied(VECTORS / "dca/grn_v3_M4_O1", tmp_path)
    stem.with_suffix(".json").write_text(text)
    assert run_pair(stem, tmp_path).status == "not run"


def test_tensors_must_be_those_that_the_json_lists(tmp_path):
    stem = copied(VECTORS / "dca/grn_v3_M4_O1", tmp_path)
    path = stem.with_suffix(".safetensors")
    tensors = load_file(path)
    said = {}
    for what, given in {
        "absent": {n: t for n, t in tensors.items() if n != "grad.in.G"},
        "unlisted": {**tensors, "grad.extra": tensors["in.G"].clone()},
        "shape": {**tensors, "in.G": tensors["in.G"][:2].clone()},
        "dtype": {**tensors, "in.G": tensors["in.G"].float()},
    }.items():
        save_file(given, path)
        result = run_pair(stem, tmp_path)
        assert result.status == "not run"
        said[what] = result.detail
    assert "listed but absent" in said["absent"]
    assert "present but not listed" in said["unlisted"]
    assert "has shape" in said["shape"]
    assert "has dtype float32" in said["dtype"]


def test_a_flat_folder_is_sorted_by_what_the_json_says(tmp_path):
    """Cases of all methods in one folder: the same verdicts."""
    for stem in FILES:
        for suffix in (".json", ".safetensors"):
            shutil.copy(stem.with_suffix(suffix), tmp_path / f"{stem.parent.name}-{stem.name}{suffix}")
    results = run_folder(tmp_path)
    assert len(results) == len(FILES)
    for result in results:
        stem = result.name.split("/")[1]
        assert stem.startswith(f"{result.family}-")
        ddl_model = "model" in stem  # rules for whole models go by the file's own name
        assert ddl_model or (result.status == "ok") == (not any(stem.endswith(b) for b in NOT_RUN))


@pytest.mark.parametrize("family", sorted(set(SIGNS) - set(runners())))
def test_methods_to_come_are_not_run(tmp_path, family):
    stem = copied(VECTORS / "dca/grn_v3_M4_O1", tmp_path)
    stem.parent.rename(tmp_path / family)
    (result,) = run_folder(tmp_path)
    assert (result.status, result.detail) == ("not run", f"method {family} is not in this version")


def test_an_unknown_family_is_not_run(tmp_path):
    with pytest.raises(NotRun, match="no known method"):
        family_of(tmp_path / "case", tmp_path, {"ran": "something new", "source": {"repo": "else/where"}})


def test_folders_without_vectors_are_refused(tmp_path):
    with pytest.raises(twoaxis.InputError, match="holds no"):
        run_folder(tmp_path)
    with pytest.raises(twoaxis.InputError, match="not a folder"):
        run_folder(tmp_path / "none")


def test_a_runner_that_breaks_is_a_failure_with_its_error(tmp_path, monkeypatch):
    def broken(case: Case) -> None:
        raise KeyError("lost")

    golden("dca")(broken)
    try:
        stem = copied(VECTORS / "dca/grn_v3_M4_O1", tmp_path)
        monkeypatch.setattr("twoaxis.verify.golden.folder.runners", lambda: _RUNNERS)
        result = run_pair(stem, tmp_path)
    finally:
        from twoaxis.verify.golden.dca import replay

        golden("dca")(replay)
    assert (result.status, result.detail) == ("FAILED", "KeyError: 'lost'")
