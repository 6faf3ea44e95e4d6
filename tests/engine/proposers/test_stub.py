"""Drafts spoilt at chosen places: every accepted count occurs, and the text stays plain decoding's."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch

from specbench.engine.proposers.stub import RecordedOutputs, draw_accepted_counts
from specbench.errors import UserError
from specbench.generate import GenerateRequest, GenerateResult
from tests.engine.devices import DEVICES, ON_CPU
from tests.engine.harness import make_engine, outputs, run, token_request
from tests.engine.test_speculation import ragged_prompts


def requests_of(count: int, max_output_tokens: int = 60) -> list[GenerateRequest]:
    prompts = ragged_prompts(count, seed=0)
    return [token_request(f"r{i}", prompt, max_output_tokens) for i, prompt in enumerate(prompts)]


def record(file: Path, requests: list[GenerateRequest], plain: dict[str, list[int]]) -> str:
    rows = [
        {"prompt_token_ids": request.prompt_token_ids, "output_token_ids": plain[request.request_id]}
        for request in requests
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    return requests_of(6)


@pytest.fixture(scope="module")
def plain(tiny_folder: Path, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    return outputs(make_engine(tiny_folder), requests)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory, requests: list[GenerateRequest], plain: dict) -> str:
    return record(tmp_path_factory.mktemp("stub") / "drafts.jsonl", requests, plain)


def run_stub(folder: Path, k: int, requests: list[GenerateRequest], **fields: object) -> dict[str, GenerateResult]:
    fields = {"accepted_counts": tuple(range(k + 1))} | fields
    return run(make_engine(folder, k, proposer="stub", **fields), requests)


@DEVICES
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("k", [1, 2, 3, 8, 13])
def test_the_verify_contract(
    tiny_folder: Path, requests: list, plain: dict, drafts: str, k: int, depth: int, device: dict
):
    """Wrong at a different place each step, served through the scheduler: plain greedy decoding, token for token. On a
    GPU steps are recorded."""
    torch.backends.cuda.matmul.allow_tf32 = False
    seen: Counter[int] = Counter()
    for budget, concurrency in ((256, 8), (15, 3)):
        results = run_stub(
            tiny_folder,
            k,
            requests,
            drafts=drafts,
            pipeline_depth=depth,
            max_num_batched_tokens=budget,
            max_num_seqs=concurrency,
            cuda_graphs=device != ON_CPU,
            **device,
        )
        assert {name: result.output_token_ids for name, result in results.items()} == plain
        seen.update(step.num_accepted for result in results.values() for step in result.verify_steps)
    assert set(seen) == set(range(k + 1)), "every accepted count occurs"


def test_a_schedule_is_followed_step_by_step(tiny_folder: Path, requests: list, drafts: str):
    wanted = (2, 0, 3)
    for result in run_stub(tiny_folder, 3, requests, drafts=drafts, accepted_counts=wanted).values():
        # The last steps may have fewer drafts: the record ends where the request does.
        seen = [step.num_accepted for step in result.verify_steps[:-1]]
        assert any(seen == [wanted[(first + step) % 3] for step in range(len(seen))] for first in range(len(wanted))), (
            seen
        )


def test_rates_do_not_depend_on_the_batch_and_are_met(tiny_folder: Path, requests: list, plain: dict, drafts: str):
    rates = (0.9, 0.5, 0.1)
    together = run_stub(tiny_folder, 3, requests, drafts=drafts, accepted_counts=None, accepted_rates=rates)
    assert {name: result.output_token_ids for name, result in together.items()} == plain
    alone = run_stub(tiny_folder, 3, requests[2:3], drafts=drafts, accepted_counts=None, accepted_rates=rates)
    name = requests[2].request_id
    assert [step.num_accepted for step in alone[name].verify_steps] == [
        step.num_accepted for step in together[name].verify_steps
    ]
    counts = list(islice(draw_accepted_counts(rates, key=-5), 20_000))
    for position, rate in enumerate(rates):
        share = sum(count > position for count in counts) / len(counts)
        assert abs(share - rate) < 4 * (rate * (1 - rate) / len(counts)) ** 0.5


def test_sampled_requests_are_drafted_for_as_well(tiny_folder: Path, tmp_path: Path):
    requests = [token_request(f"s{i}", p, 20, temperature=1.0, seed=7) for i, p in enumerate(ragged_prompts(3, seed=2))]
    plain = outputs(make_engine(tiny_folder), requests)
    drafts = record(tmp_path / "drafts.jsonl", requests, plain)
    results = run_stub(tiny_folder, 4, requests, drafts=drafts, accepted_counts=(4,))
    assert {name: result.output_token_ids for name, result in results.items()} == plain
    for result in results.values():
        assert [step.num_accepted for step in result.verify_steps] == [4, 4, 4, 4], "19 tokens and one behind the cap"


def test_a_prompt_without_a_record_gets_no_drafts(tiny_folder: Path, requests: list, drafts: str):
    (result,) = run_stub(tiny_folder, 4, [token_request("new", [9, 8, 7], 10)], drafts=drafts).values()
    assert {step.num_drafted for step in result.verify_steps} == {0}


def test_a_resumed_text_goes_on_where_it_stopped():
    recorded = RecordedOutputs({(1, 2): [3, 4, 5], (1, 2, 3, 4, 5, 6): [7]})
    assert recorded.continue_text([1, 2]) == [1, 2, 3, 4, 5]
    assert recorded.continue_text([1, 2, 3, 4]) == [1, 2, 3, 4, 5]
    assert recorded.continue_text([1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5, 6, 7]
    assert recorded.continue_text([2, 1]) == [2, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("{", "line 1: not an object with prompt_token_ids"),
        ('\n{"prompt_token_ids": [1]}', "line 2: not an object with .*KeyError"),
        ('{"prompt_token_ids": [1], "output_token_ids": [-1]}', "line 1: token ids must be"),
        ('{"prompt_token_ids": [1], "output_token_ids": "5"}', "line 1: token ids must be"),
        ('{"prompt_token_ids": [1], "output_token_ids": [5, 256]}', r"line 1: token ids must be .* in 0 \.\. 255"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str):
    file = tmp_path / "drafts.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        RecordedOutputs.read(file, 256)
    with pytest.raises(UserError, match="cannot be read"):
        RecordedOutputs.read(tmp_path / "missing.jsonl", 256)


def stopped(text: list[int], cap: int, stop_id: int | None) -> tuple[list[int], str]:
    """Plain decoding's end of a text: walked token by token, a stop before the cap."""
    for index, token in enumerate(text[:cap]):
        if token == stop_id:
            return text[: index + 1], "stop"
    return text[:cap], "length"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_stops_and_caps_at_every_place_of_a_block(
    tiny_folder: Path, requests: list, plain: dict, drafts: str, k: int, depth: int
):
    """Every draft is accepted, so blocks reach behind caps and stops: both alone, and both in one block either way."""
    text, prompt = plain["r0"], requests[0].prompt_token_ids
    cases = [(cap, None) for cap in range(1, k + 5)]
    cases += [(cap, at) for at in range(1, k + 4) for cap in (at, at + 1, at + 2, 40)]
    wanted = [
        token_request(f"c{i}", prompt, cap, stop_token_ids=() if at is None else (text[at],))
        for i, (cap, at) in enumerate(cases)
    ]
    results = run_stub(tiny_folder, k, wanted, drafts=drafts, accepted_counts=(k,), pipeline_depth=depth)
    num_discarded = 0
    for result, (cap, at) in zip((results[request.request_id] for request in wanted), cases, strict=True):
        tokens, reason = stopped(text, cap, None if at is None else text[at])
        assert (result.output_token_ids, result.record.finish_reason) == (tokens, reason), (cap, at)
        assert result.record.num_output_tokens == len(tokens) == 1 + sum(s.num_emitted for s in result.verify_steps)
        assert all(step.num_accepted == step.num_drafted for step in result.verify_steps)
        num_discarded += sum(step.num_discarded for step in result.verify_steps)
    assert num_discarded > 0


@pytest.mark.parametrize("k", [4, 8])
def test_trimming_verifies_no_draft_behind_the_cap(tiny_folder: Path, requests: list, plain: dict, drafts: str, k: int):
    for cap in range(1, k + 4):
        request = token_request("r", requests[0].prompt_token_ids, cap)
        result = run_stub(tiny_folder, k, [request], drafts=drafts, accepted_counts=(k,), trim_to_max_tokens=True)["r"]
        assert result.output_token_ids == plain["r0"][:cap]
        assert sum(step.num_discarded for step in result.verify_steps) == 0
        emitted = 1
        for step in result.verify_steps:
            assert step.num_drafted == min(k, cap - emitted - 1)
            emitted += step.num_emitted


@pytest.mark.parametrize("k", [3, 8])
def test_no_draft_is_verified_behind_the_context(tiny_folder: Path, requests: list, plain: dict, drafts: str, k: int):
    prompt = requests[0].prompt_token_ids
    max_model_len = len(prompt) + 20
    request = token_request("r", prompt, 1000)
    result = run_stub(tiny_folder, k, [request], drafts=drafts, accepted_counts=(k, 0, 1), max_model_len=max_model_len)[
        "r"
    ]
    assert (result.output_token_ids, result.record.finish_reason) == (plain["r0"][:20], "length")
    num_tokens = len(prompt) + 1
    for step in result.verify_steps:
        assert step.num_drafted == min(k, max_model_len - num_tokens)
        num_tokens += step.num_emitted
