"""Event logs for the tests of reports: single records by hand, and a small simulator of speculative decoding."""

from __future__ import annotations

import random
from collections.abc import Iterable

from specbench.records import DataIdentity, ModelIdentity, RequestRecord, RunRecord, SampleRecord, VerifyStep
from specbench.run_directory import EventLog


def make_run(num_speculative_tokens: int | None = 8, method: str = "mtp", **changes: object) -> RunRecord:
    config = {
        "model": {"name": "inkling", "checkpoint": None},
        "spec": {"name": f"mtp{num_speculative_tokens}" if method != "none" else "none", "method": method},
        "parallel": {"name": "tp1", "tensor_parallel_size": 1},
        "eval": {"name": "gsm8k", "scorer": "official"},
        "sampling": {"temperature": 0.0, "ignore_eos": False},
    }
    config["spec"]["num_speculative_tokens"] = num_speculative_tokens
    fields = {
        "status": "finished",
        "config": config,
        "command": "specbench +model=inkling spec=mtp8 eval=gsm8k",
        "version": "0.1.0",
        "commit": "abc",
        "is_dirty": False,
        "hardware": {"cpu": "a processor", "gpus": []},
        "packages": {"torch": "2.11.0"},
        "model": ModelIdentity("inkling", "inkling-nano", "/m", None, "f00d", True, 5_800_000, 8),
        "data": DataIdentity("nano_problems", "/d", None, "beef", True, 4),
        "acceptance_source": "engine",
        "started_at": "2026-11-01T00:00:00Z",
    }
    return RunRecord(**{**fields, **changes})


def make_request(request_id: str, **changes: object) -> RequestRecord:
    fields = {
        "request_id": request_id,
        "sample_id": request_id,
        "turn": 0,
        "repeat": 0,
        "is_warmup": False,
        "category": None,
        "num_prompt_tokens": 10,
        "num_cached_prompt_tokens": 0,
        "num_output_tokens": 1,
        "finish_reason": "stop",
        "arrival_s": 0.0,
        "first_scheduled_s": 0.0,
        "first_token_s": 1.0,
        "last_token_s": 1.0,
        "num_preemptions": 0,
        "error": None,
    }
    return RequestRecord(**{**fields, **changes})


def make_step(request_id: str, step: int, num_drafted: int, num_accepted: int, **changes: object) -> VerifyStep:
    emitted = changes.pop("num_emitted", num_accepted + 1)
    fields = {
        "request_id": request_id,
        "step": step,
        "engine_step": step,
        "output_index": 1,
        "num_drafted": num_drafted,
        "num_accepted": num_accepted,
        "num_emitted": emitted,
        "num_discarded": num_accepted + 1 - emitted,
        "is_trimmed": emitted < num_accepted + 1,
        "batch_size": 1,
        "end_s": 2.0 + step,
    }
    return VerifyStep(**{**fields, **changes})


def make_sample(sample_id: str, official: float | None, **changes: object) -> SampleRecord:
    fields = {
        "sample_id": sample_id,
        "turn": 0,
        "repeat": 0,
        "prompt": "q",
        "prompt_token_ids": None,
        "output_text": "a",
        "reasoning_text": "",
        "output_token_ids": [1],
        "reference": "1",
        "extracted": {"official": "1"},
        "score": {"official": official},
        "is_truncated": False,
    }
    return SampleRecord(**{**fields, **changes})


def log_of_accepted(rows: Iterable[tuple[int, ...]], num_drafted: int) -> EventLog:
    """One request for each tuple of accepted counts, a row for each count, nothing stopped."""
    log = EventLog()
    for index, accepted in enumerate(rows):
        name = f"r{index}"
        log.requests.append(make_request(name, num_output_tokens=1 + sum(accepted) + len(accepted)))
        log.verify_steps.extend(make_step(name, step, num_drafted, count) for step, count in enumerate(accepted))
    return log


def simulate(
    seed: int, num_requests: int = 20, k: int = 4, acceptance: float = 0.7, num_warmup: int = 2, is_ragged: bool = False
) -> EventLog:
    """Requests of random length that draft k tokens a step, and stop inside a chunk now and then.

    With `is_ragged`, steps draft fewer than k, some nothing (as after a resume), and the rows come interleaved.
    """
    rng = random.Random(seed)
    log = EventLog()
    for index in range(num_requests + num_warmup):
        name = f"r{index}"
        rows, num_tokens, clock = [], 1, index + 0.5
        target = rng.choice([1, 2, rng.randrange(3, 60)])
        while num_tokens < target:
            drafted = rng.choice([0, rng.randrange(k + 1), k]) if is_ragged else k
            accepted = next((i for i in range(drafted) if rng.random() > acceptance), drafted)
            emitted = min(accepted + 1, target - num_tokens)
            clock += rng.random() + 0.01
            rows.append(
                make_step(name, len(rows), drafted, accepted, num_emitted=emitted, output_index=num_tokens, end_s=clock)
            )
            num_tokens += emitted
        log.requests.append(
            make_request(
                name,
                is_warmup=index < num_warmup,
                category=rng.choice([None, "a", "b"]),
                num_output_tokens=num_tokens,
                arrival_s=float(index),
                first_token_s=index + 0.5,
                last_token_s=clock,
            )
        )
        log.verify_steps.extend(rows)
    if is_ragged:
        rng.shuffle(log.verify_steps)
    return log
