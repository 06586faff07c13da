"""Slots and caches: the lines of the pitfalls under "KV cache", "Positions" and "Local convolution state"."""

import pytest
import torch

import twoaxis
from twoaxis import InputError
from twoaxis.cache import Cache, Slot, document_positions


def slot(keep: int | None, **options) -> Slot:
    return Slot(1, {"x": ((), torch.float64)}, keep=keep, **options)


def rows(*tags: float) -> torch.Tensor:
    return torch.tensor([tags], dtype=torch.float64)


def held(memory: Slot) -> list[float]:
    return memory.entries()["x"][0].tolist()


def test_order_is_kept_while_the_oldest_goes():
    # pitfall: w=8, prefill keys 10.0 .. 10.5, then 10.6 .. 10.9 one at a time
    memory = slot(keep=7)
    tags = [10 + i / 10 for i in range(10)]
    memory.append(x=rows(*tags[:6]))
    assert held(memory) == tags[:6]
    for i in (6, 7):
        memory.append(x=rows(tags[i]))
        assert held(memory) == tags[: i + 1]  # nothing moves before w is reached
    memory.append(x=rows(tags[8]))
    assert held(memory) == tags[1:9]  # 10.1 .. 10.8
    memory.append(x=rows(tags[9]))
    assert held(memory) == tags[2:10]
    assert (memory.length, memory.rows) == (10, 8)


@pytest.mark.parametrize("keep", [0, 2, None], ids=["w=1", "w=3", "full"])
def test_to_length_and_by_count_are_two_operations(keep):
    # pitfall: cache of 3 tokens: truncate to 0; drop 5; drop 3; drop 0; truncate to 7
    def filled() -> Slot:
        memory = slot(keep, max_rollback=3)
        memory.append(x=rows(1, 2, 3))
        return memory

    for undo, count in (("truncate_to", 0), ("drop_last", 3)):
        memory = filled()
        getattr(memory, undo)(count)
        assert (memory.length, held(memory)) == (0, [])
        assert memory.append(x=rows(7, 8))["x"].tolist() == [[7, 8]]  # reusable, nothing stale
        assert held(memory)[-1] == 8
    for undo, count in (("drop_last", 5), ("truncate_to", 7), ("drop_last", -1), ("truncate_to", 1.5)):
        memory = filled()
        before = held(memory)
        with pytest.raises(InputError, match=rf"{undo}\({count}\): the cache has seen 3 tokens"):
            getattr(memory, undo)(count)
        assert (memory.length, held(memory)) == (3, before)
    memory = filled()
    memory.drop_last(0)
    assert memory.length == 3
    memory.truncate_to(2)
    assert memory.length == 2
    assert memory.append(x=rows(9))["x"].tolist() == [[1, 2, 9][-(3 if keep is None else keep + 1) :]]


def test_an_append_returns_what_a_window_needs_and_all_new_rows():
    # pitfall: an append returns the last w-1 stored keys plus ALL new keys and trims only afterwards
    tags = list(range(40))
    for sizes in ([1] * 40, [3] * 13 + [1], [4] * 10, [5] * 8, [8] * 5, [40], [24, *[1] * 16]):
        memory, start = slot(keep=3), 0
        for size in sizes:
            seen = memory.append(x=rows(*tags[start : start + size]))["x"][0].tolist()
            assert seen == tags[max(0, start - 3) : start + size]
            start += size
        assert held(memory) == tags[-4:]


@pytest.mark.parametrize("drafted", [1, 2, 3])
def test_rejected_drafts_leave_no_trace(drafted):
    # pitfall: w=6, 7 tokens in, draft 3 one by one, reject, continue
    memory = slot(keep=5, max_rollback=3)
    memory.append(x=rows(*range(7)))
    for i in range(drafted):
        seen = memory.append(x=rows(100 + i))["x"][0].tolist()
        assert seen == [*range(7), 100, 101, 102][i + 2 : 8 + i]  # as in plain decoding
    memory.drop_last(drafted)
    assert memory.append(x=rows(7))["x"][0].tolist() == [2, 3, 4, 5, 6, 7]


def test_what_cannot_be_undone_fails():
    # pitfall (Local convolution state): if a state cannot be restored the call fails, for every state kind
    memory = slot(keep=3, max_rollback=2)
    memory.append(x=rows(*range(10)))
    before = held(memory)
    with pytest.raises(InputError, match="make the cache with max_rollback of at least 4"):
        memory.drop_last(4)
    assert (memory.length, held(memory)) == (10, before)
    memory.drop_last(2)
    assert memory.append(x=rows(50))["x"][0].tolist() == [5, 6, 7, 50]
    with pytest.raises(InputError, match=r"cannot take back 3 of 9 tokens.*max_rollback of at least 4"):
        memory.drop_last(3)  # tokens taken back once have used up the slack
    memory.truncate_to(0)  # nothing is needed to be empty again
    assert memory.append(x=rows(1))["x"].tolist() == [[1]]


@pytest.mark.parametrize("prefill", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [[1] * 5, [1, 1, 1, 2], [5], [2, 3]], ids=str)
def test_a_kernel_finds_its_last_inputs(prefill, sizes):
    # pitfall (Local convolution state): kernel 4; prefill 0..4; 5 steps; chunks 1+1+1+2; last k-1 kept
    memory, tags = slot(keep=3), list(range(9))
    memory.append(x=rows(*tags[:prefill]))
    start = prefill
    for size in sizes:
        seen = memory.append(x=rows(*tags[start : start + size]))["x"][0].tolist()
        assert seen == tags[max(0, start - 3) : start + size]
        start += size
    assert memory.length == start


def test_a_rolled_back_batch_leaves_a_kernel_as_it_was():
    # pitfall (Local convolution state): prefill 5, decode a batch of 3, roll back 3, decode 3 others
    memory, plain = slot(keep=3, max_rollback=3), slot(keep=3)
    for m in (memory, plain):
        m.append(x=rows(0, 1, 2, 3, 4))
    memory.append(x=rows(50, 51, 52))
    memory.drop_last(3)
    for tag in (5, 6, 7):
        assert memory.append(x=rows(tag))["x"].equal(plain.append(x=rows(tag))["x"])


def test_beams_are_independent_copies():
    # pitfall: 3 beams, parents (2,0,0) after step 1, (1,1,2) after step 2
    memory = Slot(3, {"x": ((2,), torch.float32)}, keep=2)
    memory.append(x=torch.arange(3.0)[:, None, None].expand(3, 1, 2))
    memory.reorder(torch.tensor([2, 0, 0]))
    memory.append(x=torch.arange(10.0, 13.0)[:, None, None].expand(3, 1, 2))
    memory.reorder(torch.tensor([1, 1, 2]))
    seen = memory.append(x=torch.arange(20.0, 23.0)[:, None, None].expand(3, 1, 2))["x"]
    assert seen[..., 0].tolist() == [[0, 11, 20], [0, 11, 21], [0, 12, 22]]
    memory.entries()["x"][0].zero_()
    assert memory.entries()["x"][1, :, 0].tolist() == [0, 11, 21]


def test_full_memory_grows_and_made_lengths_do_not():
    memory = slot(keep=None)
    assert memory.nbytes == 0
    for tag in range(200):
        assert memory.append(x=rows(tag))["x"].shape[1] == tag + 1
    assert held(memory) == list(range(200))
    assert memory.rows >= 200
    fixed = slot(keep=None, max_length=3)
    fixed.append(x=rows(1, 2))
    with pytest.raises(InputError, match="made for max_length=3 tokens and needs 4"):
        fixed.append(x=rows(3, 4))
    assert held(fixed) == [1, 2]


def test_rows_kept_are_constant():
    memory = slot(keep=3, max_rollback=2)
    sizes = {memory.nbytes}
    for tag in range(50):
        memory.append(x=rows(tag))
        sizes.add(memory.nbytes)
    assert sizes == {(3 + 1 + 2) * 8}


def test_memory_keeps_no_graph():
    # pitfall (Depth states): anything kept across steps is detached
    memory = Slot(1, {"x": ((), torch.float32)}, keep=2)
    x = torch.ones(1, 2, requires_grad=True)
    assert memory.append(x=x)["x"].requires_grad
    assert not memory.append(x=torch.ones(1, 1))["x"].requires_grad


def cache(**options) -> Cache:
    return Cache({"window": slot(keep=3, **options), "full": slot(keep=None)}, batch_size=1, max_rollback=2)


def feed(memory: Cache, *tags: float, segments: torch.Tensor | None = None) -> torch.Tensor | None:
    _, positions = memory.begin(len(tags), segments, None)
    for name in memory.slots:
        memory[name].append(x=rows(*tags))
    memory.advance(len(tags))
    return positions


def test_stored_rows_and_positions_are_two_numbers():
    # pitfall (Positions): w=4, feed 300 tokens one at a time; read the reported position
    memory = cache()
    for tag in range(300):
        feed(memory, tag)
    assert memory.length == memory["window"].length == 300
    assert memory["window"].rows == 4


def test_all_slots_are_rolled_back_or_none():
    memory = cache()
    feed(memory, *range(10))
    with pytest.raises(InputError, match="max_rollback of at least 5"):
        memory.drop_last(5)  # the full memory could, the window cannot
    assert [s.length for s in memory.slots.values()] == [10, 10]
    with pytest.raises(InputError, match=r"truncate_to\(11\)"):
        memory.truncate_to(11)
    memory.truncate_to(0)
    assert [memory.length, *(s.length for s in memory.slots.values())] == [0, 0, 0]


def test_a_pass_that_ended_half_way_is_noticed():
    memory = cache()
    feed(memory, 1, 2)
    memory.begin(1, None, None)
    memory["window"].append(x=rows(3))  # and then something broke
    with pytest.raises(InputError, match="ended half-way"):
        feed(memory, 4)


def test_no_slot_is_touched_when_one_has_no_room():
    memory = Cache({"window": slot(keep=3), "full": slot(keep=None, max_length=3)}, batch_size=1)
    ids = torch.zeros(1, 2, dtype=torch.long)
    feed(memory, 1, 2, segments=ids)
    with pytest.raises(InputError, match="max_length=3 tokens and needs 4"):
        feed(memory, 3, 4, segments=ids)
    assert [s.length for s in memory._all()] == [2, 2, 2]
    feed(memory, 3)
    assert memory.length == 3


def test_documents_go_on_and_may_begin_late():
    memory = cache(max_rollback=2)
    feed(memory, 1, 2)
    ids = torch.tensor([[0, 4, 4]])
    assert feed(memory, 3, 4, 5, segments=ids).tolist() == [[2, 0, 1]]
    assert feed(memory, 6).tolist() == [[2]]
    assert memory.segments.tolist() == [[0, 0, 0, 4, 4, 4]]
    memory.drop_last(2)
    assert feed(memory, 7).tolist() == [[1]]
    memory.truncate_to(0)
    assert feed(memory, 8) is None  # an empty cache has no documents


def test_parents_name_rows_and_set_the_batch():
    memory = Cache({"full": Slot(2, {"x": ((), torch.float32)}, keep=None)}, batch_size=2)
    memory.begin(1, torch.tensor([[3], [5]]), None)
    memory["full"].append(x=torch.tensor([[1.0], [2.0]]))
    memory.advance(1)
    memory.reorder(torch.tensor([1, 1, 0]))
    assert memory.batch_size == 3
    ids, _ = memory.begin(1, None, None)
    assert ids.tolist() == [[5], [5], [3]]
    for wrong in (torch.tensor([0, 3]), torch.tensor([-1]), torch.tensor([[0]]), torch.tensor([0.0])):
        with pytest.raises(InputError, match="parents"):
            memory.reorder(wrong)


@pytest.mark.parametrize(
    ("segments", "positions"),
    [
        ([0, 0, 0], [0, 1, 2]),
        ([-1, -1, 0, 0], [0, 1, 0, 1]),
        ([0, 1, 1, 0], [0, 0, 1, 0]),  # an id that returns is another document's start
        ([], []),
    ],
)
def test_positions_count_within_documents(segments, positions):
    found = document_positions(torch.tensor([segments], dtype=torch.long))
    assert found.tolist() == [positions]


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", -1), ("max_length", 2.5), ("max_rollback", -1), ("max_rollback", True)]
)
def test_sizes_of_a_cache_are_checked(name, value):
    model = twoaxis.Decoder(twoaxis.ModelConfig(vocab_size=5, d_model=8, n_heads=2, n_blocks=1))
    with pytest.raises(InputError, match=rf"new_cache\({name}={value}\): allowed is an integer of 0 or more"):
        model.new_cache(**{"batch_size": 1, name: value})


def test_what_is_made_of_weights_is_made_again_when_one_changes():
    cache, made, weight = Cache({}, 1), [], torch.nn.Parameter(torch.ones(2))

    def double():
        made.append(None)
        return 2 * weight.detach()

    for _ in range(2):
        assert cache.made_of((weight,), double).tolist() == [2, 2]
    assert len(made) == 1
    with torch.no_grad():
        weight.mul_(3)  # as an optimiser does
    assert cache.made_of((weight,), double).tolist() == [6, 6]
    weight.data = torch.full((2,), 5.0)  # another storage
    assert cache.made_of((weight,), double).tolist() == [10, 10]
    assert len(made) == 3
