"""DenseFormer's weighted averages over stand-in blocks X_n = Y_{n-1} + tanh(Y_{n-1} W_n + b_n)."""

from __future__ import annotations

from torch import Tensor, nn

from twoaxis.depth import DenseFormer, build
from twoaxis.types import Context, Reads
from twoaxis.verify.golden.case import Case
from twoaxis.verify.golden.registry import golden


@golden("denseformer")
def replay(case: Case) -> None:
    """Every block's raw and mixed output."""
    config = case.meta["config"]
    case.only(config, ("blocks", "dilation_k", "period_p"))
    method = DenseFormer.Config(dilation=config["dilation_k"], period=config["period_p"])
    x0, ctx = case.leaf("in.x0"), Context()
    stream, blocks = build(method, x0.shape[-1], [["mlp"]] * config["blocks"])
    state = stream.open(x0, ctx)
    for n, (connection,) in enumerate(blocks, start=1):
        connection.norm = nn.Identity()  # the stand-in block reads the stream as it is
        if connection.alpha is not None:
            case.bind(connection, {"alpha": case.leaf(f"param.alpha.{n}").squeeze(0)})
        W, b = case.leaf(f"param.block_W.{n}"), case.leaf(f"param.block_b.{n}")

        def block(reads: Reads, ctx: Context, n: int = n, W: Tensor = W, b: Tensor = b) -> Tensor:
            y = (reads.x @ W + b).tanh()
            case.output(f"out.X.{n}", reads.x + y)
            return y

        state = connection(state, block, ctx)
        case.output(f"out.Y.{n}", state["stream"])
        for source, index in zip(state["sources"].sources, state["sources"].index, strict=True):
            if index:
                case.output(f"out.X.{index}", source)
