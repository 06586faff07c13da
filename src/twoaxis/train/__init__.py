"""The train room: a thin loop on torch primitives, and the folder that a run leaves behind.

cfg = TrainConfig(model=ModelConfig(depth="ddl"), data="shakespeare", steps=200)
results = train(cfg, "runs/ddl")                      # or train(cfg, "runs/ddl", resume=True)
model, tokenizer, cfg = load_run("runs/ddl")
evaluate(model, tokens, seq_len=256, batch_size=16).bits_per_byte
"""

from twoaxis.train.config import TrainConfig
from twoaxis.train.evaluation import Evaluation, evaluate
from twoaxis.train.keys import read_yaml
from twoaxis.train.loop import train
from twoaxis.train.run import load_run

__all__ = ["Evaluation", "TrainConfig", "evaluate", "load_run", "read_yaml", "train"]
