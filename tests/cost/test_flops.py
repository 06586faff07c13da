"""FLOPs against torch's counter, with attention on the dense reference.

The counter sees matrix products only, and of attention all T^2 pairs, the masked ones included.
"""

import pytest
import torch
from cases import config
from torch.utils.flop_counter import FlopCounterMode

import twoaxis
import twoaxis.sequence.attention
from twoaxis.ops import reference, visible, visible_pairs

B, T = 2, 11


def counted(cfg: twoaxis.ModelConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Forward and backward FLOPs of matrix products in one step, attention dense."""
    monkeypatch.setattr(twoaxis.sequence.attention, "local_attention", reference.local_attention)
    model = twoaxis.Decoder(cfg)
    tokens = torch.randint(cfg.vocab_size, (B, T))
    with FlopCounterMode(display=False) as forward:
        loss = model.loss(tokens, tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def hidden_pairs(cfg: twoaxis.ModelConfig) -> int:
    """Forward FLOPs that a dense mask computes and throws away: 4 D H for each hidden (query, key) pair."""
    d = cfg.d_model  # D H
    windows = [
        core.window_in(block)
        for block, cores in enumerate(cfg.block_configs())
        for outer in cores
        for core in (outer.parts() if outer.specs_field else [outer])
        if hasattr(core, "window_in")
    ]
    return sum(4 * d * B * (T * T - visible_pairs(T, w)) for w in windows)


@pytest.mark.parametrize(
    "sequence",
    [
        "standard",
        "local to global",
        "parallel",
        "local",
        "grouped",
        "bias and sink",
        "pattern",
        "list per block",
        "wide window",
    ],
)
def test_standard_stream_is_counted_exactly(sequence, monkeypatch):
    cfg = config("additive", sequence)
    forward, backward = counted(cfg, monkeypatch)
    hidden = hidden_pairs(cfg)
    assert hidden > 0
    cost = twoaxis.cost(cfg, B, T)
    assert (cost.flops_forward + hidden, cost.flops_backward + 2 * hidden) == (forward, backward)


@pytest.mark.parametrize("window", [1, 4, 11, 512, None])
def test_visible_pairs_are_the_true_entries_of_the_mask(window):
    # pitfall (Evaluation, comparison, cost model): pairs per layer = sum over t of min(t+1, w)
    assert visible_pairs(T, window) == int(visible(T, T, window).sum())


def test_attention_is_charged_for_visible_pairs():
    # pitfall (Evaluation, comparison, cost model): T=2048, w=512: 917760 pairs; T<w; several windows
    assert visible_pairs(2048, 512) == 917760
    assert visible_pairs(7, 512) == 7 * 8 // 2  # T < w
    full, short, mixed = (
        twoaxis.cost(config(n_blocks=2, sequence=[spec, "mlp"]), 1, 2048).flops_forward
        for spec in ("attention", "attention(window=512)", "attention(window=512, pattern='SL')")
    )
    saved = 4 * 24 * (2048 * 2049 // 2 - 917760)
    assert full - short == 2 * saved
    assert full - mixed == saved
