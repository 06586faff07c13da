"""A depth method's own loss term: its weight, its column in the metrics, and what it does to a window."""

import pytest
import torch
from test_train_loss import batch_of

import twoaxis
from twoaxis.train import train
from twoaxis.train.metrics import read_metrics
from twoaxis.train.precision import Master
from twoaxis.train.session import accumulate

METHOD = "dynamic_window(window_blocks=3)"
START = (1.5 + 2) / 2 / 3  # every K_t starts in the middle of 1 .. 2 and of 1 .. 3


def model_of(depth):
    torch.manual_seed(0)
    return twoaxis.Decoder(twoaxis.ModelConfig(vocab_size=20, d_model=12, n_heads=2, n_blocks=3, depth=depth))


def gradients(model, batches, weight):
    master = Master(model, "float32")
    loss, _, terms = accumulate(model, master, batches, "float32", weight)
    return loss, terms["window_share"], {n: p.grad.clone() for n, p in master.named.items()}


def test_the_term_is_a_mean_over_targets_however_rows_are_batched():
    model = model_of(METHOD)
    together, apart = (
        gradients(model, b, 0.5) for b in ([batch_of(3, 7)], [batch_of(3, width=7), batch_of(7)])
    )
    model.zero_grad()
    whole = batch_of(3, 7)
    _, states = model(whole.tokens, return_states=True)
    share = model.stream.loss_term(states["block.3"])[whole.targets != -100].mean()
    assert together[1] == pytest.approx(share.item()) == pytest.approx(START)
    plain = gradients(model, [whole], 0.0)
    assert plain[0] == together[0]  # the loss that is logged is the cross-entropy alone
    name = "blocks.1.connections.0.chooser.bias"
    own = 0.5 * (1 / 4) / 3 / 2  # weight * dK_t/dc of one gap / K_max / blocks that choose
    assert together[2][name] - plain[2][name] == pytest.approx(own)
    assert apart[1] == pytest.approx(START)


def test_recomputing_holds_with_a_term():
    """history="recompute" keeps its promise for a method with a term: every block runs again for backward."""
    found, calls = [], []
    for history in ("full", "recompute"):
        torch.manual_seed(0)
        fields = {"vocab_size": 20, "d_model": 12, "n_heads": 2, "n_blocks": 3, "depth": METHOD}
        model = twoaxis.Decoder(twoaxis.ModelConfig(**fields, history=history))
        run = []
        model.blocks[1].register_forward_hook(lambda *_, run=run: run.append(1))
        found.append(gradients(model, [batch_of(3, 7)], 0.5))
        calls.append(len(run))
    assert calls == [1, 2]
    assert found[0][:2] == found[1][:2]
    torch.testing.assert_close(found[0][2], found[1][2], rtol=0, atol=0)


def test_windows_shrink_under_the_term(tiny, tmp_path):
    fields = {"n_blocks": 3, "depth": METHOD}
    shares = []
    for weight in (0.0, 3.0):
        cfg = tiny(fields, steps=12, lr=0.01, schedule="constant", depth_loss=weight)
        train(cfg, tmp_path / str(weight))
        rows = read_metrics(tmp_path / str(weight) / "metrics.jsonl")
        shares.append([row["window_share"] for row in rows])
    assert shares[0][0] == shares[1][0] == pytest.approx(START)
    assert shares[1][-1] < 0.95 * shares[0][-1]


def test_a_method_without_a_term_is_refused(tiny):
    said = r"train\(depth_loss=0.1\): allowed is 0: additive has no loss term of its own"
    with pytest.raises(twoaxis.InputError, match=said):
        tiny(depth_loss=0.1)
    with pytest.raises(twoaxis.InputError, match=r"depth_loss=-1.0\): allowed is 0 or more"):
        tiny(depth_loss=-1.0)
