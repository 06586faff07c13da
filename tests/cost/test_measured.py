"""What the cost model states, held to what a real step does: FLOPs, saved bytes, gradients, moments, boundaries."""

import dataclasses

import pytest
import torch
from cases import QUICK, full

import configurations
import twoaxis
from twoaxis.cost import boundaries
from twoaxis.cost import cost as counted
from twoaxis.cost.total import FORWARD_ONLY
from twoaxis.depth import named_tensors
from twoaxis.verify.cost import checks, pairs, untraced, widest
from twoaxis.verify.counting import counted_flops, counted_step
from twoaxis.verify.saved import saved_bytes

B, T = 2, 13
CASES = [case if case in QUICK else full(case) for case in configurations.whole()]
BARE = {configurations.Case(name) for name in twoaxis.methods("depth")}
FLOPS = [case if case in BARE else full(case) for case in configurations.whole()]
LONG = [
    name if name in ("chunks", "local mixers inside") else full(name) for name in configurations.SEQUENCES
]
HISTORIES = ["int8", "bfloat16", "recompute", "int8, recompute"]
KEEPERS = [d for d in configurations.depths() if twoaxis.parse_spec("depth", d).keeps_history]
KEPT = [
    pytest.param(
        depth,
        history,
        marks=[] if "(" not in depth and history in ("int8", "recompute") else [pytest.mark.full],
    )
    for depth in KEEPERS
    for history in HISTORIES
]


def missing(cost: twoaxis.Cost, *besides: str) -> list[str]:
    """The counts that nobody states."""
    return [
        f.name for f in dataclasses.fields(cost) if getattr(cost, f.name) is None and f.name not in besides
    ]


@pytest.mark.parametrize(
    "cases", [configurations.pairwise(), full(configurations.whole())], ids=["once", "all"]
)
def test_no_method_and_no_options_leave_a_count_out(cases):
    """A new method, or a new option of one, fails here until its trace covers it."""
    for cfg in [case.config() for case in cases]:
        cost, step = twoaxis.cost(cfg, 1, 5), counted(cfg, 1, 5, phase="decoding")
        assert missing(cost) == [], cfg
        assert missing(step, *FORWARD_ONLY) == [], cfg
        assert all(missing(part) == ["recomputed_bytes"] for part in cost.by_part.values()), cfg


@pytest.mark.parametrize(("depth", "history"), KEPT, ids=str)
def test_counts_of_a_history_that_is_rounded_or_made_again(depth, history):
    case, tokens = configurations.Case(depth), configurations.tokens(B, T)
    cost, model = twoaxis.cost(case.config(history=history), B, T), widest(case.fresh(history=history))
    assert missing(cost) == []
    flops = counted_flops(model, tokens)
    assert (cost.flops_forward, cost.flops_backward) == (flops.forward, flops.backward)
    assert cost.saved_bytes == saved_bytes(model, tokens, tokens.clone())
    model.checkpointing = True
    assert cost.saved_bytes_checkpointed == saved_bytes(model, tokens, tokens.clone())
    with torch.no_grad():
        _, states = model(tokens, return_states=True)
    for at in boundaries(model.cfg, B, T, range(1, model.cfg.n_blocks)):
        crossing = named_tensors(states[f"block.{at.after}"]).values()
        assert at.sent["full"] == sum(x.nbytes for x in crossing)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_saved_bytes_are_what_hooks_see_and_operators_hold(case):
    cost, model = twoaxis.cost(case.config(), B, T), widest(case.fresh())
    tokens = configurations.tokens(B, T)
    assert cost.saved_bytes == saved_bytes(model, tokens, tokens.clone())
    model.checkpointing = True
    assert cost.saved_bytes_checkpointed == saved_bytes(model, tokens, tokens.clone())
    assert sum(part.saved_bytes for part in cost.by_part.values()) == cost.saved_bytes


@pytest.mark.parametrize("sequence", LONG)
def test_saved_bytes_of_rows_longer_than_an_attention_block(sequence):
    case, tokens = configurations.Case("additive", sequence), configurations.tokens(1, 130)
    assert twoaxis.cost(case.config(), 1, 130).saved_bytes == saved_bytes(
        case.fresh(), tokens, tokens.clone()
    )


def test_dropout_keeps_its_noise():
    cfg = configurations.Case("additive", "local to global").config(dropout=0.1)
    tokens = configurations.tokens(B, T)
    model = twoaxis.Decoder(cfg)
    assert twoaxis.cost(cfg, B, T).saved_bytes == saved_bytes(model, tokens, tokens.clone())


@pytest.mark.parametrize("case", FLOPS, ids=str)
def test_flops_are_the_counters_with_our_formulas(case):
    cost = twoaxis.cost(case.config(), B, T)
    flops = counted_flops(widest(case.fresh()), configurations.tokens(B, T))
    assert (cost.flops_forward, cost.flops_backward) == (flops.forward, flops.backward)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flops_of_a_decoding_step_are_the_counters(case):
    cost = twoaxis.cost(case.config(), B, T, phase="decoding")
    assert cost.flops_forward == counted_step(widest(case.fresh()).eval(), configurations.tokens(B, T))


@pytest.mark.parametrize("case", [c for c in configurations.whole() if c in QUICK], ids=str)
def test_the_closed_form_of_a_method_is_its_trace(case):
    """Two derivations of a method's FLOPs: the formula in its file, and its kernels one by one."""
    cfg = case.config()
    formula = cfg.depth_config().cost(twoaxis.Shape(layout=cfg.layout(), batch_size=B, seq_len=T))
    own = twoaxis.cost(cfg, B, T).by_part["depth"]
    assert (formula.flops_forward, formula.flops_backward) == (own.flops_forward, own.flops_backward)


@pytest.mark.parametrize("depth", ["additive", "attnres", full("mhc"), full("dca")])
def test_everything_that_verify_checks(depth):
    found = checks(twoaxis.ModelConfig(depth=depth, vocab_size=11, d_model=12, n_blocks=3, n_heads=2))
    assert [check for check in found if not check.passed] == []
    assert len(found) == 11


def test_pairs_of_the_mask():
    # pitfall (Evaluation, comparison, cost model): T=2048, w=512: 917760 pairs; T < w
    assert all(check.passed for check in pairs())
    assert pairs()[-1].stated == 917760


def test_a_network_that_runs_again_runs_forward_twice():
    plain, again = (
        twoaxis.cost(configurations.Case("attnres").config(history=h), B, T) for h in ("full", "recompute")
    )
    head = plain.by_part["head"].flops_forward
    assert again.flops_backward - plain.flops_backward == plain.flops_forward - head
    assert again.saved_bytes < plain.saved_bytes
    assert again.launches_backward > plain.launches_backward
    assert again.bytes_backward > plain.bytes_backward


def test_a_method_without_a_trace_says_so(monkeypatch):
    method = twoaxis.methods("depth")["additive"]
    monkeypatch.setattr(method.Config, "trace", None)
    cfg = configurations.Case("additive").config()
    cost = counted(cfg, B, T)
    assert cost.saved_bytes is cost.bytes_moved is cost.launches is None
    assert untraced() == {"additive": "it has no trace, which would say what it runs"}
    assert cost.boundary_bytes.keys() == {"full"}
    with pytest.raises(
        twoaxis.InputError, match="what additive sends is not known from its options: it has no trace"
    ):
        boundaries(cfg, B, T, [1])


def test_recomputation_holds_less_than_saving():
    cfg = configurations.Case("additive").config(n_blocks=6)
    cost, tokens = twoaxis.cost(cfg, B, T), configurations.tokens(B, T)
    one = configurations.Case("additive").config(n_blocks=1)
    assert cost.saved_bytes_checkpointed + cost.recomputed_bytes < cost.saved_bytes
    alone = twoaxis.cost(one, B, T)  # its only block: what is saved beside what stays
    assert (
        alone.recomputed_bytes == alone.saved_bytes - alone.saved_bytes_checkpointed == cost.recomputed_bytes
    )
    model = twoaxis.Decoder(one)
    model.checkpointing = True
    with torch.random.fork_rng():
        assert saved_bytes(model, tokens, tokens.clone()) == alone.saved_bytes_checkpointed
