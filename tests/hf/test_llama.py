"""With weights copied by a name map, a plain model computes what Hugging Face's Llama computes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import twoaxis


class Norm64(torch.nn.Module):
    """Llama's norm without its cast to float32."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Rotary64(torch.nn.Module):
    """Llama's rotary angles without their cast to float32."""

    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        self.rates = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (position_ids[..., None] * self.rates).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def widen(llama: LlamaForCausalLM) -> LlamaForCausalLM:
    """Llama with the float32 islands of its norm and angles widened, so that all of it is float64."""
    inner = llama.double().model
    inner.norm = Norm64(inner.norm)
    for layer in inner.layers:
        layer.input_layernorm = Norm64(layer.input_layernorm)
        layer.post_attention_layernorm = Norm64(layer.post_attention_layernorm)
    inner.rotary_emb = Rotary64(12, 5000.0)
    return llama


def copy_from_llama(model: twoaxis.Decoder, llama: LlamaForCausalLM) -> dict[str, list[str]]:
    """Fill `model` from `llama`; returns our parameter name -> their names, joined along rows."""
    names = {"embedding.weight": ["model.embed_tokens.weight"], "stream.norm.weight": ["model.norm.weight"]}
    if not model.cfg.tie_embeddings:
        names["head.weight"] = ["lm_head.weight"]
    for i in range(model.cfg.n_blocks):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        names |= {
            f"{ours}.connections.0.norm.weight": [f"{theirs}.input_layernorm.weight"],
            f"{ours}.connections.1.norm.weight": [f"{theirs}.post_attention_layernorm.weight"],
            f"{ours}.cores.0.qkv.weight": [f"{theirs}.self_attn.{p}_proj.weight" for p in "qkv"],
            f"{ours}.cores.0.out.weight": [f"{theirs}.self_attn.o_proj.weight"],
            f"{ours}.cores.1.up.weight": [f"{theirs}.mlp.{p}_proj.weight" for p in ("gate", "up")],
            f"{ours}.cores.1.down.weight": [f"{theirs}.mlp.down_proj.weight"],
        }
    source = dict(llama.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.cat([source[n] for n in names[name]]))
    return names


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["mha", "gqa"])
def test_logits_and_gradients_equal_llama(tied: bool, kv_heads: int) -> None:
    torch.manual_seed(0)
    llama = widen(
        LlamaForCausalLM(LlamaConfig(
            vocab_size=61, hidden_size=48, intermediate_size=104, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=kv_heads, rms_norm_eps=1e-5, tie_word_embeddings=tied, attn_implementation="sdpa",
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, initializer_range=0.3,
        ))
    )  # fmt: skip
    cfg = twoaxis.ModelConfig(
        vocab_size=61, d_model=48, n_blocks=3, n_heads=4, n_kv_heads=kv_heads, tie_embeddings=tied,
        sequence=["attention", "mlp(hidden=104)"], norm_eps=1e-5, rope_base=5000.0,
    )  # fmt: skip
    model = twoaxis.Decoder(cfg).double()
    names = copy_from_llama(model, llama)
    tokens = torch.randint(0, 61, (2, 37))
    theirs = llama(tokens).logits
    ours = model(tokens)
    assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max().clamp(min=1)
    cotangent = torch.randn_like(ours)
    (ours * cotangent).sum().backward()
    (theirs * cotangent).sum().backward()
    source = dict(llama.named_parameters())
    for name, parameter in model.named_parameters():
        grad = torch.cat([source[n].grad for n in names[name]])
        assert (parameter.grad - grad).abs().max() < 1e-10 * grad.abs().max().clamp(min=1), name
