"""Figures of other engines on one H200, published elsewhere: not measured in this run.

vLLM 0.26.0 and transformers 5.17 on torch 2.11, bf16, random weights, by the rules of this benchmark; two runs of the
same differ by 3 to 5 %.
"""

from __future__ import annotations

#: (shape, drafts) -> batch -> milliseconds a step
VLLM_STEP_MS: dict[tuple[str, int], dict[int, float]] = {
    ("qwen3_8b", 0): {1: 4.98, 16: 5.61, 64: 7.94},
    ("mimo_7b", 0): {1: 4.87, 16: 5.53, 64: 7.83},
    ("mimo_7b", 1): {1: 5.38, 16: 6.25, 64: 8.93},
    ("mimo_7b", 4): {1: 7.16, 16: 8.32, 64: 14.62},
}
#: (shape, drafts) -> batch -> output tokens a second at the synthetic rates, prompts included
VLLM_TOKEN_PER_S: dict[tuple[str, int], dict[int, float]] = {
    ("qwen3_8b", 0): {1: 197, 16: 2274, 64: 4698},
    ("mimo_7b", 0): {1: 202, 16: 2357, 64: 4914},
    ("mimo_7b", 1): {1: 305, 16: 3277, 64: 5964},
    ("mimo_7b", 4): {1: 388, 16: 3706, 64: 5966},
}
#: k constant drafts, verification of k + 1 rows -> batch -> milliseconds a step, on the shape of Qwen3-8B
VLLM_NGRAM_STEP_MS: dict[int, dict[int, float]] = {4: {1: 7.53, 16: 8.23}, 8: {1: 7.35, 16: 9.10}}
#: transformers with a static cache, compiled: shape -> batch -> milliseconds a step
TRANSFORMERS_STEP_MS: dict[str, dict[int, float]] = {"qwen3_8b": {1: 8.1, 16: 14.7, 64: 34.6}}
#: shape -> batch -> prompt tokens a second, of prompts of 1,024 tokens
VLLM_PREFILL_TOKEN_PER_S: dict[str, dict[int, float]] = {"qwen3_8b": {1: 38_500, 16: 43_400, 64: 44_000}}
