"""What sampling parameters make of logits, in plain Python: the passes of the engine once more, on lists."""

from __future__ import annotations

import math

from specbench.generate import SamplingParams


def processed_logits(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The passes in their order; greedy stops before temperature. `logits` are the model's behind prompt and output."""
    logits, vocab = list(logits), range(len(logits))
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    banned = set(vocab) - set(params.allowed_token_ids) if params.allowed_token_ids else set()
    if len(output) < params.min_tokens:
        banned |= set(params.stop_token_ids)
    logits = [-math.inf if token_id in banned else logit for token_id, logit in enumerate(logits)]
    for token_id in set(prompt + output):
        factor = params.repetition_penalty
        logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
    for token_id in set(output):
        logits[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    words = {
        word[-1]
        for word in params.bad_word_token_ids
        if len(output) >= len(word) - 1 and output[len(output) - len(word) + 1 :] == list(word[:-1])
    }
    if any(logit > -math.inf for token_id, logit in enumerate(logits) if token_id not in words):
        logits = [-math.inf if token_id in words else logit for token_id, logit in enumerate(logits)]
    return logits if params.temperature < 1e-5 else filtered(params, [logit / params.temperature for logit in logits])


def filtered(params: SamplingParams, logits: list[float]) -> list[float]:
    best = max(logits)
    if params.min_p:
        logits = [logit if logit >= best + math.log(params.min_p) else -math.inf for logit in logits]
    if params.top_k:
        last = sorted(logits, reverse=True)[params.top_k - 1]
        logits = [logit if logit >= last else -math.inf for logit in logits]
    if params.top_p < 1:
        total = sum(math.exp(logit) for logit in logits)
        mass, kept = 0.0, set()
        for token_id in sorted(range(len(logits)), key=lambda token_id: -logits[token_id]):
            if mass < params.top_p:
                kept.add(token_id)
            mass += math.exp(logits[token_id]) / total
        logits = [logit if token_id in kept else -math.inf for token_id, logit in enumerate(logits)]
    return logits


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(math.exp(logit) for logit in logits))
    return [logit - total for logit in logits]
