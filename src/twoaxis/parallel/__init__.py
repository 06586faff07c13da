"""A model over several processes: stages of a pipeline that carry the state of any depth method.

`Pipeline` is loaded when it is first asked for: torch's own engine takes seconds to import.
"""

from typing import TYPE_CHECKING, Any

from twoaxis.parallel.plan import TRANSPORTS, Link, Plan, Stage, plan_pipeline
from twoaxis.parallel.schedule import SCHEDULES, check_dropout, check_schedule

if TYPE_CHECKING:
    from twoaxis.parallel.pipeline import Pipeline

__all__ = [
    "SCHEDULES",
    "TRANSPORTS",
    "Link",
    "Pipeline",
    "Plan",
    "Stage",
    "check_dropout",
    "check_schedule",
    "plan_pipeline",
]


def __getattr__(name: str) -> Any:
    if name != "Pipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from twoaxis.parallel.pipeline import Pipeline

    return Pipeline
