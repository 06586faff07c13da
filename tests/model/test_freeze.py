"""From learned gates to one axis for each block: the same logits, less work, by function and by command."""

import json

import pytest
import torch

import twoaxis
from configurations import perturb
from twoaxis import axis_shares, freeze_axes
from twoaxis.cli.main import main

BLOCK = ["short_swa(window=3)", "attention", "mlp"]


def decoder(spec="hybrid(gate='head', window_blocks=2)", n_blocks=3):
    torch.manual_seed(0)
    cfg = twoaxis.ModelConfig(
        vocab_size=17, d_model=12, n_heads=2, n_blocks=n_blocks, depth=spec, sequence=BLOCK
    )
    return perturb(twoaxis.Decoder(cfg).double())


def rows(length=9):
    return torch.randint(17, (2, length), generator=torch.Generator().manual_seed(1))


def lean(model, biases):
    """Gates of mean bias `biases`, one for each block, that still depend on the token."""
    with torch.no_grad():
        for block, bias in zip(model.blocks, biases, strict=True):
            block.connections[0].gate.bias.fill_(bias)
            block.connections[0].gate.weight.mul_(0.1)


def test_shares_are_mean_gates():
    model = decoder()
    lean(model, (2.0, -2.0, 0.0))
    shares = axis_shares(model, rows())
    assert shares[0] > 0.7 > 0.3 > shares[1]
    ids = torch.tensor([[0] * 9, [-1] * 5 + [0] * 4])
    padded = axis_shares(model, rows(), segments=ids)
    assert padded != shares
    _, states = model(rows(), segments=ids, return_states=True)
    connection, core = model.blocks[1].connections[0], model.blocks[1].cores[0]
    ctx = model.context(rows(), ids)
    s = connection.read_tokens(states["block.1"], core, ctx)
    G = connection.gate(s, connection.read_depth(states["block.1"], ctx))
    assert padded[1] == pytest.approx(torch.cat((G[0], G[1, 5:])).mean().item())
    assert axis_shares(decoder("hybrid(axes='SBD')"), rows())[::2] == [None, None]


def test_frozen_logits_are_those_of_gates_at_one_or_zero():
    model = decoder()
    lean(model, (2.0, -2.0, -1.0))
    frozen = freeze_axes(model, rows())
    assert frozen.cfg.depth == "hybrid(window_blocks=2, axes='SDD')"
    assert frozen.cfg.sequence == model.cfg.sequence
    assert not torch.equal(frozen(rows()), model(rows()))
    for block, bias in zip(model.blocks, (1e4, -1e4, -1e4), strict=True):
        torch.nn.init.zeros_(block.connections[0].gate.weight)
        torch.nn.init.constant_(block.connections[0].gate.bias, bias)
    assert torch.equal(frozen(rows()), model(rows()))
    before, after = (twoaxis.cost(m.cfg, 2, 9) for m in (model, frozen))
    assert after.flops < before.flops
    assert after.parameters == sum(p.numel() for p in frozen.parameters()) < before.parameters
    assert after.decode_state_bytes < before.decode_state_bytes


def test_by_hand_and_step_by_step(tmp_path):
    model = decoder()
    first = freeze_axes(model, axes="SBB")
    assert first.cfg.depth == "hybrid(window_blocks=2, gate='head', axes='SBB')"
    both = freeze_axes(first, axes="SDS")
    assert torch.equal(both(rows()), freeze_axes(model, axes="SDS")(rows()))
    assert freeze_axes(model, axes="SSS").cfg.depth == "hybrid(axes='S')"
    state = torch.get_rng_state()
    freeze_axes(model, axes="SSS")
    assert torch.equal(torch.get_rng_state(), state)
    twoaxis.save(both, tmp_path)
    assert torch.equal(twoaxis.load(tmp_path).double()(rows()), both(rows()))


@pytest.mark.parametrize(
    ("spec", "given", "said"),
    [
        ("hybrid", {"axes": "SD"}, "2 letters or shares for 3 blocks"),
        ("hybrid", {"axes": "SXD"}, "axes='SXD': allowed is S, D"),
        ("hybrid", {}, "needs tokens"),
        ("hybrid(axes='SBD')", {"axes": "DSD"}, "block 0 has no axis 'D' to keep"),
        ("additive", {"axes": "SSS"}, "additive has no gate between the two axes to freeze, as hybrid has"),
    ],
)
def test_refuses(spec, given, said):
    with pytest.raises(twoaxis.InputError, match=said):
        freeze_axes(decoder(spec), **given)


def test_refuses_to_freeze_by_no_token():
    # a mean over nothing is no share
    padding = torch.full((2, 9), -1)
    for tokens, segments in ((rows(), padding), (rows(0), None), (rows()[:0], None)):
        with pytest.raises(twoaxis.InputError, match=r"block 0 has no share .* give one token or more"):
            freeze_axes(decoder(), tokens, segments=segments)


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOAXIS_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} and {i * i % 97}.\n" for i in range(300)), encoding="utf-8")
    sizes = ["--d-model", "12", "--n-blocks", "2", "--n-heads", "2", "--seq-len", "16", "--batch-size", "2"]
    method = ["--depth", "hybrid", "--sequence", "short_swa(window=4)", "mlp"]
    argv = ["train", "--out", str(tmp_path / "run"), "--data", str(text), "--steps", "3", *sizes, *method]
    assert main(argv) == 0
    return tmp_path / "run"


def test_command(run_folder, tmp_path, capsys):
    out = tmp_path / "frozen"
    capsys.readouterr()
    assert main(["freeze", str(run_folder), "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    frozen = twoaxis.load(out)
    letters = "".join("S" if share >= 0.5 else "D" for share in said["sequence_shares"])
    assert frozen.cfg.depth == said["depth"]
    assert [frozen.cfg.depth_config().letter(block) for block in range(2)] == list(letters)
    assert said["flops"]["after"] < said["flops"]["before"]
    hand = tmp_path / "hand"
    assert main(["freeze", str(run_folder), "--out", str(hand), "--axes", "DS"]) == 0
    assert "hybrid(axes='DS')" in capsys.readouterr().out
    go_on = ["train", "--init", str(hand), "--out", str(tmp_path / "on"), "--tokenizer", str(hand)]
    more = [
        "--data",
        str(run_folder.parent / "text.txt"),
        "--steps",
        "2",
        "--seq-len",
        "16",
        "--batch-size",
        "2",
    ]
    assert main([*go_on, *more]) == 0
    assert json.loads((tmp_path / "on" / "results.json").read_text())["depth"] == "hybrid(axes='DS')"
    assert main(["freeze", str(run_folder), "--out", str(hand)]) == 2
    assert "is there already" in capsys.readouterr().err
