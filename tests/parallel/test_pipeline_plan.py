"""What the planner counts, without processes: bytes per boundary, transports, splits, prices, refusals."""

import dataclasses

import pytest
import torch

import twoaxis
from configurations import SEQUENCES, VARIANTS, Case, depths, fits, method_of, tokens
from twoaxis import InputError, ModelConfig
from twoaxis.cost import boundaries
from twoaxis.depth import named_tensors
from twoaxis.parallel import check_schedule, plan_pipeline
from twoaxis.parallel.recompute import recompute
from twoaxis.parallel.split import split_blocks

SHAPE = {"batch_size": 2, "seq_len": 5}


def planned(depth, n_ranks=2, virtual=1, sequence="standard", n_blocks=5, **options):
    cfg = Case(depth, sequence).config(n_blocks=n_blocks)
    return plan_pipeline(cfg, n_ranks, virtual, **{**SHAPE, **options})


def bytes_by_link(plan):
    return [link.nbytes["full"] for link in plan.links]


# the paper's claim: arXiv 2603.16039, the ordinary activation path between pipeline stages
@pytest.mark.parametrize("depth", ["additive", "ddl"])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_sequence_mixers_and_scalar_ddl_send_what_the_additive_model_sends(depth, sequence):
    n_blocks = 3 if sequence == "list per block" else 4
    standard = planned("additive", n_blocks=n_blocks, counts=(1, n_blocks - 1))
    plan = planned(depth, sequence=sequence, n_blocks=n_blocks, counts=(1, n_blocks - 1))
    assert bytes_by_link(plan) == bytes_by_link(standard) == [2 * 5 * 12 * 4]


@pytest.mark.parametrize(
    ("depth", "times"),
    [
        ("ddl(value_dim=4)", 4),
        ("ddl(value_dim=2)", 2),
        ("hyper_connections(streams=3)", 3),
        ("mhc(streams=4)", 4),
    ],
)
def test_expanded_states_send_so_many_times_as_much(depth, times):
    for ranks, virtual in ((2, 1), (4, 1), (2, 2)):
        ours, standard = (bytes_by_link(planned(d, ranks, virtual)) for d in (depth, "additive"))
        assert ours == [times * count for count in standard]


@pytest.mark.parametrize("per_chunk", [1, 2])
@pytest.mark.parametrize(("P", "V"), [(2, 2), (2, 3), (3, 2), (4, 2)])
def test_block_attnres_in_a_cache_meets_the_formula(P, V, per_chunk):
    # methods/depth-attention.md 3.5: Np (P (P-1) / 2 + (V-1) P^2) sources without b_0, which travels to every rank
    # once. There a source also comes back to the rank that made it; here that rank has kept it.
    plan = planned("attnres(block_sublayers=2)", P, V, n_blocks=P * V * per_chunk)
    names = [name for link in plan.links for name in link.sends]
    formula = per_chunk * (P * (P - 1) // 2 + (V - 1) * P**2)
    assert plan.transport == "cached"
    assert names.count("sources.source.0") == P - 1
    assert len(names) - (P - 1) == formula - per_chunk * (V - 1) * P
    assert len([n for link in plan.links for n in link.boundary.specs]) > len(names)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("depth", ["denseformer", *(v for v in VARIANTS if method_of(v) == "denseformer")])
def test_denseformer_pushes_no_more_than_sources_or_later_readers(depth, ranks):
    plan, cfg = planned(depth, ranks, n_blocks=7, transport="auto"), twoaxis.parse_spec("depth", depth)
    for link in plan.links:
        n = link.boundary.depth
        readers = [m for m in range(n + 1, 8) if cfg.mixed(m)]
        assert link.nbytes[plan.transport] == link.nbytes[link.takes]
        if plan.transport == "push":
            assert len(link.sends) - 1 <= min(len(cfg.kept(n, 7)), len(readers))


@pytest.mark.parametrize("depth", depths())
def test_a_state_holds_only_what_a_later_layer_reads_and_names_what_never_changes(depth):
    # so that "full" is also the window and the block transport
    case = Case(depth)
    if not fits(case):
        pytest.skip("needs other blocks")
    model = case.model(n_blocks=3)
    logits, states = model(tokens(), return_states=True)
    said = logits.square().sum()
    if model.cfg.depth_config().loss_term:
        said = said + model.stream.loss_term(states["block.3"]).square().sum()
    numbered: dict[str, torch.Tensor] = {}
    for depth_index in range(4):
        named = named_tensors(states[f"block.{depth_index}"])
        leaves = {n: t for n, t in named.items() if t.requires_grad}
        later = torch.autograd.grad(said, list(leaves.values()), retain_graph=True, allow_unused=True)
        assert [n for n, g in zip(leaves, later, strict=True) if g is None or not g.any()] == []
        for name, tensor in named.items():
            if model.stream.unchanging(name):
                assert torch.equal(numbered.setdefault(name, tensor), tensor)


@pytest.mark.parametrize(("ranks", "virtual"), [(3, 1), (2, 2)])
@pytest.mark.parametrize(
    "depth", [d if "(" not in d else pytest.param(d, marks=pytest.mark.full) for d in depths()]
)
def test_the_cost_models_boundaries_are_the_plans(depth, ranks, virtual):
    plan = planned(depth, ranks, virtual)
    cuts = [link.boundary.depth for link in plan.links]
    rows = boundaries(plan.cfg, SHAPE["batch_size"], SHAPE["seq_len"], cuts, ranks)
    for name in ("full", "cached"):  # a plan leaves out a transport that sends what "full" does
        planned_bytes = [link.nbytes.get(name, link.nbytes["full"]) for link in plan.links]
        assert [row.sent[name] for row in rows] == planned_bytes, name
    pushed = [link.nbytes.get("push", link.nbytes["full"]) for link in plan.links]
    assert sum(row.sent["push"] for row in rows) <= sum(pushed)  # a plan pushes from one link on
    if plan.transport == "push":
        late = [
            (row.sent["push"], n) for row, n, link in zip(rows, pushed, plan.links) if link.boundary.pushed
        ]
        assert late
        assert all(own == planned for own, planned in late)
    if not plan.cfg.depth_config().pushes:
        assert "push" not in plan.links[0].nbytes
        assert all(row.sent["push"] == row.sent["window"] for row in rows)


def test_auto_takes_the_fewest_bytes_and_the_simplest_of_equals():
    assert planned("additive", 2, 2).transport == "full"
    assert planned("denseformer", 2).transport == "push"
    plan = planned("depth_window", 2, 2)
    assert plan.transport == "cached"
    assert plan.nbytes["cached"] < plan.nbytes["full"]
    assert (
        min(planned("elc_bert", 4, 2).nbytes.values())
        == planned("elc_bert", 4, 2).nbytes[planned("elc_bert", 4, 2).transport]
    )


def test_splits():
    assert [len(r) for r in split_blocks(7, 3)] == [3, 2, 2]
    assert split_blocks(3, 4, (0, 2, 0, 1)) == (range(0, 0), range(0, 2), range(2, 2), range(2, 3))
    for counts in ((1, 1), (3,), (4, -1), (0, 3, 0, 1)):
        with pytest.raises(InputError, match="one number of 0 or more per stage"):
            split_blocks(3, 2, counts)


def test_states_are_recomputed_at_a_price_or_not_at_all():
    plan = planned("attnres", 2, n_blocks=4)
    price = recompute(plan, plan.links[0])
    assert (price.impossible, price.blocks) == ("", 1)
    assert price.saved_bytes == 3 * 2 * 5 * 12 * 4  # all but the two of block 2
    one = twoaxis.cost(Case("additive").config(n_blocks=1), 2, 5)
    head = one.by_part["head"].flops_forward
    assert price.flops == one.flops_forward - head
    additive = planned("additive")
    assert "no entry of an earlier block" in recompute(additive, additive.links[0]).impossible
    dropping = plan_pipeline(dataclasses.replace(plan.cfg, dropout=0.1), 2, **SHAPE)
    assert "dropout=0.1" in recompute(dropping, dropping.links[0]).impossible


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"transport": "cached"}, "allowed is auto, full"),
        ({"transport": "push"}, "allowed is auto, full"),
        ({"transport": "pigeon"}, "allowed is auto, full"),
        ({"send_dtype": "int3"}, "send_dtype='int3'"),
        ({"virtual": 0}, "allowed is 1 or more of each"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_what_does_not_apply_is_refused(options, said):
    with pytest.raises(InputError, match=said):
        planned("additive", **options)


def test_sources_kept_in_fewer_bits_cross_as_the_values_that_reads_see():
    kept = plan_pipeline(ModelConfig(depth="attnres", history="int8"), 2, **SHAPE)
    full = plan_pipeline(ModelConfig(depth="attnres"), 2, **SHAPE)
    assert kept.nbytes == full.nbytes


@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual", "micro"),
    [("2f2b", 2, 1, 4), ("1f1b", 1, 1, 4), ("1f1b", 2, 2, 4), ("1f1b", 4, 1, 3), ("interleaved", 2, 2, 5)],
)
def test_schedules_that_do_not_fit_are_refused(schedule, ranks, virtual, micro):
    with pytest.raises(InputError):
        check_schedule(schedule, ranks, virtual, micro)
