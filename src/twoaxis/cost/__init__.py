"""What a model costs, from its configuration alone.

`twoaxis.cost` is the function of this room; `from twoaxis.cost import match_mlp` reaches the rest.
"""

from twoaxis.cost.boundaries import Boundary, boundaries
from twoaxis.cost.fused import Fused, fused
from twoaxis.cost.match import Budget, budget_of, match_mlp, mismatch
from twoaxis.cost.passes import traced
from twoaxis.cost.total import cost

__all__ = [
    "Boundary",
    "Budget",
    "Fused",
    "boundaries",
    "budget_of",
    "cost",
    "fused",
    "match_mlp",
    "mismatch",
    "traced",
]
