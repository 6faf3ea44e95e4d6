"""The evals by name. A new one is its file, its yaml, its test and a line here."""

from __future__ import annotations

from typing import Protocol

from specbench.errors import UserError, near_name
from specbench.evals.aime25 import load_aime25
from specbench.evals.fixed_length import load_fixed_length
from specbench.evals.gsm8k import load_gsm8k
from specbench.evals.lm_eval_tasks import load_lm_eval
from specbench.evals.losslessness import load_losslessness
from specbench.evals.mmau import load_mmau
from specbench.evals.mt_bench import load_mt_bench
from specbench.evals.prompts import load_prompts
from specbench.evals.random_ids import load_random_ids
from specbench.evals.scorers import SCORER_NAMES
from specbench.evals.spec_bench import load_spec_bench
from specbench.evals.speed_bench import load_speed_bench
from specbench.evals.task import EvalModel, Task, check_scorer
from specbench.run_config import EvalConfig


class TaskLoader(Protocol):
    """Reads and checks an eval's data."""

    def __call__(self, config: EvalConfig, model: EvalModel) -> Task: ...


TASKS: dict[str, TaskLoader] = {
    "aime25": load_aime25,
    "fixed_length": load_fixed_length,
    "gsm8k": load_gsm8k,
    "lm_eval": load_lm_eval,
    "losslessness": load_losslessness,
    "mmau": load_mmau,
    "mt_bench": load_mt_bench,
    "prompts": load_prompts,
    "random_ids": load_random_ids,
    "spec_bench": load_spec_bench,
    "speed_bench": load_speed_bench,
}


def load_task(config: EvalConfig, model: EvalModel) -> Task:
    """The task that `config` names; a UserError says what is wrong with it or with its data."""
    if config.name not in TASKS:
        raise UserError(f"eval.name: unknown eval {config.name!r}: {near_name(config.name, TASKS)}")
    if config.name != "lm_eval" and config.scorer is not None and config.scorer not in SCORER_NAMES:
        raise UserError(f"eval.scorer: unknown scorer {config.scorer!r}: {near_name(config.scorer, SCORER_NAMES)}")
    task = TASKS[config.name](config, model)
    check_scorer(config.scorer, task.scorers)
    return task
