"""A depth method on a model that is not ours: Hyper-Connections in a stock LlamaForCausalLM.

    python examples/foreign_model.py          (needs transformers)

The layers keep their attention and MLP. Reads bring their own norms, so the layers' and the final norm go.
How a method wants output projections to start (`Config.core_options`) is left to the model.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import twoaxis
from twoaxis.data import load_corpus

# example: begin
CTX = twoaxis.Context()


class Layer(torch.nn.Module):
    def __init__(self, layer, connections):
        super().__init__()
        self.attention, self.mlp = layer.self_attn, layer.mlp
        self.first, self.second = connections

    def forward(self, state, **kw):
        state = self.first(state, lambda reads, ctx: self.attention(reads.x, **kw)[0], CTX)
        return self.second(state, lambda reads, ctx: self.mlp(reads.x), CTX)


def rewire(llama, method):
    inner, kinds = llama.model, [["attention", "mlp"]] * llama.config.num_hidden_layers
    stream, blocks = twoaxis.depth.build(method, llama.config.hidden_size, kinds)
    inner.layers = torch.nn.ModuleList(map(Layer, inner.layers, blocks))
    inner.layers[0].register_forward_pre_hook(lambda _, args: (stream.open(args[0], CTX),))
    inner.norm, stream.forward = stream, lambda state: stream.close(state, CTX)


# example: end


def batches(text: str, batch_size: int, length: int) -> Any:
    """Endless rows of bytes (B, T), at random places of a text."""
    data = torch.tensor(list(text.encode()))
    while True:
        starts = torch.randint(len(data) - length, (batch_size, 1))
        yield data[starts + torch.arange(length)]


def main(steps: int = 60) -> list[float]:
    """Train a small Llama with Hyper-Connections on Shakespeare; returns the losses in nats per byte."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    llama = LlamaForCausalLM(config)
    rewire(llama, "hyper_connections(streams=4)")
    optimizer = torch.optim.AdamW(llama.parameters(), lr=3e-3)
    losses = []
    for _, rows in zip(range(steps), batches(load_corpus("shakespeare").train[0], 8, 64), strict=False):
        loss = llama(rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for step, loss in enumerate(main(), 1):
        print(f"step {step:3d}  loss {loss:.3f}")
