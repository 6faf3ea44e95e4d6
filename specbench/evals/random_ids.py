"""Prompts of random token ids: for speed, of models without a tokenizer and of random weights. Nothing is scored.

Acceptance and text on such prompts say nothing, and reports say that.
"""

from __future__ import annotations

import hashlib
import json
import random

from specbench.errors import UserError
from specbench.evals.exact_prompts import check_room
from specbench.evals.task import EvalModel, Sample, Task
from specbench.records import DataIdentity
from specbench.run_config import EvalConfig

#: Samples where eval.num_samples is unset.
NUM_SAMPLES = 128


def load_random_ids(config: EvalConfig, model: EvalModel) -> Task:
    """The task: eval.isl ids drawn evenly from the vocabulary, answered with at most eval.osl."""
    isl, osl = config.isl, config.osl
    if isl is None or osl is None:
        raise UserError("eval.isl: random prompts need eval.isl and eval.osl, in tokens")
    check_room(isl, osl, model)
    chance, num_samples = random.Random(0), config.num_samples or NUM_SAMPLES
    prompts = [tuple(chance.randrange(model.vocab_size) for _ in range(isl)) for _ in range(num_samples)]
    samples = tuple(
        Sample(sample_id=f"random-ids-{index:04d}", max_output_tokens=osl, prompt_token_ids=prompt)
        for index, prompt in enumerate(prompts)
    )
    data = DataIdentity(
        name=f"random_ids_{isl}_{osl}",
        path="drawn by specbench/evals/random_ids.py",
        revision=None,
        sha256=hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        packaged=False,
        num_samples=num_samples,
    )
    return Task("random_ids", data, samples, (), None, config.stop or (), ())
