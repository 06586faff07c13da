"""What is checked before the first run of a comparison, so that nobody waits for an error."""

from __future__ import annotations

from pathlib import Path

from twoaxis.data import check_vocab, load_corpus, load_tokenizer, n_windows, prepare
from twoaxis.errors import InputError
from twoaxis.study.budgets import flat
from twoaxis.study.collect import run_folder
from twoaxis.study.grid import Study
from twoaxis.train import TrainConfig
from twoaxis.train.device import choose_device
from twoaxis.train.run import RunFolder


def check_inputs(cfg: TrainConfig) -> None:
    """InputError if no run could start, e.g. for unknown data or for a text too short for one row."""
    corpus = load_corpus(cfg.data, cfg.valid_fraction)
    tokens, valid = prepare(corpus, load_tokenizer(cfg.tokenizer, corpus.train))
    check_vocab(tokens, cfg.model.vocab_size)
    n_windows(tokens.n_tokens, cfg.seq_len)
    choose_device(cfg.device)
    if valid.n_tokens < 2:
        raise InputError(
            f"{cfg.data!r} has no validation text, so nothing can be compared; "
            "raise valid_fraction or use other data"
        )


def refuse_other_runs(study: Study, folder: Path) -> None:
    """InputError if the folder is a run of its own, or holds one of this study made with other settings."""
    alone = RunFolder(folder)
    if alone.config.exists() or alone.checkpoints.exists():
        raise InputError(f"{folder} holds a single run, whose results would be lost; give another folder")
    for row, seed in study.runs():
        run = RunFolder(run_folder(folder, row, seed))
        if run.config.is_file():
            old, new = flat(run.read_config()), flat(study.config(row, seed))
            for name in new:
                if old[name] != new[name]:
                    raise InputError(
                        f"{run.path} was trained with {name}={old[name]!r}, now {name}={new[name]!r}; "
                        "give another --out, or the old settings"
                    )
