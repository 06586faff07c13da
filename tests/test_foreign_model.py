"""Depth methods on a model that is not ours: the README's example, run on a stock LlamaForCausalLM."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import twoaxis

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "foreign_model.py"
SPECS = ["hyper_connections", "denseformer", "attnres", "ddl(value_dim=3)", "depth_window"]  # x alone is read


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture
def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def core() -> str:
    """What the README quotes of the example."""
    text = EXAMPLE.read_text(encoding="utf-8")
    return text.partition("# example: begin\n")[2].partition("# example: end")[0].strip()


def test_trains_with_falling_loss(example: dict[str, Any], tmp_path: Path) -> None:
    losses = example["main"](steps=30)
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])


@pytest.mark.parametrize("method", SPECS)
def test_every_parameter_learns_and_decoding_agrees(
    example: dict[str, Any], llama: LlamaForCausalLM, method: str
) -> None:
    example["rewire"](llama, method)
    names = dict(llama.named_parameters())
    owned = twoaxis.cost(
        twoaxis.ModelConfig(vocab_size=11, d_model=12, n_blocks=3, n_heads=2, depth=method), 1, 1
    ).by_part["depth"]
    ours = [
        p for n, p in names.items() if not any(part in n for part in ("attention", "mlp", "embed", "head"))
    ]
    assert sum(p.numel() for p in ours) == owned.parameters
    rows = torch.randint(11, (2, 7))
    optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)
    for _ in range(2):  # zero matrices hide what is before them in the first step only
        optimizer.zero_grad()
        llama(rows, labels=rows).loss.backward()
        optimizer.step()
    assert [n for n, p in names.items() if p.grad is None or not p.grad.any()] == []
    if method != "ddl(value_dim=3)":  # its embedding convolution remembers tokens, which their cache does not
        assert torch.equal(
            *(llama.generate(rows, max_new_tokens=5, use_cache=c, do_sample=False) for c in (True, False))
        )


@pytest.mark.parametrize("method", ["additive", "denseformer", "attnres", "depth_window"])
def test_starts_as_the_model_it_was(example: dict[str, Any], llama: LlamaForCausalLM, method: str) -> None:
    rows = torch.randint(11, (2, 7))
    rewired = copy.deepcopy(llama)
    example["rewire"](rewired, method)
    torch.testing.assert_close(rewired(rows).logits, llama(rows).logits, rtol=1e-4, atol=1e-6)


def test_the_example_is_short() -> None:
    assert len([line for line in core().splitlines() if line.strip()]) <= 15


def test_the_readme_quotes_the_example() -> None:
    assert f"```python\n{core()}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
