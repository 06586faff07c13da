"""STUDY.yaml and command-line text made into a study.

    rows:                                  # the first is the baseline
      - additive                           # a depth spec alone, or
      - {name: local, depth: ddl, sequence: [short_swa(window=16), attention, mlp], train: {lr: 1.0e-3}}
    seeds: 3                               # seeds 0, 1, 2; or a list of seeds
    match: parameters                      # width | parameters | flops
    threads: 1                             # of torch; left out: as they are
    out: runs/mine
    train:                                 # as in the config.yaml of a run
      steps: 500
      model: {d_model: 128, n_blocks: 6}

Instead of `rows`, `depth: [..]` and `sequence: [..]` give lists whose cross product is the rows. What a file
leaves out is the preset's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from twoaxis.data import load_tokenizer
from twoaxis.errors import InputError
from twoaxis.spec import nearest
from twoaxis.study.grid import OUT, STANDARD, Row, Study, cross, preset, preset_training, with_steps
from twoaxis.train import TrainConfig, read_yaml

KEYS = ("rows", "depth", "sequence", "seeds", "match", "threads", "train", "out")
ROW_KEYS = ("name", "depth", "sequence", "train")
OPEN, CLOSE = "([{", ")]}"


def read_study(path: str | Path) -> Study:
    """The study in a YAML file; InputError for unknown keys (with the nearest) and bad values."""
    return study_from(read_yaml(path), str(path))


def study_from(data: Mapping[str, Any], source: str = "the study") -> Study:
    """The inverse of `Study.to_dict`; what is left out is the preset's."""
    _check_keys(data, KEYS, source)
    if "rows" in data and ("depth" in data or "sequence" in data):
        raise InputError(f"{source}: give either rows, or depth and sequence")
    if "rows" in data:
        rows = tuple(_row(item, source) for item in _items(data, "rows", source))
    elif "depth" in data or "sequence" in data:
        rows = grid_of(_items(data, "depth", source), _items(data, "sequence", source))
    else:
        rows = preset().rows
    return Study(
        rows=rows,
        seeds=seeds_of(data.get("seeds", 1)),
        match=data.get("match", "width"),
        threads=data.get("threads"),
        training=_training(preset_training(), data.get("train") or {}, f"{source}: train"),
        out=str(data.get("out", OUT)),
    )


def grid_of(depths: Iterable[Any], sequences: Iterable[Any]) -> tuple[Row, ...]:
    """The cross product of depth specs and blocks; an empty axis is the standard one."""
    blocks = [_block(s) for s in sequences] or [STANDARD]
    return cross([str(d) for d in depths] or ["additive"], blocks)


def seeds_of(given: Any) -> tuple[int, ...]:
    """3 is the seeds 0, 1, 2; a list of seeds is itself."""
    if type(given) is int and given >= 1:
        return tuple(range(given))
    if isinstance(given, list | tuple):
        return tuple(given)
    raise InputError(f"seeds={given!r}: allowed is how many (1 or more), or a list of seeds")


def split_sublayers(text: str) -> tuple[str, ...]:
    """The sublayers of "short_swa(window=16),attention,mlp": split at commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in OPEN or c in CLOSE:
            depth += 1 if c in OPEN else -1
        if c == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += c
    parts = [part.strip() for part in parts]
    if depth or quote or not all(parts):
        raise InputError(
            f"sequence {text!r} cannot be read: write sublayers with commas between, as in 'attention,mlp'"
        )
    return tuple(parts)


def _block(given: Any) -> tuple[Any, ...]:
    """One block's sublayers from text, or a list (of lists, one per block)."""
    if isinstance(given, str):
        return split_sublayers(given)
    if isinstance(given, list | tuple) and given:
        return tuple(given)
    raise InputError(f"sequence {given!r}: give sublayers such as 'attention,mlp' or [attention, mlp]")


def _row(item: Any, source: str) -> Row:
    if isinstance(item, str):
        return Row(name=item, depth=item)
    if not isinstance(item, dict):
        raise InputError(
            f"{source}: a row is a depth spec or has the keys {', '.join(ROW_KEYS)}, not {item!r}"
        )
    _check_keys(item, ROW_KEYS, f"{source}: row")
    depth, block = str(item.get("depth", "additive")), _block(item.get("sequence", STANDARD))
    train = item.get("train") or {}
    if not isinstance(train, dict):
        raise InputError(f"{source}: the train of a row is a list of `setting: value` lines, not {train!r}")
    return Row(
        name=str(item.get("name") or cross([depth, ""], [block, ()])[0].name),
        depth=depth,
        sequence=block,
        train=train,
    )


def _training(base: TrainConfig, given: Any, source: str) -> TrainConfig:
    """The preset's training with the settings given."""
    if isinstance(given, dict):
        model = given.get("model") or {}
        for key in {"depth", "sequence"} & model.keys() if isinstance(model, dict) else ():
            raise InputError(f"{source}: model: {key} belongs in the rows")
        if "seed" in given:
            raise InputError(f"{source}: seed is set by the study's seeds")
        checked = TrainConfig.from_dict(given, source)  # refuses unknown keys and bad values
        settings = {key: getattr(checked, key) for key in given if key != "model"}
        sizes = {key: getattr(checked.model, key) for key in model}
        if "tokenizer" in given:
            sizes.setdefault("vocab_size", _vocab_size(checked.tokenizer))
        base = with_steps(base, checked.steps) if "steps" in given else base
        return dataclasses.replace(base, **settings, model=dataclasses.replace(base.model, **sizes))
    raise InputError(f"{source} must hold settings such as `steps: 500`, not {given!r}")


def _vocab_size(tokenizer: str) -> int:
    """The vocabulary of a tokeniser that may not be trained yet."""
    size = tokenizer.removeprefix("bpe:")
    return int(size) if size.isdigit() else load_tokenizer(tokenizer).vocab_size


def _items(data: Mapping[str, Any], key: str, source: str) -> list[Any]:
    value = data.get(key, [])
    if not isinstance(value, list) or (key in data and not value):
        raise InputError(f"{source}: {key} must be a list with at least one entry, not {value!r}")
    return value


def _check_keys(data: Mapping[str, Any], known: Iterable[str], source: str) -> None:
    for key in data:
        if key not in known:
            raise InputError(f"{source} has no key {key!r}; {nearest(str(key), known)}")
