"""A model over several processes: stages of a pipeline that carry the state of any depth method."""

from twoaxis.parallel.pipeline import SCHEDULES, Pipeline, check_schedule
from twoaxis.parallel.plan import TRANSPORTS, Link, Plan, Stage, plan_pipeline

__all__ = ["SCHEDULES", "TRANSPORTS", "Link", "Pipeline", "Plan", "Stage", "check_schedule", "plan_pipeline"]
