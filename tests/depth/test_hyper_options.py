"""Hyper-Connections: options, parameters and costs."""

import pytest
import torch
from points import CTX, connection, model
from torch.utils.flop_counter import FlopCounterMode

import twoaxis
from twoaxis import InputError, Shape
from twoaxis.depth import build, named_tensors
from twoaxis.depth.hyper_connections import HyperConnections

SPECS = [
    "hyper_connections",
    "hyper_connections(dynamic=False)",
    "hyper_connections(streams=3, tanh=False)",
    "hyper_connections(streams=1)",
    "hyper_connections(streams=2, norm='rms')",
]


def test_option_values_give_different_models() -> None:
    """Pitfall: two values of each option, same weights -> outputs differ, or the option is refused."""
    H = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    outputs = []
    for spec in ("", "tanh=False", "norm='rms'", "dynamic=False"):
        torch.manual_seed(0)
        c = connection(f"hyper_connections({spec})", width=5)
        outputs.append(c(H, lambda reads, ctx: reads.x, CTX))
    for i, a in enumerate(outputs):
        assert all(not torch.allclose(a, b) for b in outputs[:i])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_cost_equals_what_is_built(spec: str, tied: bool) -> None:
    m = model(spec, n_blocks=3, tie_embeddings=tied)
    cfg = m.cfg.depth_config()
    cost = cfg.cost(Shape(layout=m.cfg.layout(), batch_size=2, seq_len=7))
    owned = [m.stream, *(b.connections for b in m.blocks)]
    assert cost.parameters == sum(p.numel() for part in owned for p in part.parameters())
    state = m(torch.randint(17, (2, 7)), return_states=True)[1]["block.3"]
    assert cost.boundary_bytes == {"full": state.numel() * state.element_size()}
    found = {name: twoaxis.TensorSpec(tuple(t.shape)) for name, t in named_tensors(state).items()}
    assert found == m.stream.state_spec(3, 2, 7)
    assert (
        cost.decode_state_bytes == m.new_cache(2, 7).nbytes - model("additive", 3).new_cache(2, 7).nbytes == 0
    )


def test_parameters_at_the_papers_sizes() -> None:
    """Table of the paper, OLMo-1B (16 layers, d 2048), four streams: 768 static, 394,048 dynamic."""
    layout = twoaxis.Layout(d_model=2048, blocks=(("attention", "mlp"),) * 16)
    shape = Shape(layout=layout, batch_size=1, seq_len=1)
    plain = twoaxis.parse_spec("depth", "additive").cost(shape).parameters
    for spec, extra in (("dynamic=False", 768), ("", 394_048)):
        cfg = twoaxis.parse_spec("depth", f"hyper_connections({spec})")
        assert cfg.cost(shape).parameters - plain == extra


@pytest.mark.parametrize("spec", SPECS)
def test_flops_equal_the_counter(spec: str) -> None:
    _, (cs,) = build(spec, 8, [["attention", "mlp"]])
    cfg = twoaxis.parse_spec("depth", spec)
    H = torch.randn(2, 3, cfg.streams, 8, requires_grad=True)
    cost = cfg.cost(Shape(layout=cs[0].layout, batch_size=2, seq_len=3))
    with FlopCounterMode(display=False) as forward:
        out = cs[1](cs[0](H, lambda reads, ctx: reads.x, CTX), lambda reads, ctx: reads.x, CTX)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == cost.flops_forward
    assert backward.get_total_flops() == cost.flops_backward


def test_decay_follows_the_paper() -> None:
    """Static weights are not decayed, the dynamic matrix is; scales, gains and norms are not."""
    rules = model("hyper_connections(norm='rms')").param_rules()
    owned = {k.rsplit(".", 1)[-1]: rule.decay for k, rule in rules.items() if ".connections." in k}
    assert owned == {
        "static": False,
        "dynamic": True,
        "s_alpha": False,
        "s_beta": False,
        "gain": False,
        "weight": False,
    }


def test_output_projections_start_sqrt_n_larger() -> None:
    plain, ours = model("additive", n_blocks=1), model("hyper_connections", n_blocks=1)
    ratio = ours.blocks[0].cores[1].down.weight.std() / plain.blocks[0].cores[1].down.weight.std()
    assert 1.8 < ratio < 2.2


@pytest.mark.parametrize(
    "spec",
    [
        "streams=0",
        "streams=-1",
        "streams=2.5",
        "streams=True",
        "dynamic=False, tanh=False",
        "norm='batch'",
        "steams=2",
    ],
)
def test_refuses_bad_options(spec: str) -> None:
    with pytest.raises(InputError) as error:
        twoaxis.parse_spec("depth", f"hyper_connections({spec})")
    assert "\n" not in str(error.value)


def test_is_registered_with_an_equation_and_a_place() -> None:
    assert twoaxis.methods("depth")["hyper_connections"] is HyperConnections
    assert HyperConnections.Config().coordinates().weights == "gated"
    assert HyperConnections.Config(dynamic=False).coordinates().weights == "static"
