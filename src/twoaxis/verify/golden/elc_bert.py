"""ELC-BERT's four variants: over stand-in sublayers tanh(x W + b), and over recorded ones."""

from __future__ import annotations

from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth import ELCBert, build
from twoaxis.depth.elc_bert import ELCStream
from twoaxis.types import Context, Reads
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.registry import golden

CONTEXT = Context()


@golden("elc_bert")
def replay(case: Case) -> None:
    """Every h_n, and with recorded sublayers what each of them was given. Positions do not mix."""
    config = case.meta["config"]
    case.only(config, ("layers", "layout"))
    method = spec.parse_spec("depth", f"elc_bert(variant={case.meta.get('variant')!r})")
    h0, n_blocks = case.leaf("in.h0"), config["layers"]
    stream, blocks = build(method, h0.shape[-1], [["attention", "mlp"]] * n_blocks)
    assert isinstance(stream, ELCStream)
    state = stream.open(h0, CONTEXT)
    case.output("out.h.0", state["sources"].sources[0])
    for n, connections in enumerate(blocks, start=1):
        logits = case.leaf(f"param.depth_logits.{n}")
        if logits.shape != (n,):
            raise NotRun(f"{tuple(logits.shape)} weights for {n} sources")
        for connection, kind in zip(connections, ("attn", "mlp"), strict=True):
            connection.norm = nn.Identity()  # the recorded sublayers have their own norms inside
            assert isinstance(connection, ELCBert)
            if connection.mix is not None and connection.mix.logits is not None:
                case.bind(connection, {"mix.logits": logits})

            def sublayer(reads: Reads, ctx: Context, kind: str = kind, n: int = n) -> Tensor:
                if case.has(f"rec.{kind}_in.{n}"):
                    case.output(f"rec.{kind}_in.{n}", reads.x)
                    return case.value(f"rec.{kind}_out.{n}")
                W, b = case.leaf(f"param.{kind}_W.{n}"), case.leaf(f"param.{kind}_b.{n}")
                return (reads.x @ W + b).tanh()

            state = connection(state, sublayer, CONTEXT)
        case.output(f"out.h.{n}", state["sources"].sources[-1])
    if stream.mix is not None:
        case.bind(stream, {"mix.logits": case.leaf("param.readout_logits")})
        case.output(f"out.h.{n_blocks + 1}", stream.readout(state))
