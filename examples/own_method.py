"""A residual method of your own, in one class: it is trained, decoded, costed and compared like every other.

python examples/own_method.py [FOLDER]

x' = g * x + f(norm(x))            g one number per feature and sublayer, 1 at first
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import twoaxis
from twoaxis import Context, Coordinates, Cost, Layout, ModelConfig, Reads, Shape
from twoaxis.depth import Connection, DepthConfig
from twoaxis.norm import RMSNorm
from twoaxis.study import Row, Study, compare
from twoaxis.train import TrainConfig, load_run


@twoaxis.register("depth", "leaky")
class Leaky(Connection):
    """read: norm(x); write: g * x + y."""

    equation = "x' = g * x + f(norm(x))"
    source = "this example"

    class Config(DepthConfig):
        """start: g at first."""

        start: float = 1.0

        def coordinates(self) -> Coordinates:
            """Where the method stands on the paper's map."""
            return Coordinates(source="stream", weights="static", short_swa="no: it reads one state")

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """A norm and a gate for each sublayer, and the final norm; products with g are not counted."""
            width, sublayers = shape.layout.d_model, shape.layout.n_sublayers
            stream = 4 * shape.tokens * width  # bytes in float32
            return Cost(parameters=(2 * sublayers + 1) * width, boundary_bytes={"full": stream})

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        self.gate = nn.Parameter(torch.full((layout.d_model,), cfg.start))

    def read(self, state: Tensor, ctx: Context) -> tuple[Reads, None]:
        return Reads(self.norm(state)), None

    def write(self, state: Tensor, carry: None, y: Tensor, ctx: Context) -> Tensor:
        return self.gate.to(state.dtype) * state + y.to(state.dtype)


def main(out: Path, **settings: Any) -> str:
    """Compare the method with the standard one, then write on with it; settings: of `TrainConfig`."""
    rows = (Row(name="additive"), Row(name="leaky", depth="leaky(start=0.9)"))
    model = ModelConfig(d_model=64, n_blocks=4)
    training = TrainConfig(**{"model": model, "steps": 100, "warmup_steps": 10, **settings})
    results = compare(Study(rows=rows, training=training), out)
    lines = [f"{row['name']}: {row['valid_bits_per_byte']:.3f} bits per byte" for row in results["rows"]]
    trained, tokenizer, cfg = load_run(out / "runs" / "leaky" / "seed-0")
    cost = twoaxis.cost(cfg.model, batch_size=1, seq_len=cfg.seq_len)
    lines.append(f"{cost.parameters} parameters, {cost.flops_forward} FLOPs forward")
    ids = torch.from_numpy(tokenizer.encode("The "))[None]
    lines.append(tokenizer.decode(twoaxis.generate(trained, ids, 40)[0].tolist()))
    return "\n".join(lines)


if __name__ == "__main__":
    print(main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own_method")))
