"""Golden vectors: replay what the methods' own public code computed, and compare outputs and gradients.

    results = run_folder(Path("tests/golden"))

A folder holds pairs FILE.json and FILE.safetensors. The method is the name of the folder that holds them, or,
in a folder of another name, what the JSON says of its source. A new method adds one file here with a runner:

    @golden("denseformer")
    def replay(case: Case) -> None: ...
"""

from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.check import Result, check
from twoaxis.verify.golden.folder import family_of, run_folder
from twoaxis.verify.golden.registry import Runner, golden, runners

__all__ = ["Case", "NotRun", "Result", "Runner", "check", "family_of", "golden", "run_folder", "runners"]
