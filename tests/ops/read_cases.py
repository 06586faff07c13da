"""Inputs and options of `depth_read` for its tests."""

import torch

LEAD = (2, 5)


def randn(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def case(name: str, n: int, d: int, lead=LEAD, dtype=torch.float64):
    """Differentiable inputs by name, and the other options."""
    leaves = {"query": randn(*lead, d, dtype=dtype) if "token" in name else randn(d, dtype=dtype)}
    rest = {}
    if "gain" in name:
        leaves["key_gain"] = randn(d, dtype=dtype)
    if "raw" in name:
        rest["key_norm_eps"] = None
    if "scale" in name:
        rest["scale"] = 0.3
    if "normed" in name:
        rest["output_eps"] = 0.01
        leaves["output_gain"] = randn(d, dtype=dtype)
    if "bias" in name:
        leaves["bias"] = randn(n, dtype=dtype)
    return leaves, rest


def call(read, leaves, rest, n):
    """The read as a function of its leaves and sources, in that order."""

    def f(*tensors):
        options = dict(zip(leaves, tensors[:-n], strict=True)) | rest
        return read(options.pop("query"), tensors[-n:], **options)

    return f
