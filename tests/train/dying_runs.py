"""Runs that die while they save, each in its own process. Started by `test_train_checkpoint.py`; not a test.

dying_runs.py kill CONFIG FOLDER: for n = 0, 1, ... a copy of the run FOLDER/crashed, FOLDER/killed-n, makes
    its last save and gets SIGKILL at the n-th call that changes files; prints how many such calls there are.
dying_runs.py limit CONFIG RUN: a run whose files may not grow beyond a small size after step 3; prints what
    the command would say and return.
"""

import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

from twoaxis import RunError
from twoaxis.data import load_corpus, load_tokenizer, tokenize
from twoaxis.train import TrainConfig, checkpoint, read_yaml, train
from twoaxis.train.randomness import isolated
from twoaxis.train.saving import Saver
from twoaxis.train.session import Session


class Killed:
    """Counts calls that change files, and kills this process at one of them."""

    def __init__(self, at):
        self.at, self.count = at, 0

    def __call__(self, call):
        def counted(*args, **kwargs):
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            return call(*args, **kwargs)

        return counted


def patch(killed):
    for name in ("mkdir", "fsync", "replace", "rmdir", "unlink"):
        setattr(os, name, killed(getattr(os, name)))
    write = checkpoint.write_synced

    def in_two_halves(path, data):
        """As `write_synced`, with a chance to die before, within and after."""
        killed(lambda: None)()
        with path.open("xb") as file:
            file.write(data[: len(data) // 2])
        killed(lambda: None)()
        path.unlink()
        write(path, data)

    checkpoint.write_synced = in_two_halves


def save_killed_at(session, folder, at):
    """Save in a process that dies at call `at`; the number of calls if it did not."""
    pid = os.fork()
    if pid == 0:
        killed = Killed(at)
        patch(killed)
        Saver(session, folder / "checkpoints").save()
        (folder / "count").write_text(str(killed.count))
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    assert os.WEXITSTATUS(status) == 0
    return int((folder / "count").read_text())


def kill(cfg, folder):
    session = the_session_after_its_last_step(cfg)

    def fresh(name):
        return shutil.copytree(folder / "crashed", folder / name)

    last = save_killed_at(session, fresh("counted"), at=-1)
    for point in range(last):
        assert save_killed_at(session, fresh(f"killed-{point}"), point) is None
    print(last)


def the_session_after_its_last_step(cfg):
    corpus, tokenizer = load_corpus(cfg.data, cfg.valid_fraction), load_tokenizer(cfg.tokenizer)
    with isolated(cfg.seed):
        session = Session(cfg, tokenize(corpus.train, tokenizer))
        for _ in range(cfg.steps):
            session.step()
    return session


def limit(cfg, folder):
    def on_step(row):
        if row["step"] == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    try:
        train(cfg, folder, on_step=on_step)
    except RunError as error:
        print(json.dumps({"exit": 1, "error": str(error)}))


if __name__ == "__main__":
    what, config, where = sys.argv[1:]
    {"kill": kill, "limit": limit}[what](TrainConfig.from_dict(read_yaml(config)), Path(where))
