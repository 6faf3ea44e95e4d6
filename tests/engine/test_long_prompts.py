"""Prompts far longer than a step's budget: exact beyond the length that a model was made for, in memory that grows with
the length and not with its square."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from specbench.arrivals import ClosedLoad
from specbench.engine.config import EngineConfig
from specbench.engine.llm_engine import LLMEngine
from specbench.generate import GenerateListener, GenerateRequest, GenerateResult, SamplingParams
from specbench.model_choice import PACKAGED_CHECKPOINT

#: Of the packaged model, whose config says 2,048.
BEYOND = 2500


def run(num_prompt_tokens: int, num_output_tokens: int, num_drafts: int) -> GenerateResult:
    """One request of tokens drawn at random, through an engine that holds just that."""
    engine = LLMEngine(
        EngineConfig(
            checkpoint=str(PACKAGED_CHECKPOINT),
            dtype="float32",
            device="cpu",
            max_model_len=num_prompt_tokens + num_output_tokens + 1,
            max_num_seqs=1,
            max_num_batched_tokens=1024,
            block_size=16,
            num_blocks=None,
            num_speculative_tokens=num_drafts,
            proposer="mtp_multi" if num_drafts else "none",
        )
    )
    ids = np.random.default_rng(0).integers(20, 2000, num_prompt_tokens).tolist()
    params = SamplingParams(num_output_tokens, ignore_eos=True)
    results: list[GenerateResult] = []
    request = GenerateRequest("long", "long", params, prompt_token_ids=tuple(ids))
    engine.generate([request], ClosedLoad(1), GenerateListener(results.append))
    return results[0]


def test_a_prompt_beyond_the_model_s_length_equals_plain_decoding() -> None:
    drafted, plain = (run(BEYOND, 12, num_drafts) for num_drafts in (8, 0))
    assert drafted.record.num_prompt_tokens == BEYOND and drafted.record.num_output_tokens == 12
    assert drafted.output_token_ids == plain.output_token_ids
    assert drafted.record.error is None


def peak_mib(num_prompt_tokens: int) -> float:
    """Of a process of its own: memory that another run used would count too."""
    code = (
        "import resource, torch; torch.set_num_threads(1); from tests.engine.test_long_prompts import run; "
        f"run({num_prompt_tokens}, 4, 8); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(found.stdout)


@pytest.mark.slow
def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    short, middle, long = (peak_mib(length) for length in (4096, 8192, 16384))
    # The second growth is over twice as many tokens as the first: twice as much if linear, four times if quadratic.
    assert long - middle < 3 * (middle - short), (short, middle, long)
