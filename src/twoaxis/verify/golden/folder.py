"""Find the pairs in a folder, decide whose they are, run them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from twoaxis.errors import InputError
from twoaxis.model.files import read_safetensors
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.check import Result, check
from twoaxis.verify.golden.registry import runners

# family -> what the JSON says of the code that was run; the first match counts
SIGNS = {
    "delta_attnres": r"attnres_mode='delta",
    "attnres_block": r"attnres_mode='block'|_forward_block_attnres",
    "attnres_full": r"attnres_mode='full'|_forward_full_attnres",
    "attnres_read": r"naive_attnres$|naive_attnres on a chosen|attn_res_kernel|reference_attnres|two_phase",
    "canon": r"canon",
    "dca": r"\bDCA\b|deep-cross-attention",
    "ddl": r"deep-delta-learning",
    "denseformer": r"DenseFormer",
    "elc_bert": r"elc-bert",
    "mhc": r"mhc|TileKernels|DeepseekV4Hyper|manifold_constrained",
    "hc": r"lucidrains/hyper-connections",
    "lime": r"\blime\b",
    "muddformer": r"MUDDFormer",
    "shortconv": r"causal-conv1d|lfm2|token_shift",
    "sliding-window-attention": r"eager_attention_forward|MistralAttention|local_attention",
    "value_residual": r"Value-Residual-Learning",
}


def run_folder(folder: Path) -> list[Result]:
    """The verdict on every pair under `folder`, in order of name. InputError when there is none."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give one with pairs of .json and .safetensors files")
    stems = sorted({p.with_suffix("") for s in ("json", "safetensors") for p in folder.rglob(f"*.{s}")})
    if not stems:
        raise InputError(f"{folder} holds no .json and .safetensors files; give a folder of golden vectors")
    return [run_pair(stem, folder) for stem in stems]


def run_pair(stem: Path, folder: Path) -> Result:
    """The verdict on one pair, STEM.json and STEM.safetensors."""
    name, family = f"{stem.parent.resolve().name}/{stem.name}", "unknown"
    try:
        meta = _read_json(stem)
        family = family_of(stem, folder, meta)
        tensors = _read_tensors(stem, meta)
        runner = runners().get(family)
        if runner is None:
            raise NotRun(f"method {family} is not in this version")
        case = Case(name, meta, tensors)
        runner(case)
        return check(case, family)
    except (NotRun, InputError) as reason:
        return Result(name, family, "not run", detail=str(reason))
    except Exception as problem:  # a runner that breaks is a failure of the case
        return Result(name, family, "FAILED", detail=f"{type(problem).__name__}: {problem}".splitlines()[0])


def family_of(stem: Path, folder: Path, meta: dict[str, Any]) -> str:
    """The family that a file belongs to: a folder's name on its path, or else what the JSON says."""
    names = [stem.parent.resolve(), *stem.parent.resolve().parents]
    for place in names:
        if place.name in SIGNS:
            return place.name
        if place == folder.resolve():
            break
    if "block_size_sublayers" in meta and "GLABlock" in str(meta.get("ran")):
        return "attnres_full" if meta["block_size_sublayers"] == 1 else "attnres_block"
    said = "\n".join(str(v) for k in ("method", "ran", "source") for v in _flat(meta.get(k)))
    for family, sign in SIGNS.items():
        if re.search(sign, said, re.IGNORECASE | re.MULTILINE):
            return family
    raise NotRun("the folder's name and the JSON's method, ran and source name no known method")


def _flat(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else [value]


class _Said(dict[str, Any]):
    """A table of the JSON; what a runner needs of it and does not find is said by name."""

    def __missing__(self, key: str) -> Any:
        raise NotRun(f"the JSON says nothing of {key!r}")


def _read_json(stem: Path) -> dict[str, Any]:
    path = stem.parent / f"{stem.name}.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"), object_hook=_Said)
    except FileNotFoundError:
        raise NotRun(f"{path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise NotRun(f"{path.name} cannot be read: {error}") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("tensors"), dict):
        raise NotRun(f"{path.name} has no table of tensors")
    return meta


def _read_tensors(stem: Path, meta: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors, which must be those that the JSON lists."""
    path = stem.parent / f"{stem.name}.safetensors"
    if not path.exists():
        raise NotRun(f"{path.name} is missing")
    tensors = read_safetensors(path)
    listed = meta["tensors"]
    for name in sorted(listed.keys() ^ tensors.keys()):
        raise NotRun(f"{name!r} is {'listed but absent' if name in listed else 'present but not listed'}")
    for name, tensor in tensors.items():
        found = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for key, value in found.items():
            if listed[name].get(key) != value:
                raise NotRun(f"{name!r} has {key} {value}, the JSON says {listed[name].get(key)}")
    return tensors
