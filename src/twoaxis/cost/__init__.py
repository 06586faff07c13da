"""What a model costs, from its configuration alone.

`twoaxis.cost` is the function of this room; `from twoaxis.cost import match_mlp` reaches the rest.
"""

from twoaxis.cost.match import Budget, budget_of, match_mlp, mismatch
from twoaxis.cost.total import cost

__all__ = ["Budget", "budget_of", "cost", "match_mlp", "mismatch"]
