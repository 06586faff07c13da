"""What a core needs from the left, so that a sequence can be split: the halo it states is enough, and needed."""

import pytest
import torch
from cores import at_once, build, inputs, memory

from twoaxis import InputError, spec
from twoaxis.types import Context, Reads

HALOS = {
    "short_swa(window=1)": 0,
    "short_swa(window=5)": 4,
    "short_swa(window=3, field='chunk')": 2,
    "short_swa(window=3, field='two_chunk', position='bias')": 5,
    "attention(window=4, pattern='SL')": 3,
    "short_conv": 3,
    "short_conv(kernel=1, bias=True)": 0,
    "short_conv(form='lfm2', kernel=6)": 5,
    "canon(kernel=2)": 1,
    "token_shift": 1,
    "residual(short_swa(window=3))": 2,
    "mlp": 0,
    "mlp(hidden=6, input='canon', hidden_input='short_conv(kernel=3)')": 5,
    "parallel(mlp, short_swa(window=3), canon)": 3,
    "attention(window=3, input='canon', q='token_shift', v='short_conv(kernel=3)', qkv='canon(kernel=2)')": 8,
}
EVERYTHING = [
    "attention",
    "parallel(mlp, attention)",
    "residual(attention)",
    "short_swa(window=3, sink_tokens=1)",
    "mlp(input='attention')",
    "canon(set='ABCD')",
    "local_to_global",
]
every = pytest.mark.parametrize("core", HALOS)


@every
def test_halo_is_as_derived(core):
    assert build(core).halo == HALOS[core]
    assert spec.parse_spec("sequence", core).halo_in(0) == HALOS[core]


@pytest.mark.parametrize("core", EVERYTHING)
def test_cores_that_look_back_without_end(core):
    assert spec.parse_spec("sequence", core).halo_in(0) is None


def test_halo_differs_between_blocks_of_a_pattern():
    cfg = spec.parse_spec("sequence", "attention(window=4, pattern='SL')")
    assert [cfg.halo_in(block) for block in range(3)] == [3, None, 3]


@pytest.mark.parametrize("cut", [1, 6, 11])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@every
def test_a_split_sequence_with_its_halo_is_whole(core, packed, cut):
    """The right part is given the halo's inputs before it, and nothing else of the left."""
    module, x = build(core), inputs(2, 13)
    ids = (torch.arange(13) // 5).expand(2, -1) if packed else None
    whole, start = at_once(module, x, ids), max(0, cut - HALOS[core])
    positions = (torch.arange(13) % 5 if packed else torch.arange(13)).expand(2, -1)
    right = Context(None if ids is None else ids[:, start:], positions[:, start:])
    torch.testing.assert_close(
        module(Reads(x[:, start:]), right)[:, cut - start :], whole[:, cut:], rtol=0, atol=1e-11
    )
    torch.testing.assert_close(
        at_once(module, x[:, :cut], None if ids is None else ids[:, :cut]), whole[:, :cut], rtol=0, atol=1e-11
    )


@every
def test_a_smaller_halo_is_not_enough(core):
    # exact: at some cut the result needs the oldest token of the halo
    module, x = build(core), inputs(1, 13)
    if not HALOS[core]:
        return
    moved = []
    for t in range(HALOS[core], 13):
        changed = x.clone()
        changed[:, t - HALOS[core]] += 1
        moved.append(bool((at_once(module, changed) != at_once(module, x))[:, t].any()))
    assert any(moved)


@pytest.mark.parametrize("cut", [1, 6, 11])
@every
def test_memories_are_the_halo_in_another_form(core, cut):
    """The right part goes on from the memory that the left part leaves: what a sequence shard would be sent."""
    module, x = build(core), inputs(2, 13)
    sent = memory(module, 2)
    left = _pass(module, x[:, :cut], sent)
    received = memory(module, 2)
    for name, slot in sent.slots.items():
        kept = slot.entries()
        received[name].length = cut - next(iter(kept.values())).shape[1]
        received[name].append(**kept)
    received.length = cut
    parts = torch.cat((left, _pass(module, x[:, cut:], received)), 1)
    torch.testing.assert_close(parts, at_once(module, x), rtol=0, atol=1e-11)


def _pass(module, x, cache):
    ids, positions = cache.begin(x.shape[1], None, None)
    y = module(Reads(x), Context(ids, positions, cache))
    cache.advance(x.shape[1])
    return y


def test_presets_are_no_cores():
    for text in ("canon(set='A')", "local_to_global"):
        with pytest.raises(InputError, match="makes a whole block: give it as an item of a block list"):
            build(text)
    with pytest.raises(InputError, match="a preset makes a whole block"):
        spec.parse_spec("sequence", "parallel(mlp, local_to_global)")
    with pytest.raises(InputError, match="a preset makes a whole block"):
        spec.parse_spec("sequence", "residual(local_to_global)")
