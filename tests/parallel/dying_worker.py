"""`twoaxis train`, of which process 1 kills itself once in its fourth step. Started by torchrun; not a test."""

import os
import signal
import sys
from pathlib import Path

from twoaxis.cli.main import main
from twoaxis.train import session

plain, died = session.gradient, Path(os.environ["DIES"])
count = 0


def dying(*args):
    global count
    count += 1
    if os.environ["RANK"] == "1" and count == 4 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*args)


session.gradient = dying
sys.exit(main(["train", *sys.argv[1:]]))
