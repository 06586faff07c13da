"""twoaxis: how a Transformer carries information along depth and along the sequence."""

__version__ = "0.1.0"
