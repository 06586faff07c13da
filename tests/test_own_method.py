"""A method written here, in one class: trains, decodes, is costed and compared; no other file knows it."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import test_registry
import twoaxis
from configurations import Case
from twoaxis import Context, Coordinates, Cost, Layout, ModelConfig, Reads, Shape
from twoaxis.depth import Connection, DepthConfig
from twoaxis.norm import RMSNorm
from twoaxis.study import Study, compare, cross
from twoaxis.train import TrainConfig, load_run, train

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_method.py"
CHECKS = {
    name.removeprefix("test_"): check
    for name, check in vars(test_registry).items()
    if name.startswith("test_") and list(inspect.signature(check).parameters) == ["case"]
}


@pytest.fixture
def momentum() -> Iterator[str]:
    """The method's name, known while a test runs."""

    @twoaxis.register("depth", "momentum")
    class Momentum(Connection):
        """v' = decay * v + f(norm(x)), x' = x + v'; the state is x and v side by side."""

        equation = "x' = x + v', v' = decay * v + f(norm(x))"
        source = "arXiv 2102.07870, with its (1 - decay) left out"

        class Config(DepthConfig):
            decay: float = 0.5

            def coordinates(self) -> Coordinates:
                return Coordinates(source="branch", weights="static", short_swa="no: nothing is compared")

            def cost(self, shape: Shape, block: int = 0) -> Cost:
                width, sublayers = shape.layout.d_model, shape.layout.n_sublayers
                flops = 2 * width * (sublayers - 1) * shape.tokens
                return Cost(
                    parameters=(sublayers + 1) * width + sublayers - 1,
                    flops_forward=flops,
                    flops_backward=2 * flops,
                    boundary_bytes={"full": 2 * 4 * width * shape.tokens},
                )

        class Stream(twoaxis.depth.Stream):
            def open(self, x: Tensor, ctx: Context) -> dict[str, Tensor]:
                return {"x": x, "v": torch.zeros_like(x)}

            def close(self, state: dict[str, Tensor], ctx: Context) -> Tensor:
                return self.norm(state["x"])

            def state_spec(self, depth: int, batch_size: int, seq_len: int) -> dict[str, Any]:
                return {name: self.spec_of(batch_size, seq_len) for name in ("x", "v")}

        def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
            super().__init__(cfg, layout, block, index)
            self.norm = RMSNorm(layout.d_model, layout.norm_eps)
            first = layout.sublayer(block, index) == 0  # its v is zero: nothing to decay
            self.decay = None if first else nn.Parameter(torch.tensor(cfg.decay))

        def read(self, state: dict[str, Tensor], ctx: Context) -> tuple[Reads, None]:
            return Reads(self.norm(state["x"])), None

        def write(self, state: dict[str, Tensor], carry: None, y: Tensor, ctx: Context) -> dict[str, Tensor]:
            v = y.to(state["v"].dtype)
            v = v if self.decay is None else v + self.decay.to(v.dtype) * state["v"]
            return {"x": state["x"] + v, "v": v}

        @classmethod
        def stream(cls, cfg: Any, layout: Layout) -> Any:
            return cls.Stream(layout)

    yield "momentum"
    twoaxis.unregister("depth", "momentum")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A tiny training on a made-up text."""
    monkeypatch.setenv("TWOAXIS_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} and {i * i % 97}, then {i % 7}.\n" for i in range(300)), encoding="utf-8")
    return {"data": str(text), "seq_len": 16, "batch_size": 2, "warmup_steps": 1}


def test_trains_and_decodes(momentum: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = ModelConfig(d_model=16, n_blocks=2, n_heads=2, depth="momentum(decay=0.25)")
    losses = []
    cfg = TrainConfig(model=model, steps=30, lr=1e-2, **settings)
    results = train(cfg, tmp_path / "run", on_step=lambda row: losses.append(row["loss"]))
    assert (results["status"], results["depth"]) == ("done", "momentum(decay=0.25)")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    trained, tokenizer, _ = load_run(tmp_path / "run")
    ids = torch.from_numpy(tokenizer.encode("10 and "))[None]
    written = twoaxis.generate(trained, ids, 9)
    assert torch.equal(written, twoaxis.generate(trained, ids, 9, use_cache=False))
    assert written.shape == (1, ids.shape[1] + 9)


def test_is_costed(momentum: str) -> None:
    cfg = Case(momentum).config()
    built = sum(p.numel() for p in twoaxis.Decoder(cfg).parameters())
    cost = twoaxis.cost(cfg, batch_size=2, seq_len=5)
    assert cost.parameters == built
    assert cost.by_part["depth"].flops_forward == 2 * 12 * 5 * 10
    assert cost.boundary_bytes == {"full": 2 * 4 * 12 * 10}


def test_is_compared(momentum: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = ModelConfig(d_model=16, n_blocks=2, n_heads=2)
    training = TrainConfig(model=model, steps=3, **settings)
    rows = cross(["additive", momentum], [("attention", "mlp")])
    results = compare(Study(rows=rows, training=training), tmp_path / "study")
    assert [row["depth"] for row in results["rows"]] == ["additive", "momentum"]
    assert (results["done"], results["failed"]) == (2, 0)
    assert "momentum" in (tmp_path / "study" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("check", CHECKS)
def test_passes_the_checks_of_the_registry(momentum: str, check: str) -> None:
    CHECKS[check](Case(momentum, "local to global"))


def test_is_forgotten(momentum: str) -> None:
    twoaxis.unregister("depth", momentum)
    with pytest.raises(twoaxis.InputError, match="momentum"):
        twoaxis.parse_spec("depth", momentum)


def test_the_example(settings: dict[str, Any], tmp_path: Path) -> None:
    example = runpy.run_path(str(EXAMPLE))
    try:
        model = ModelConfig(d_model=16, n_blocks=2, n_heads=2)
        said = example["main"](tmp_path / "example", model=model, steps=3, **settings)
        case = Case("leaky(start=0.9)")
        built = sum(p.numel() for p in case.fresh().parameters())
        assert twoaxis.cost(case.config(), 1, 5).parameters == built
        CHECKS["state_is_as_declared"](case)
    finally:
        twoaxis.unregister("depth", "leaky")
    assert "leaky: " in said
    assert "\nThe " in said
