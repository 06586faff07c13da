"""Every option of every method and of the model does something: no option is read and forgotten.

For each boolean or numeric option of each method: build twice with two values, same seed -> outputs differ
(or the option is refused for that method). The options are those of the Config classes and another value is
chosen from the type; OPTIONS says it where that does not do.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import twoaxis
from configurations import Case, perturb, tokens

ATTENTION_PLACES = ("input", "q", "k", "v", "qkv")
# option: the arguments of two specs that differ in it
OPTIONS = {
    "attnres.key_norm_eps": ("", "key_norm_eps=0.1"),
    "attnres.sink": ("window_sources=2", "window_sources=2, sink=False"),
    "denseformer.sources": ("period=2", "period=2, sources='period'"),
    "depth_attention.stride_attentions": ("", "stride_attentions=2"),
    "depth_attention.recent_attentions": ("stride_attentions=2", "stride_attentions=2, recent_attentions=1"),
    "depth_conv.kernel": ("", "kernel=2"),
    "dynamic_window.window_blocks": ("", "window_blocks=2"),
    "hybrid.axes": ("", "axes='BSD'"),
    "dca.k": ("", "k=1"),
    "dca.middle": ("k=1", "k=1, middle='drop'"),
    "ddl.compressor": ("value_dim=3", "value_dim=3, compressor='token'"),
    "ddl.kernel": ("value_dim=3", "value_dim=3, kernel=2"),
    "ddl.embed_conv": ("value_dim=3", "value_dim=3, embed_conv=False"),
    "ddl.embed_kernel": ("value_dim=3", "value_dim=3, embed_kernel=2"),
    "ddl.gate_hidden": ("gate='mlp'", "gate='mlp', gate_hidden=5"),
    "ddl.key_eps": ("", "key_eps=0.1"),
    "lime.views": ("kind='dynamic'", "kind='dynamic', views=3"),
    "lime.gate": ("kind='dynamic'", "kind='dynamic', gate='relu'"),
    "value_residual.start": ("form='learnable'", "form='learnable', start='standard'"),
    "muddformer.expand_last": ("round64=False", "round64=False, expand_last=False"),
    "muddformer.pre_post_form": ("pre_post_norm=True", "pre_post_norm=True, pre_post_form='code'"),
    "delta_attnres.source_blocks": ("form='block'", "form='block', source_blocks=1"),
    "delta_attnres.released": (
        "form='block', source_blocks=1",
        "form='block', source_blocks=1, released=True",
    ),
    "delta_attnres.key_norm_eps": ("", "key_norm_eps=0.1"),
    "attention.n_heads": ("", "n_heads=1"),
    "attention.n_kv_heads": ("", "n_kv_heads=1"),
    "attention.qk_norm": ("", "qk_norm='full'"),
    "short_swa.qk_norm": ("", "qk_norm='head'"),
    "attention.pattern": ("window=3", "window=3, pattern='SL'"),
    "short_swa.n_heads": ("", "n_heads=1"),
    "short_swa.n_kv_heads": ("", "n_kv_heads=1"),
    "short_swa.window": ("", "window=3"),
    "short_swa.field": ("window=3", "window=3, field='chunk'"),
    "short_swa.sink_tokens": ("window=3", "window=3, sink_tokens=2"),
    **{f"{n}.{at}": ("", f"{at}='canon'") for n in ("attention", "short_swa") for at in ATTENTION_PLACES},
    "mlp.input": ("", "input='canon'"),
    "mlp.hidden_input": ("", "hidden_input='canon'"),
    "canon.set": ("", "set='BD'"),
    "local_to_global.mixer": ("", "mixer='canon'"),
    "residual.cores": ("short_swa", "token_shift"),
    "parallel.cores": ("attention, mlp", "attention, mlp, short_swa"),
}
ALL = [
    (axis, method, field.name)
    for axis in ("depth", "sequence")
    for method, cls in twoaxis.methods(axis).items()
    for field in dataclasses.fields(cls.Config)
]
# field of the model: another value than in `Case.config`
FIELDS = {
    "vocab_size": 13,
    "d_model": 16,
    "n_blocks": 2,
    "n_heads": 1,
    "n_kv_heads": 1,
    "depth": "denseformer",
    "sequence": ["attention", "mlp", "mlp"],
    "tie_embeddings": False,
    "norm_eps": 0.5,
    "rope_base": 100.0,
    "qk_norm": True,
    "dropout": 0.5,
    "init_std": 0.1,
    "state_dtype": "bfloat16",
    "history": "int8",
}


def outputs(cfg: twoaxis.ModelConfig, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    torch.manual_seed(0)
    return perturb(twoaxis.Decoder(cfg).to(dtype))(tokens())


def another(config: type, option: str) -> str:
    """An option set to another value than its default, as an argument."""
    default = next(f.default for f in dataclasses.fields(config) if f.name == option)
    hint = typing.get_type_hints(config)[option]
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is Literal:
        value = next(v for v in typing.get_args(hint) if v != default)
    elif hint is bool:
        value = not default
    else:
        value = {int: (default or 1) + 1, float: (default or 1.0) / 2}[hint]
    return f"{option}={value!r}"


def differ(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape != second.shape or bool((first - second).abs().max() > 1e-6)


@pytest.mark.parametrize(("axis", "method", "option"), ALL, ids=[f"{m}.{o}" for _, m, o in ALL])
def test_option_of_a_method_changes_the_output(axis: Any, method: str, option: str) -> None:
    key = f"{method}.{option}"
    arguments = OPTIONS.get(key) or ("", another(twoaxis.methods(axis)[method].Config, option))
    specs = [f"{method}({given})" if given else method for given in arguments]
    first, second = (twoaxis.parse_spec(axis, s) for s in specs)
    changed = {f.name for f in dataclasses.fields(first) if getattr(first, f.name) != getattr(second, f.name)}
    assert changed == {option}
    fields = [{"depth": spec} if axis == "depth" else {"sequence": [spec]} for spec in specs]
    one, other = (outputs(Case("additive").config(norm_eps=1e-2, **given)) for given in fields)
    assert differ(one, other), f"{specs} agree: give {key} two values that do not, in OPTIONS"


def test_every_entry_is_an_option() -> None:
    assert OPTIONS.keys() - {f"{method}.{option}" for _, method, option in ALL} == set()


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(twoaxis.ModelConfig)])
def test_field_of_the_model_changes_the_output_and_is_saved(name: str, tmp_path: Path) -> None:
    case = Case(
        "attnres" if name == "history" else "additive"
    )  # the one method keeps a history, the other none
    base, other = case.config(), case.config(**{name: FIELDS[name]})
    assert getattr(other, name) == FIELDS[name] != getattr(base, name)
    dtype = torch.float32 if name == "state_dtype" else torch.float64
    assert differ(outputs(base, dtype), outputs(other, dtype))
    twoaxis.save(twoaxis.Decoder(other), tmp_path)
    assert twoaxis.load(tmp_path).cfg == other
    written = (tmp_path / "config.json").read_text()  # complete: later defaults do not alter an old model
    assert all(f'"{f.name}"' in written for f in dataclasses.fields(other))


@pytest.mark.parametrize("value", [None, False, 0, [], 1, 0.0, "float32"], ids=repr)
@pytest.mark.parametrize("name", FIELDS)
def test_field_of_the_model_is_refused_or_kept(name: str, value: Any) -> None:
    # each field set to None, False, 0, empty list, a default: equal after save and load, or refused by name
    refusal = ""
    try:
        cfg = Case("additive").config(**{name: value})
    except twoaxis.InputError as error:
        refusal = str(error)
    if refusal:
        assert f"{name}={value!r}" in refusal or repr(value) in refusal
    else:
        assert twoaxis.ModelConfig.from_dict(json.loads(cfg.to_json())) == cfg
        assert getattr(cfg, name) == value
