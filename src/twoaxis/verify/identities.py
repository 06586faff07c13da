"""Identities of methods that need no recorded numbers: the delta rewrite's algebra, AttnRes at its start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from twoaxis.model import ModelConfig
from twoaxis.ops import delta_rewrite
from twoaxis.verify.setting import Setting, difference

N, d, m, EPS, TIMES = 4, 7, 3, 0.3, 3  # tokens, width, value channels, a rho well below 1, rewrites in a row


def identities(s: Setting) -> Iterator[tuple[str, float]]:
    """The rows on DDL and AttnRes."""
    yield from delta(s)
    yield "AttnRes with zero queries = the standard Transformer, eps = 0: logits", zero_query(s)


def delta(s: Setting) -> Iterator[tuple[str, float]]:
    """X' = A X + beta k v^T, A = I - beta k k^T, rho = |k|^2, k = h / sqrt(|h|^2 + eps^2) (2601.00417)."""
    h = s.randn(N, d)
    beta = torch.linspace(0.25, 1.75, N).to(h)  # on both sides of 1: shrinking and reflecting
    wide = h.cpu().double()
    size = wide.square().sum(-1)
    shrink = 1 - beta.cpu().double() * size / (size + EPS**2)  # 1 - beta rho, (N,)

    identity = torch.eye(d, dtype=h.dtype, device=h.device).expand(N, d, d)
    A = delta_rewrite(identity, h, h.new_zeros(N, d), beta, EPS).cpu().double()
    spectrum = torch.cat((torch.ones(N, d - 1), shrink[:, None]), 1).sort(-1).values
    found = torch.linalg.eigvalsh(A)
    yield "DDL: the spectrum of A is 1 (d - 1 times) and 1 - beta rho", difference([found], [spectrum])
    yield "DDL: det A = 1 - beta rho", difference([torch.linalg.det(A)], [shrink])

    X, v = s.randn(N, d, m), s.randn(N, m)
    k = (wide / (size + EPS**2).sqrt()[:, None]).unsqueeze(-1)  # (N, d, 1)
    expected = shrink[:, None] ** TIMES * _misfit(k, X, v)
    for _ in range(TIMES):
        X = delta_rewrite(X, h, v, beta, EPS)
    name = f"DDL: {TIMES} rewrites shrink the error k^T X - v^T by (1 - beta rho)^{TIMES}"
    yield name, difference([_misfit(k, X, v)], [expected])


def _misfit(k: Tensor, X: Tensor, v: Tensor) -> Tensor:
    return (k.mT @ X.cpu().double()).squeeze(1) - v.cpu().double()


def zero_query(s: Setting) -> float:
    """Zero queries weigh n sources by 1 / n each, and norms with eps = 0 do not see the factor."""
    cfg = ModelConfig(
        vocab_size=29,
        d_model=24,
        n_blocks=4,
        n_heads=3,
        depth="attnres(key_norm_eps=0.0)",
        norm_eps=0.0,
        state_dtype=s.dtype,
    )
    model, standard = s.decoder(cfg), s.decoder(replace(cfg, depth="additive"))
    for name, parameter in model.named_parameters():
        if name.endswith("route.query"):
            parameter.zero_()
    weights = model.state_dict()
    standard.load_state_dict({name: weights[name] for name in standard.state_dict()})
    tokens = s.tokens(2, 7, cfg.vocab_size)
    return difference([model(tokens)], [standard(tokens)])
