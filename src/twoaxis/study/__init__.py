"""The study room: grids of runs, what they allow to be said, and the report.

study = read_study("STUDY.yaml")                  # or preset(), or Study(rows=...)
results = compare(study, "runs/mine")             # trains, measures, writes results.json and report.html
write_report("runs/mine")                         # again, from the run folders
"""

from twoaxis.study.collect import collect
from twoaxis.study.compare import Event, compare
from twoaxis.study.file import grid_of, read_study, seeds_of, study_from
from twoaxis.study.grid import Row, Study, cross, named, preset, preset_training, with_steps
from twoaxis.study.report import write_report
from twoaxis.study.statistics import Verdict, verdicts

__all__ = [
    "Event",
    "Row",
    "Study",
    "Verdict",
    "collect",
    "compare",
    "cross",
    "grid_of",
    "named",
    "preset",
    "preset_training",
    "read_study",
    "seeds_of",
    "study_from",
    "verdicts",
    "with_steps",
    "write_report",
]
