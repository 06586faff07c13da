"""Every named pair of choices builds, learns and decodes."""

import pytest
import torch

import twoaxis


@pytest.mark.parametrize("name", twoaxis.presets)
def test_preset_builds_and_decodes(name: str) -> None:
    cfg = twoaxis.ModelConfig(**twoaxis.presets[name], vocab_size=11, d_model=12, n_blocks=2, n_heads=2)
    assert cfg.depth == twoaxis.presets[name]["depth"]
    model = twoaxis.Decoder(cfg).double()
    tokens = torch.randint(11, (2, 7))
    model.loss(tokens, tokens).backward()
    cache = model.new_cache(2)
    pieces = [model(part, cache=cache) for part in tokens.split([4, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=0, atol=1e-10)


def test_the_table() -> None:
    assert list(twoaxis.presets) == [
        "standard",
        "local_to_global",
        "ddl_short_swa",
        "local_to_global_short_conv",
        "local_to_global_canon",
        "canon",
    ]
