"""How many tokens an operator takes at a time."""

import pytest
import torch

from twoaxis.ops.precision import CHUNK, token_chunks


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tokens", [0, 1, 17, 8195])
def test_every_token_is_taken_once(tokens: int, device: str) -> None:
    x = torch.empty(tokens, 3, device=device)
    taken = [t for part in token_chunks(tokens, CHUNK // 100, x) for t in range(tokens)[part]]
    assert taken == list(range(tokens))


def test_a_pass_without_numbers_is_one_chunk() -> None:
    assert len(list(token_chunks(8195, 8192 * 13, torch.empty(8195, 3, device="meta")))) == 1
    assert len(list(token_chunks(8195, 8192 * 13, torch.empty(8195, 3)))) == 8195 // 16 + 1
