"""The two-axis hybrid: its equation, its two ends bit for bit, what a block of one axis leaves out, its memory."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import twoaxis
from configurations import perturb
from twoaxis.depth import build, named_tensors
from twoaxis.ops import rms
from twoaxis.types import Context, Reads

BLOCK = ["short_swa(window=3)", "attention", "mlp"]


def decoder(spec="hybrid", sequence=BLOCK, n_blocks=3, dtype=torch.float64, **fields):
    """A decoder at a random point."""
    torch.manual_seed(0)
    given = {
        "vocab_size": 17,
        "d_model": 12,
        "n_heads": 2,
        "n_blocks": n_blocks,
        "depth": spec,
        "sequence": sequence,
    }
    return perturb(twoaxis.Decoder(twoaxis.ModelConfig(**given, **fields)).to(dtype))


def rows(length=9, batch=2):
    return torch.randint(17, (batch, length), generator=torch.Generator().manual_seed(1))


def set_gates(model, bias):
    with torch.no_grad():
        for block in model.blocks:
            for connection in block.connections:
                if connection.gate is not None:
                    connection.gate.weight.zero_()
                    connection.gate.bias.fill_(bias)


def token_read(core, x):
    """What short_swa hands to its W_o, from its halves."""
    q, k, v = core.project(Reads(x), Context())
    return core.gather(q, k, v, Context())


@pytest.mark.parametrize("gate", ["scalar", "head", "channel"])
@pytest.mark.parametrize("window", [None, 2])
def test_equation(gate, window):
    model = decoder(f"hybrid(gate={gate!r}, window_blocks={window})")
    _, states = model(rows(), return_states=True)
    block, state = model.blocks[2], states["block.2"]
    connection, core = block.connections[0], block.cores[0]
    history = state["sources"].sources
    x = history[-1]
    s = rms(token_read(core, connection.norm(x)))
    read = model.stream.window_read
    seen = torch.stack(history[-window:] if window else history, -2)  # (B, T, n, d)
    a = (torch.einsum("btd,btnd->btn", read.query(x), read.key(seen)) / 12**0.5).softmax(-1)
    z = rms(torch.einsum("btn,btnd->btd", a, read.value(seen)))
    both = torch.cat((s, z), -1)
    G = (both @ connection.gate.weight.T + connection.gate.bias).sigmoid()
    assert G.shape[-1] == {"scalar": 1, "head": 2, "channel": 12}[gate]
    G = G.repeat_interleave(12 // G.shape[-1], -1)  # head h has channels 6h .. 6h+5
    y = x + connection.gamma * core.out(G * s + (1 - G) * z)
    after = connection(state, core, Context())
    torch.testing.assert_close(after["stream"], y, rtol=0, atol=1e-12)
    assert len(history) == (3 if window is None else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("gate", ["scalar", "head", "channel"])
def test_an_open_gate_is_the_block_of_the_sequence_alone(gate, dtype):
    """G = 1: bit for bit the model without depth reads, and that one is SWA with a norm before its W_o."""
    model, pure = decoder(f"hybrid(gate={gate!r})", dtype=dtype), decoder("hybrid(axes='S')", dtype=dtype)
    set_gates(model, 1e4)
    weights = model.state_dict()
    pure.load_state_dict({name: weights[name] for name in pure.state_dict()})
    assert torch.equal(model(rows()), pure(rows()))
    _, states = pure(rows(), return_states=True)
    assert list(named_tensors(states["block.1"])) == ["sources.source.1"]  # no history
    connection, core = pure.blocks[1].connections[0], pure.blocks[1].cores[0]
    x = states["block.1"]["sources"].sources[-1]
    y = x + connection.gamma * core.out(rms(token_read(core, connection.norm(x))))
    assert torch.equal(connection(states["block.1"], core, Context())["stream"], y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("gate", ["scalar", "head", "channel"])
def test_a_shut_gate_is_the_block_of_depth_alone(gate, dtype):
    """G = 0: bit for bit the model whose first sublayer reads over depth alone and has no q, k, v, cache or norm."""
    model, pure = decoder(f"hybrid(gate={gate!r})", dtype=dtype), decoder("hybrid(axes='D')", dtype=dtype)
    set_gates(model, -1e4)
    weights = model.state_dict()
    pure.load_state_dict({name: weights[name] for name in pure.state_dict()})
    assert torch.equal(model(rows()), pure(rows()))
    assert [n for n, _ in pure.blocks[1].cores[0].named_parameters()] == ["out.weight"]
    assert pure.blocks[1].connections[0].norm is None
    assert set(pure.new_cache(2).slots) == {f"blocks.{block}.cores.1" for block in range(3)}


@pytest.mark.parametrize("axes", ["BSD", "SSD", "D", "DSBB"])
def test_the_state_holds_what_a_later_read_sees(axes):
    stream, _ = build(f"hybrid(axes={axes!r}, window_blocks=2)", 12, [["attention", "mlp"]] * 5, n_heads=2)
    letters = [axes[b % len(axes)] for b in range(5)]
    for depth in range(6):
        held = {int(name.rpartition(".")[2]) for name in stream.state_spec(depth, 1, 1)}
        reads = [{max(0, b - 1), b} for b in range(depth, 5) if letters[b] != "S"]
        wanted = {i for seen in reads[:1] for i in seen if i <= depth}
        assert held >= wanted | {depth}
        assert len(held) <= 2


def test_the_gate_stands_in_the_first_attention():
    model = decoder(sequence=[["mlp", "short_swa(window=2)", "attention"], ["attention", "mlp"], BLOCK])
    placed = [[c.gate is not None for c in block.connections] for block in model.blocks]
    assert placed == [[False, True, False], [True, False], [True, False, False]]
    _, states = model(rows(), return_states=True)
    first, second = model.blocks[0].connections[:2]
    inside = first(states["block.0"], model.blocks[0].cores[0], Context())
    z = second.read_depth(inside)  # one state, the stream after the mlp: softmax is 1
    torch.testing.assert_close(z, rms(model.stream.window_read.value(inside["stream"])), rtol=0, atol=1e-12)


def test_zero_start_leaves_the_stream_as_it_was():
    torch.manual_seed(0)
    cfg = twoaxis.ModelConfig(
        vocab_size=17, d_model=12, n_heads=2, n_blocks=2, depth="hybrid(start='zero')", sequence=BLOCK
    )
    model, plain = (
        twoaxis.Decoder(cfg),
        twoaxis.Decoder(
            twoaxis.ModelConfig(**{**cfg.to_dict(), "depth": "additive", "sequence": ["attention", "mlp"]})
        ),
    )
    weights = model.state_dict()
    with torch.no_grad():
        for name, p in plain.named_parameters():
            parts = name.split(".")
            if parts[0] == "blocks":  # without the first sublayer the others move up
                parts[3] = str(int(parts[3]) + 1)
            p.copy_(weights[".".join(parts)])
    torch.testing.assert_close(model(rows()), plain(rows()), rtol=0, atol=0)


def test_pure_blocks_are_counted_without_what_they_leave_out():
    """Parameters, FLOPs and cache of models whose blocks have one axis; torch's counter sees the FLOPs fall too."""
    counts = {}
    for axes in ("B", "S", "D", "SD"):
        model = decoder(f"hybrid(axes={axes!r})", sequence=["short_swa(window=9)", "mlp"], n_blocks=2)
        cost = twoaxis.cost(model.cfg, 2, 9)
        assert cost.parameters == sum(p.numel() for p in model.parameters())
        with torch.no_grad():
            model(rows(), cache=(cache := model.new_cache(2, max_length=9)))
        assert cost.decode_state_bytes * 2 == cache.nbytes  # of float64
        with FlopCounterMode(display=False) as counter:
            model(rows())
        counts[axes] = (cost.flops_forward, counter.get_total_flops())
    assert counts["B"][0] > counts["S"][0] > counts["SD"][0] > counts["D"][0]
    assert counts["B"][1] > max(counts[axes][1] for axes in ("S", "D", "SD"))


def saved_bytes(model, length):
    """Bytes that a training step keeps between forward and backward, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    x = torch.zeros(1, length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model.loss(x, x)
    loss.backward()
    return sum(storage.nbytes() for storage in kept.values())


def test_what_a_step_keeps_is_linear_in_the_tokens():
    """From 1k to 16k tokens; notes in circulation say quadratic above 2048."""
    sequence = ["short_swa(window=64)", "mlp(hidden=8)"]
    model = decoder("hybrid(gate='head')", sequence=sequence, n_blocks=2, dtype=torch.float32)
    sizes = [saved_bytes(model, length) for length in (1024, 2048, 4096, 16384)]
    for size, times in zip(sizes[1:], (2, 4, 16), strict=True):
        assert size == pytest.approx(times * sizes[0], rel=2e-3)


@pytest.mark.parametrize(
    ("spec", "sequence", "said"),
    [
        ("hybrid", ["mlp"], r"block 0 \['mlp'\] has none of its own; add 'short_swa' or 'attention'"),
        ("hybrid", ["parallel(attention, mlp)"], "has none of its own"),
        ("hybrid", ["attention(head_dim=4)", "mlp"], "makes 2 heads of width 4; leave out head_dim"),
        ("hybrid(axes='')", BLOCK, "allowed is a word of B"),
        ("hybrid(axes='BX')", BLOCK, "allowed is a word of B"),
        ("hybrid(axes='SD', gate='head')", BLOCK, "no block has a gate; leave gate out"),
        ("hybrid(axes='S', window_blocks=2)", BLOCK, "no block reads over depth"),
        ("hybrid(axes='SSSSSB', gate='head')", BLOCK, "no block has a gate; leave gate out"),
        ("hybrid(axes='SSSSSD', heads=3)", BLOCK, "no block reads over depth"),
        ("hybrid(window_blocks=0)", BLOCK, r"hybrid\(window_blocks=0\): allowed is 1 or more"),
        ("hybrid(heads=5)", BLOCK, r"hybrid\(heads=5\): d_model=12 is not cut into such heads"),
    ],
)
def test_refuses(spec, sequence, said):
    with pytest.raises(twoaxis.InputError, match=said):
        decoder(spec, sequence)


def test_cores_of_somebody_else_are_refused():
    _, blocks = build("hybrid", 12, [["attention", "mlp"]], n_heads=2)
    from twoaxis.depth import History

    state = {"sources": History((torch.randn(1, 2, 12),), (0,))}
    with pytest.raises(twoaxis.InputError, match="before an attention's W_o and function is none"):
        blocks[0][0](state, lambda reads, ctx: reads.x, Context())
