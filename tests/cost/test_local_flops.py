"""FLOPs of local mixers, also inside others, against torch's counter: what it sees and what it does not.

The counter sees matrix products only, so the taps of convolutions are counted here; of attention it sees all
T^2 pairs, at the width that keys and values are padded to.
"""

import pytest
import torch
from cases import config
from test_flops import B, T, counted

import twoaxis
from configurations import SEQUENCES
from twoaxis.sequence import SoftmaxAttention
from twoaxis.sequence.convolution import TokenMemory

NAMES = ["canon", "convolutions", "chunks", "sink tokens", "local mixers inside"]
BLOCKS = {name: SEQUENCES[name] for name in NAMES} | {
    "light": ["short_swa(window=4, n_heads=2, head_dim=4, value='identity', output='identity')", "mlp"],
    "wide heads": ["attention(window=4, head_dim=16, k='canon', v='short_conv(form=\\'lfm2\\')')", "mlp"],
    "residual": ["residual(short_swa(window=4, value='key'))", "parallel(mlp, token_shift)"],
}


@pytest.mark.parametrize("name", BLOCKS)
def test_counts_are_exact(name, monkeypatch):
    cfg = config("additive", BLOCKS[name])
    model, cost = twoaxis.Decoder(cfg), twoaxis.cost(cfg, B, T)
    unseen = masked = 0
    for part in model.modules():
        if isinstance(part, TokenMemory):
            unseen += 2 * part.width * part.kernel * B * T
        if isinstance(part, SoftmaxAttention):
            widths, h = (part.width, part.value_width), part.n_heads
            masked += 2 * h * B * (2 * max(widths) * T * T - sum(widths) * part.cfg.pairs(T, part.block))
    forward, backward = counted(cfg, monkeypatch)
    assert masked > 0
    assert cost.flops_forward - unseen + masked == forward
    assert cost.flops_backward - 2 * unseen + 2 * masked == backward
    assert cost.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("max_rollback", [0, 3])
def test_memory_is_what_the_cache_holds(name, max_rollback):
    cfg = config("additive", BLOCKS[name])
    model = twoaxis.Decoder(cfg)
    cache = model.new_cache(B, max_length=T, max_rollback=max_rollback)
    expected = twoaxis.cost(cfg, B, T, max_rollback=max_rollback).decode_state_bytes
    for _ in range(3 if name in ("chunks", "sink tokens") else 1):
        with torch.no_grad():
            model(torch.randint(cfg.vocab_size, (B, T)), cache=cache)
        assert cache.nbytes == expected
