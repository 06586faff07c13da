"""Models that the adviser knows by name: a configuration and the context it is usually trained at.

| name | of |
|---|---|
| tiny, small, medium | here: 6 blocks of 128 on bytes; 12 of 768 and 24 of 1024 on 50304 tokens, as in the papers |
| smol-135m | SmolLM2-135M's published configuration |
| llama-1b, llama-8b, llama-70b | Llama 3.2 1B, Llama 3.1 8B and 70B, their published configurations |
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoaxis.errors import InputError, nearest
from twoaxis.model.config import ModelConfig


@dataclass(frozen=True)
class Size:
    """A model by name, and the tokens of one sequence unless another number is asked for."""

    name: str
    model: ModelConfig
    seq_len: int


def _llama(d: int, blocks: int, heads: int, kv: int, hidden: int, vocab: int, **more: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        d_model=d,
        n_blocks=blocks,
        n_heads=heads,
        n_kv_heads=kv,
        sequence=["attention", f"mlp(hidden={hidden})"],
        **more,
    )


def sizes() -> dict[str, Size]:
    """All of them by name."""
    llama3: dict[str, Any] = {"rope_base": 500000.0, "norm_eps": 1e-5}
    table = {
        "tiny": (ModelConfig(), 256),
        "small": (ModelConfig(vocab_size=50304, d_model=768, n_blocks=12, n_heads=12), 1024),
        "medium": (ModelConfig(vocab_size=50304, d_model=1024, n_blocks=24, n_heads=16), 1024),
        "smol-135m": (_llama(576, 30, 9, 3, 1536, 49152, rope_base=100000.0), 2048),
        "llama-1b": (_llama(2048, 16, 32, 8, 8192, 128256, **llama3), 8192),
        "llama-8b": (_llama(4096, 32, 32, 8, 14336, 128256, tie_embeddings=False, **llama3), 8192),
        "llama-70b": (_llama(8192, 80, 64, 8, 28672, 128256, tie_embeddings=False, **llama3), 8192),
    }
    return {name: Size(name, model, seq_len) for name, (model, seq_len) in table.items()}


def size(name: str) -> Size:
    """A model by name, or the `config.json` of a saved one (at 2048 tokens); InputError for others."""
    known = sizes()
    if name in known:
        return known[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json":
        raise InputError(
            f"model {name!r} is not known; {nearest(name, known)}; or a folder that twoaxis.save wrote"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is no model's configuration ({error}); give a folder that twoaxis.save wrote"
        ) from None
    return Size(path.parent.name or path.stem, ModelConfig.from_dict(data), 2048)


def with_methods(model: ModelConfig, depth: str, *before: str) -> ModelConfig:
    """The model with another depth method, and sublayers `before` its own."""
    sequence = [s for s in model.sequence if isinstance(s, str)]
    if not sequence:
        raise InputError("the adviser compares models whose blocks are alike; give one list of sublayers")
    return dataclasses.replace(model, depth=depth, sequence=[*before, *sequence])
