"""A model's decoding cache: constant bytes, refusals, fixed shapes and one compilation.

That every way of feeding gives the same logits is in `tests/test_feeding.py`.
"""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import configurations
import twoaxis
from configurations import SEQUENCES, Case, tokens
from test_feeding import chunks, fed, same
from twoaxis import InputError
from twoaxis.model import compiled_step

quiet = torch.no_grad()
MEMORIES = ["additive", "ddl(value_dim=4, compressor='token')"]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 24])
@quiet
def test_a_prompt_in_chunks_then_steps(size):
    # pitfall (KV cache): w=4, prompt 24, chunk sizes 1, 3, 4, 5, 8, 24; then 16 decode steps
    model, x = Case("additive", "local to global", 4).model(), tokens(2, 40)
    same(fed(model, x, chunks(24, size) + [1] * 16, model.new_cache(2)), model(x))


@pytest.mark.parametrize("rollback", [0, 3])
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("depth", MEMORIES)
@quiet
def test_bytes_are_constant_and_what_the_cost_says(depth, sequence, rollback):
    cfg = Case(depth, sequence).config()
    model = twoaxis.Decoder(cfg)
    cache, sizes = model.new_cache(2, max_length=20, max_rollback=rollback), set()
    for piece in tokens(2, 20).split([1, 1, 7, 1, 5, 5], 1):
        model(piece, cache=cache)
        sizes.add(cache.nbytes)
    assert sizes == {twoaxis.cost(cfg, 2, 20, max_rollback=rollback).decode_state_bytes}


def test_depth_states_need_no_memory_over_tokens_unless_they_mix_tokens():
    owners = set()
    for depth in configurations.depths():
        slots = Case(depth).fresh().new_cache(1, 4).slots
        if any(".cores." not in name for name in slots):
            owners.add(depth)
    assert {"ddl(value_dim=4)", "ddl(value_dim=4, compressor='token')"} <= owners
    assert "svformer" in owners  # the attentions' values, once for all
    others = owners - {"svformer"}
    assert all(depth.startswith("ddl(") for depth in others)  # its compressor and embedding convolution
    assert "ddl" not in owners


@pytest.mark.parametrize("sequence", ["local", "bias and sink", "chunks"])
@quiet
def test_far_past_the_window(sequence):
    # 50 windows of tokens: constant memory, and logits equal to a run that begins afresh within reach
    w = 3
    model = Case("additive", sequence, w).model(n_blocks=2)
    x, cache = tokens(1, 50 * w + 1), model.new_cache(1)
    size = cache.nbytes
    out = fed(model, x[:, :-1], [w, *[1] * 5, *[7] * ((49 * w - 5) // 7), *[1] * ((49 * w - 5) % 7)], cache)
    assert (cache.nbytes, cache.length) == (size, 50 * w)
    same(out[:, -20:], model(x[:, :-1])[:, -20:])
    start = 50 * w - 20  # more than two blocks can look back
    fresh = model(x[:, start:], positions=torch.arange(start, 50 * w + 1))
    same(model(x[:, -1:], cache=cache), fresh[:, -1:])


@pytest.mark.parametrize("sequence", ["bias and sink", "local to global"])
@quiet
def test_the_position_after_300_tokens(sequence):
    # pitfall (Positions): w=4, feed 300 tokens one at a time; the reported position is 300, not 4
    model, x = Case("additive", sequence, 4).model(n_blocks=1), tokens(1, 301)
    cache = model.new_cache(1)
    fed(model, x[:, :300], [1] * 300, cache)
    assert cache.length == 300
    same(model(x[:, 300:], cache=cache), model(x)[:, 300:])


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("depth", MEMORIES)
@quiet
def test_a_rollback_that_cannot_be_met_changes_nothing(depth, sequence):
    # the ring has wrapped: taking back more than max_rollback is refused, and max_rollback itself is not
    model, x = Case(depth, sequence).model(), tokens(2, 20)
    cache = model.new_cache(2, max_rollback=2)
    model(x[:, :15], cache=cache)
    full = depth == "additive" and sequence in ("standard", "parallel", "grouped")  # keeps every row
    if not full:
        with pytest.raises(InputError, match=r"cannot take back 9 of 15 tokens.*max_rollback of at least"):
            cache.drop_last(9)
    assert cache.length == 15
    cache.drop_last(2)
    same(model(x[:, 13:], cache=cache), model(x)[:, 13:])


@pytest.mark.parametrize("sequence", SEQUENCES)
@quiet
def test_an_emptied_cache_is_new(sequence):
    # pitfall (KV cache): truncate-to-0 leaves an empty, reusable cache; here one that had documents
    model, x = Case("additive", sequence).model(), tokens()
    cache = model.new_cache(2)
    model(tokens(seed=5), cache=cache, segments=torch.arange(13).expand(2, -1) // 5)
    cache.truncate_to(0)
    same(model(x, cache=cache), model(x))


@quiet
def test_a_cache_of_another_batch_or_too_short_is_refused():
    model, x = Case("additive").model(), tokens(3)
    with pytest.raises(InputError, match="the cache was made for batch 2 and tokens have 3 rows"):
        model(x, cache=model.new_cache(2))
    cache = model.new_cache(3, max_length=5)
    model(x[:, :4], cache=cache)
    with pytest.raises(InputError, match="made for max_length=5 tokens and needs 6"):
        model(x[:, 4:6], cache=cache)
    same(model(x[:, 4:5], cache=cache), model(x[:, :5])[:, 4:])  # the refusal left nothing behind


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("depth", MEMORIES)
@quiet
def test_fixed_shapes_feed_the_same(depth, sequence):
    model, x = Case(depth, sequence).model(), tokens()
    cache = model.new_cache(2, 13, max_rollback=3, fixed_shapes=True)
    same(fed(model, x, [3, 1, 1, 4, 1, 3], cache), model(x))
    cache.drop_last(3)
    same(model(x[:, 10:12], cache=cache), model(x)[:, 10:12])
    cache.reorder(torch.tensor([1, 1, 0]))
    rows = x[[1, 1, 0]]
    same(model(rows[:, 12:], cache=cache), model(rows)[:, 12:])
    cache = model.new_cache(2, 13, fixed_shapes=True)
    segments = torch.tensor([[-1] * 4 + [0] * 9, [0] * 5 + [1] * 8])
    same(fed(model, x, [6, 1, 1, 5], cache, segments=segments), model(x, segments=segments))


def graphs(model: twoaxis.Decoder, x: Tensor) -> int:
    """Graphs that decoding x token by token compiles; its logits are those of one forward."""
    torch._dynamo.reset()
    counters.clear()
    cache = model.new_cache(len(x), x.shape[1], fixed_shapes=True)
    step = compiled_step(model, cache, backend="eager", fullgraph=True)
    same(torch.cat([step(token) for token in x.split(1, 1)], 1), model(x))
    return counters["stats"]["unique_graphs"]


traced = pytest.mark.filterwarnings("ignore:.*autograd functions are all static")  # torch's own, in tracing


@traced
@pytest.mark.parametrize(
    "case",
    [
        Case("ddl(value_dim=4, compressor='token')", "bias and sink"),
        Case("attnres", "canon"),
        Case("mhc", "sink tokens"),
    ],
    ids=str,
)
@quiet
def test_a_step_of_fixed_shapes_compiles_once(case):
    assert graphs(case.model(n_blocks=2).eval(), tokens(2, 9)) == 1


@traced
@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [Case(depth) for depth in configurations.depths()] + [Case("additive", s) for s in SEQUENCES],
    ids=str,
)
@quiet
def test_every_step_of_fixed_shapes_compiles_once(case):
    assert graphs(case.model(n_blocks=2).eval(), tokens(2, 9)) == 1


@traced
@quiet
def test_a_compiled_step_refuses_interleaved_documents():
    model = Case("additive", "sink tokens").model(n_blocks=1).eval()
    torch._dynamo.reset()
    step = compiled_step(model, model.new_cache(1, 9, fixed_shapes=True), backend="eager", fullgraph=True)
    feed = [(x, torch.tensor([[number % 2]])) for number, x in enumerate(tokens(1, 6).split(1, 1))]
    with pytest.raises((InputError, RuntimeError), match="sink_tokens with interleaved segments"):
        [step(token, segments=document) for token, document in feed]


def test_what_a_compiled_step_needs():
    model = Case("additive").model()
    with pytest.raises(InputError, match="a cache of fixed shapes needs max_length"):
        model.new_cache(1, fixed_shapes=True)
    with pytest.raises(InputError, match=r"compiled_step needs a cache of one shape: new_cache"):
        compiled_step(model, model.new_cache(1, 5))


@traced
@quiet
def test_a_compiled_model_counts_what_it_has_fed():
    model, x = Case("additive").model(n_blocks=1).eval(), tokens(2, 5)
    torch._dynamo.reset()
    compiled, cache = torch.compile(model, backend="eager"), model.new_cache(2, max_rollback=1)
    logits = [compiled(x[:, :4], cache=cache), compiled(x[:, 4:], cache=cache)]
    assert cache.length == 5
    same(torch.cat(logits, 1), model(x))
