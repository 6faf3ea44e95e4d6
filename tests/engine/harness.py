"""An engine over a tiny checkpoint, and a loop that runs requests to their end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specbench.engine.config import EngineConfig
from specbench.engine.llm_engine import LLMEngine
from specbench.generate import GenerateRequest, GenerateResult, SamplingParams


def engine_config(folder: Path, k: int = 0, **fields: object) -> EngineConfig:
    settings: dict = {
        "checkpoint": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "block_size": 4,
        "num_blocks": None,
        "num_speculative_tokens": k,
        "proposer": "mtp_multi" if k else "none",
    }
    return EngineConfig(**(settings | fields))


def make_engine(folder: Path, k: int = 0, **fields: object) -> LLMEngine:
    return LLMEngine(engine_config(folder, k, **fields))


def token_request(name: str, prompt: Sequence[int], max_output_tokens: int = 16, **sampling: object) -> GenerateRequest:
    params = SamplingParams(max_output_tokens, **({"ignore_eos": True} | sampling))
    return GenerateRequest(name, name, params, prompt_token_ids=tuple(prompt))


def run(engine: LLMEngine, requests: Sequence[GenerateRequest]) -> dict[str, GenerateResult]:
    """Queue everything at once; results by request id."""
    for request in requests:
        engine.add_request(request, arrival_s=0.0)
    results = {}
    while engine.has_requests:
        finished, _ = engine.step()
        results |= {result.record.request_id: result for result in finished}
    assert engine.scheduler.kv_cache.num_blocks_used == 0
    assert len(results) == len(requests)
    return results


def outputs(engine: LLMEngine, requests: Sequence[GenerateRequest]) -> dict[str, list[int]]:
    return {name: result.output_token_ids for name, result in run(engine, requests).items()}
