"""The cost of a step over compared runs, as far as they may stand in one law.

Belongs here: which of the compared runs are put together. Does not belong here: the law and what follows from it
(cost_model.py), text (cost_section.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.reports.comparability import Comparability
from specbench.reports.compared_run import ComparedRun
from specbench.reports.cost_model import costed_run, sweep_cost_model


def compared_costs(base: ComparedRun, others: Sequence[tuple[ComparedRun, Comparability]]) -> dict | None:
    """Of the base and those of the same model, samples and hardware that recorded engine steps.

    None where their k are all the same: then the report of each run says what there is to say.
    """
    alike = [base, *(run for run, grounds in others if grounds.is_paired and grounds.void_of_speed is None)]
    costed = [
        costed_run(run.label, run.columns, run.engine_steps, run.num_speculative_tokens)
        for run in alike
        if len(run.engine_steps)
    ]
    runs = [run for run in costed if run is not None]
    return sweep_cost_model(runs) if len({run.costs.k for run in runs}) > 1 else None
