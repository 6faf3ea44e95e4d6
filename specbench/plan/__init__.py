"""Everything that is decided before a weight is loaded.

Belongs here: finding, resolving and checking (run_plan.py and what it asks), and what is said of a plan. Does not
belong here: running anything (benchmark.py).
"""

from specbench.plan.description import describe
from specbench.plan.figure_checks import check_objective
from specbench.plan.run_fingerprint import fingerprint
from specbench.plan.run_plan import Plan, prepare

__all__ = ["Plan", "check_objective", "describe", "fingerprint", "prepare"]
