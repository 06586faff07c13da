"""ShortSWA's options against loops, its identities, chunks and sink tokens through memories."""

import itertools

import pytest
import torch
from cores import at_once, build, in_steps, inputs, layout, memory

import twoaxis
from twoaxis import InputError, spec
from twoaxis.types import Context, Reads, Shape

FIELDS = ["sliding", "chunk", "two_chunk"]
SINKS = [
    "short_swa(window=4, sink_tokens=2)",
    "short_swa(window=1, sink_tokens=3, position='none')",
    "short_swa(window=4, field='chunk', sink_tokens=2, sink=True)",
    "short_swa(window=3, field='two_chunk', sink_tokens=1, position='bias')",
]


def close(a, b, atol=1e-11):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def seen(t, w, field, sinks=0):
    """The positions that position t sees, as a set."""
    start = {"sliding": t - w + 1, "chunk": t // w * w, "two_chunk": (t // w - 1) * w}[field]
    return sorted({*range(max(0, start), t + 1), *range(min(sinks, t + 1))})


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("sinks", [0, 2], ids="sinks={}".format)
@pytest.mark.parametrize("value", ["linear", "key", "identity"])
@pytest.mark.parametrize("head_dim", [None, 4], ids="head_dim={}".format)
@torch.no_grad()
def test_options_are_their_equations(field, sinks, value, head_dim):
    """softmax over the receptive field, as loops over t, h and s; values W_v u, W_k u or u itself."""
    width = head_dim or 8
    core = build(
        f"short_swa(window=3, n_heads=3, field={field!r}, sink_tokens={sinks}, value={value!r}, "
        f"head_dim={head_dim}, position='none')"
    )
    x = inputs(length=11)
    parts = core.qkv(x).split(3 * width, -1)
    q, k = (p.unflatten(-1, (3, width)) for p in parts[:2])
    v = {"linear": parts[-1], "key": parts[1], "identity": x}[value].unflatten(-1, (3, -1))
    heads = torch.zeros(1, 11, 3, v.shape[-1], dtype=torch.float64)
    for t, h in itertools.product(range(11), range(3)):
        at = seen(t, 3, field, sinks)
        weights = torch.stack([q[0, t, h] @ k[0, s, h] / width**0.5 for s in at]).softmax(0)
        heads[0, t, h] = sum(a * v[0, s, h] for a, s in zip(weights, at, strict=True))
    close(at_once(core, x), core.out(heads.flatten(2)))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("sinks", [0, 2], ids="sinks={}".format)
def test_visible_pairs_are_counted(field, sinks):
    cfg = spec.parse_spec("sequence", f"short_swa(window=3, field={field!r}, sink_tokens={sinks})")
    for T in (1, 2, 3, 7, 40):
        assert cfg.pairs(T, 0) == sum(len(seen(t, 3, field, sinks)) for t in range(T))


def test_a_window_of_one_with_identities_is_the_identity():
    core, x = build("short_swa(window=1, value='identity', output='identity')"), inputs(2)
    assert at_once(core, x).equal(x)


def test_value_and_output_may_be_free_of_parameters():
    light = build("short_swa(window=4, n_heads=2, head_dim=2, value='identity', output='identity')")
    assert {name: tuple(p.shape) for name, p in light.named_parameters()} == {"qkv.weight": (8, 24)}
    mean = at_once(light, torch.ones(1, 9, 24, dtype=torch.float64))
    close(mean, torch.ones_like(mean))  # a weighted mean of the inputs, head by head


@pytest.mark.parametrize("field", ["chunk", "two_chunk"])
@pytest.mark.parametrize("sizes", [[1] * 13, [5, 1, 7], [2, 9, 1, 1], [13]], ids=str)
def test_chunks_in_pieces(field, sizes):
    core, x = build(f"short_swa(window=4, field={field!r}, position='bias')"), inputs(2, 13)
    close(in_steps(core, x, sizes), at_once(core, x))


@pytest.mark.parametrize("field", ["chunk", "two_chunk"])
def test_chunks_begin_with_their_document(field):
    # packed documents of 2, 1, 7 and 3 tokens; rows padded on the left by 5
    core, x = build(f"short_swa(window=3, field={field!r})"), inputs(2, 13)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([2, 1, 7, 3])).expand(2, -1)
    alone = torch.cat([at_once(core, part) for part in x.split([2, 1, 7, 3], 1)], 1)
    for sizes in ([13], [1] * 13, [4, 8, 1]):
        close(in_steps(core, x, sizes, ids), alone)
    padded = torch.where(torch.arange(13) < 5, -1, 0).expand(2, -1)
    close(in_steps(core, x, [6, 1, 6], padded)[:, 5:], at_once(core, x[:, 5:]))


@pytest.mark.parametrize("core", SINKS)
@pytest.mark.parametrize("sizes", [[1] * 12, [1, 3, 8], [7, 5], [5, 5, 1, 1]], ids=str)
def test_sink_tokens_stay_visible_in_every_path(core, sizes):
    # pitfall (KV cache): s=2 sinks, w=4, T=12: one forward against decode steps, sinks counted once
    module, x = build(core), inputs(2)
    close(in_steps(module, x, sizes), at_once(module, x))


@pytest.mark.parametrize("core", SINKS)
@pytest.mark.parametrize("sizes", [[1] * 20, [6, 1, 13], [3, 3, 3, 11]], ids=str)
def test_every_document_has_its_own_sinks(core, sizes):
    module, x = build(core), inputs(2, 20)
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor([6, 1, 2, 9, 2])).repeat(2, 1)
    ids[1, :3] = -1
    alone = torch.cat([at_once(module, part) for part in x.split([6, 1, 2, 9, 2], 1)], 1)
    alone[1, :3] = 0
    alone[1, 3:6] = at_once(module, x[1:, 3:6])
    y = in_steps(module, x, sizes, ids)
    close(y[0], alone[0])
    close(y[1, 3:], alone[1, 3:])
    close(at_once(module, x, ids)[1, 3:], alone[1, 3:])


@pytest.mark.parametrize("core", SINKS)
def test_rollback_over_a_document_border(core):
    # 9 tokens, then 3 of a new document taken back: the sinks of the document before are still there
    module, x, other = build(core), inputs(2, 14), inputs(2, 14) + 1
    ids = torch.zeros(2, 14, dtype=torch.long)
    cache = memory(module, 2, max_rollback=3)

    def feed(part, documents):
        documents, positions = cache.begin(part.shape[1], documents, None)
        y = module(Reads(part), Context(documents, positions, cache))
        cache.advance(part.shape[1])
        return y

    feed(x[:, :9], ids[:, :9])
    for _ in range(2):
        feed(other[:, 9:12], ids[:, 9:12] + 1)
        cache.drop_last(3)
    close(torch.cat([feed(x[:, i : i + 1], ids[:, :1]) for i in range(9, 14)], 1), at_once(module, x)[:, 9:])
    with pytest.raises(InputError, match="cannot take back"):
        cache.drop_last(9)
    cache.truncate_to(0)
    close(feed(x, None), at_once(module, x))


def test_sinks_follow_their_beams():
    module, x = build(SINKS[0]), inputs(3, 12)
    cache = memory(module, 3)

    def feed(part):
        cache.begin(part.shape[1], None, None)
        y = module(Reads(part), Context(cache=cache))
        cache.advance(part.shape[1])
        return y

    feed(x[:, :9])
    cache.reorder(torch.tensor([2, 0, 0]))
    close(feed(x[:, 9:]), at_once(module, torch.cat((x[[2, 0, 0], :9], x[:, 9:]), 1))[:, 9:])


@pytest.mark.parametrize(
    "core", [*SINKS, "short_swa(window=3, field='two_chunk', value='identity', head_dim=2)"]
)
@pytest.mark.parametrize("max_rollback", [0, 3])
def test_memory_is_constant_and_as_declared(core, max_rollback):
    module, x = build(core), inputs(2, 40)
    cache = memory(module, 2, max_rollback)
    shape = Shape(layout=layout(), batch_size=2, seq_len=40, dtype="float64", max_rollback=max_rollback)
    sizes = set()
    for part in x.split(8, 1):
        cache.begin(8, None, None)
        module(Reads(part), Context(cache=cache))
        cache.advance(8)
        sizes.add(cache.nbytes)
    assert sizes == {module.cfg.cost(shape).decode_state_bytes}


@pytest.mark.parametrize("core", SINKS)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_sink_tokens_at_fixed_shapes(core, packed):
    sequence = [core, "mlp(hidden=5)"]
    cfg = twoaxis.ModelConfig(vocab_size=7, d_model=8, n_heads=2, n_blocks=2, sequence=sequence)
    torch.manual_seed(0)
    model, tokens = twoaxis.Decoder(cfg).double(), torch.randint(7, (2, 20))
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([6, 1, 9, 4])).expand(2, -1)
    cache = model.new_cache(2, max_rollback=3, fixed_shapes=True)

    def feed(start, stop):
        documents = {"segments": ids[:, start:stop]} if packed else {}
        return model(tokens[:, start:stop], cache=cache, **documents)

    with torch.no_grad():
        parts = [feed(0, 2), feed(2, 9)]
        feed(9, 10)
        cache.drop_last(1)
        parts += [feed(i, i + 1) for i in range(9, 20)]
        whole = model(tokens, **({"segments": ids} if packed else {}))
    close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("short_swa(window=0)", "window=0"),
        ("short_swa(window=None)", "allowed is int"),
        ("short_swa(sink_tokens=-1)", r"sink_tokens=-1\): allowed is 0 or more"),
        ("short_swa(field='block')", "allowed is 'sliding' or 'chunk' or 'two_chunk'"),
        ("short_swa(position='bias', rope_dims=2)", "rope_dims needs position='rope'"),
        ("short_swa(start='zero', output='identity')", "no W_o to start at zero"),
        ("short_swa(value='identity', n_heads=4, n_kv_heads=2)", "as many of keys and values"),
        ("short_swa(output='identity', head_dim=2)", "make 4 features, not d_model=24"),
        ("short_swa(rope_dims=3)", "an even number of 0 or more"),
        ("short_swa(rope_dims=14)", "heads have width 12"),
        ("short_swa(head_dim=0)", r"head_dim=0\): allowed is 1 or more"),
        ("short_swa(v='canon(set=\\'A\\')')", "a preset makes a whole block"),
    ],
)
def test_what_does_not_fit_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        build(text)


@pytest.mark.parametrize(
    "place", ["v", "q", "k", "qkv", "input"], ids=["P2", "P3 on q", "P3 on k", "P4 at B", "P4 at A"]
)
@pytest.mark.parametrize("field", FIELDS)
@torch.no_grad()
def test_placements_inside_attention(place, field):
    """The mixer works on what W_q, W_k, W_v make (or on the input), before the rotation."""
    inner = f"residual(short_swa(window=3, field={field!r}, n_heads=1))"
    core, x = build(f'attention({place}="{inner}")'), inputs()
    parts = list(core.qkv(at_once(core.mixers["input"], x) if place == "input" else x).split(24, -1))
    if place in ("q", "k", "v"):
        index = "qkv".index(place)
        parts[index] = at_once(core.mixers[place], parts[index])
    elif place == "qkv":
        parts = list(at_once(core.mixers["qkv"], torch.cat(parts, -1)).split(24, -1))
    plain = build("attention")
    plain.out.weight.copy_(core.out.weight)
    close(at_once(core, x), plain.attend(*(p.unflatten(-1, (2, 12)) for p in parts), Context()))


@pytest.mark.parametrize("place", ["input", "hidden_input"], ids=["P4 at C", "P4 at D"])
def test_placements_inside_an_mlp_start_as_the_identity(place):
    inner = "residual(short_swa(window=3, n_heads=1, start='zero'))"
    cfg = {"vocab_size": 7, "d_model": 8, "n_heads": 2, "n_blocks": 2}
    torch.manual_seed(0)
    model = twoaxis.Decoder(twoaxis.ModelConfig(**cfg, sequence=["attention", f'mlp({place}="{inner}")']))
    plain = twoaxis.Decoder(twoaxis.ModelConfig(**cfg))
    plain.load_state_dict(model.state_dict(), strict=False)
    tokens = torch.randint(7, (2, 9))
    close(model(tokens), plain(tokens), atol=1e-6)
    model.loss(tokens, tokens).backward()
    inside = model.blocks[0].cores[1].mixers[place].core
    assert inside.out.weight.grad.abs().max() > 0
