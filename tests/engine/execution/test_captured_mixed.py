"""Recorded steps of any kind, chunks of prompts among them: which request has how many rows, only the device knows.

On a CPU the recorded functions are called again on the buffers that a graph would use, and attention is the reference
of the kernel that reads pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specbench.engine.execution.cuda_graphs import CapturedMixed
from specbench.engine.execution.stages import Forwarded, Verification
from specbench.engine.execution.step_results import StepResults
from specbench.engine.execution.token_logprobs import TokenLogprobs
from specbench.engine.kernels.paged_attention import paged_attention_reference
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.proposer_table import PROPOSERS
from specbench.engine.scheduling.step import DECODE, FINAL_CHUNK, PARTIAL_CHUNK, SchedulerOutput
from tests.engine.cache_entries import EntryChecker
from tests.engine.devices import ON_GPU
from tests.engine.execution.test_captured_steps import (
    check_nothing_was_written_for_padding,
    owned_slots,
    persistent_tensors,
)
from tests.engine.harness import make_engine, outputs, run, token_request
from tests.engine.oracle import Oracle
from tests.engine.proposers.test_sharing import engine_of, recorded, sharing_requests
from tests.engine.test_speculation import ragged_prompts
from tests.engine.tiny_inkling import build_tiny_inkling

N = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"), num_modules=N)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """Fields of EngineConfig of an engine whose steps need no segments."""
    if request.param == "cpu":
        place = "specbench.engine.layers.attention_backends.triton_backend.paged_attention"
        monkeypatch.setattr(place, paged_attention_reference)
    yield {"device": request.param, "attention_backend": "triton"}


class Replays:
    """Mixed steps that were found among the recorded ones, those of them whose drafting was, and verifications that
    ran as they came."""

    def __init__(self, engine: LLMEngine) -> None:
        self.outputs: list[SchedulerOutput] = []
        self.num_drafting = self.num_verified = 0
        verify = engine.runner.stages.verify

        def counted_verify(forwarded: Forwarded, results: StepResults) -> list[TokenLogprobs]:
            self.num_verified += 1
            return verify(forwarded, results)

        engine.runner.stages.verify = counted_verify  # type: ignore[method-assign]
        steps = engine.runner.captured_steps
        find = steps.find_mixed

        def counted(output: SchedulerOutput) -> CapturedMixed | None:
            found = find(output)
            if found is not None:
                self.outputs.append(output)
                self.num_drafting += found.can_draft(output)
            return found

        steps.find_mixed = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_output_equals_plain_decoding(
    tiny_folder: Path, tmp_path: Path, proposer: str, depth: int, device: dict
) -> None:
    """Chunks, preemptions and shared prefixes, and the same drafts accepted as by steps that are not recorded."""
    requests = sharing_requests(seed=3)
    plain = outputs(make_engine(tiny_folder), requests)
    drafts = recorded(tmp_path / "drafts.jsonl", requests, plain)
    settings = {"max_num_batched_tokens": 18, "max_num_seqs": 5, "max_model_len": 60, "num_blocks": 30}
    settings |= {"pipeline_depth": depth, "prefix_caching": True}
    results = {}
    for has_graphs in (False, True):
        fields = settings | device | {"cuda_graphs": has_graphs}
        engine = engine_of(proposer, tiny_folder, tiny_folder, drafts, 3, **fields)
        replays = Replays(engine)
        results[has_graphs] = run(engine, requests)
        assert {name: result.output_token_ids for name, result in results[has_graphs].items()} == plain
    for name, result in results[False].items():
        accepted = [[step.num_accepted for step in one[name].verify_steps] for one in results.values()]
        assert accepted[0] == accepted[1], result
    assert any(DECODE in output.modes for output in replays.outputs) and len(replays.outputs) > 10
    proposer_object = engine.runner.proposer
    assert proposer_object is not None
    # A draft model runs one row more behind a chunk, and the largest step may have no room for it.
    assert replays.num_drafting > 0.8 * len(replays.outputs) or not proposer_object.is_capturable_mixed
    check_nothing_was_written_for_padding(engine)


@pytest.mark.parametrize("num_modules", [1, 3, 8])
@pytest.mark.parametrize("seed", range(2))
def test_every_entry_and_draft_equals_the_oracle(folder: Path, num_modules: int, seed: int, device: dict) -> None:
    """Behind every number of accepted drafts, beside chunks: coins decide, so that a graph can hold it."""
    rates = tuple((num_modules - index) / (num_modules + 1) for index in range(num_modules))
    fields = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 2 * num_modules + 14}
    engine = make_engine(folder, num_modules, cuda_graphs=True, **fields, **sizes, **device)
    checker, replays = EntryChecker(engine, Oracle(folder)), Replays(engine)
    prompts = ragged_prompts(8, seed=seed, longest=30)
    for index, prompt in enumerate(prompts):
        engine.add_request(token_request(f"r{index}", prompt, 4 + 3 * num_modules), 0.0)
    num_checked = 0
    while engine.has_requests:
        engine.step()
        num_checked += checker.check_decoding_rows()
    assert num_checked > 20 and checker.num_entries > 100
    num_with_both = sum(len({mode == DECODE for mode in output.modes}) == 2 for output in replays.outputs)
    assert num_with_both > 3 and replays.num_drafting > 3


@pytest.mark.parametrize(("proposer", "k"), [("none", 0), ("mtp_multi", 4), ("mtp_single", 3), ("ngram", 3)])
def test_rows_that_are_left_over_write_nothing(folder: Path, proposer: str, k: int, device: dict) -> None:
    """Canaries in every slot, pool row and table that no request of the step owns."""
    engine = make_engine(
        folder, k, proposer=proposer, cuda_graphs=True, max_num_seqs=4, max_num_batched_tokens=48, **device
    )
    for index, prompt in enumerate(ragged_prompts(2, seed=4)):
        engine.add_request(token_request(f"r{index}", prompt, 60), 0.0)
    for _ in range(3):
        engine.step()
    engine.add_request(token_request("late", [3, 1, 4, 1, 5], 5), 0.0)  # inside the window: it gives no block back
    before = owned_slots(engine)
    streams = [(name, stream) for name, pool in engine.caches.items() for layer in pool.layers for stream in layer]
    state, size = engine.runner.state, engine.config.block_size
    with torch.inference_mode():
        for name, stream in streams:
            free = torch.ones(len(stream), dtype=torch.bool)
            free[list(before[name])] = False
            free[-1] = False  # the scratch slot
            free[:size] = False  # the null block: read by all, and zero
            stream[free.nonzero()[:, 0].to(stream.device)] = 77.0
        state.token_pool[3] = 55  # the row of nobody
        old, replays = [stream.clone() for _, stream in streams], Replays(engine)
        engine.step()
    assert [set(output.modes) for output in replays.outputs] == [{DECODE, FINAL_CHUNK}]
    owned = owned_slots(engine)  # with blocks that this very step was given
    for (name, stream), kept in zip(streams, old, strict=True):
        changed = set((stream != kept).flatten(1).any(1).nonzero()[:, 0].tolist()) - {len(stream) - 1}
        assert changed <= before[name] | owned[name], name
    assert (state.token_pool[3] == 55).all()
    check_nothing_was_written_for_padding(engine)


@pytest.mark.parametrize(
    ("sampling", "is_recorded"),
    [
        ({"temperature": 1.0}, True),
        ({"temperature": 0.8, "top_p": 0.9}, True),
        ({"top_k": 5, "temperature": 1.0, "min_p": 0.02}, True),
        ({"repetition_penalty": 1.3}, False),
        ({"logit_bias": ((5, 2.0),)}, False),
        ({"logprobs": 2}, False),
        ({"prompt_logprobs": 2}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize(("proposer", "k"), [("none", 0), ("mtp_multi", 4)])
def test_every_way_to_sample(
    folder: Path, proposer: str, k: int, sampling: dict, is_recorded: bool, device: dict
) -> None:
    """Mixed with greedy requests; recorded but for what asks for a request's text or for log-probabilities."""
    requests = [
        token_request(f"r{i}", prompt, 14, seed=3, **(sampling if i % 2 else {}))
        for i, prompt in enumerate(ragged_prompts(7, seed=2))
    ]
    expected = run(make_engine(folder), requests)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "pipeline_depth": 1}
    engine = make_engine(folder, k, proposer=proposer, cuda_graphs=True, **sizes, **device)
    replays = Replays(engine)
    for name, result in run(engine, requests).items():
        assert result.output_token_ids == expected[name].output_token_ids
        assert [result.logprobs is None, result.prompt_logprobs is None] == [
            expected[name].logprobs is None, expected[name].prompt_logprobs is None,
        ]  # fmt: skip
        for one, other in zip(result.prompt_logprobs or [], expected[name].prompt_logprobs or [], strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or abs(one.logprob - other.logprob) < 1e-3
    assert (replays.num_verified == 0) == is_recorded and len(replays.outputs) > 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("proposer", "k"), [("none", 0), ("mtp_multi", 4), ("mtp_single", 3)])
def test_a_replay_equals_the_functions_bit_for_bit(
    folder: Path, proposer: str, k: int, dtype: str, device: dict
) -> None:
    if dtype == "bfloat16" and device["device"] == "cpu":
        pytest.skip("the kernel's reference takes fp32")
    engine = make_engine(
        folder, k, proposer=proposer, dtype=dtype, cuda_graphs=True, max_num_seqs=4, max_num_batched_tokens=48, **device
    )
    for index, prompt in enumerate(ragged_prompts(2, seed=4)):
        engine.add_request(token_request(f"r{index}", prompt, 60), 0.0)
    for _ in range(3):
        engine.step()
    engine.add_request(token_request("late", [3, 1, 4, 1, 5], 5), 0.0)
    output = engine.scheduler.schedule()
    engine.runner.state.apply(output)
    captured = engine.runner.captured_steps.find_mixed(output)
    assert captured is not None and set(output.modes) == {DECODE, FINAL_CHUNK}
    kept, found = persistent_tensors(engine), []
    before, n = [tensor.clone() for tensor in kept], output.num_requests
    with torch.inference_mode():
        for is_replayed in (True, False):
            for tensor, old in zip(kept, before, strict=True):
                tensor.copy_(old)
            captured.set(output)
            if is_replayed:
                captured.forward()
                captured.verify(Verification.GREEDY)
                if k:
                    captured.draft(output, is_drawn=False)
                hidden = captured._forward[False].outputs.forwarded.hidden.hidden_states
            else:
                stages = engine.runner.stages
                mixed = captured._forward[False]._function()
                stages.verify_as(Verification.GREEDY, mixed.forwarded, captured.results)
                if k:
                    stages.draft_mixed(mixed, captured.results, is_sampled=False, features=None)
                hidden = mixed.forwarded.hidden.hidden_states
            num_rows = output.total_tokens
            found.append([tensor.clone() for tensor in (*kept, hidden[:num_rows], captured.results.first(n).packed)])
    for replayed, called in zip(*found, strict=True):
        assert torch.equal(replayed, called)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_drawn_drafts_are_the_same_recorded_or_not(folder: Path, method: str, device: dict) -> None:
    fields = {"draft_sample_method": "probabilistic", "rejection_sample_method": method, **device}
    sizes = {"max_num_batched_tokens": 24, "max_num_seqs": 4}
    prompts = ragged_prompts(8, seed=2)
    requests = [
        token_request(f"r{i}", prompt, 12, seed=3, temperature=float(i % 2)) for i, prompt in enumerate(prompts)
    ]
    eager = run(make_engine(folder, 4, **fields, **sizes), requests)
    engine = make_engine(folder, 4, cuda_graphs=True, **fields, **sizes)
    replays = Replays(engine)
    for name, result in run(engine, requests).items():
        assert eager[name].output_token_ids == result.output_token_ids
        counts = [[step.num_accepted for step in one.verify_steps] for one in (eager[name], result)]
        assert counts[0] == counts[1]
    assert replays.num_drafting > 3 and replays.num_verified == 0


def test_the_smallest_that_holds_forward_and_drafting_is_found(folder: Path, device: dict) -> None:
    engine = make_engine(folder, N, cuda_graphs=True, max_num_seqs=9, max_num_batched_tokens=100, **device)
    steps = engine.runner.captured_steps

    def find(modes: list[int], num_tokens: list[int]) -> tuple[int, bool] | None:
        output = SchedulerOutput(step=0, rows=list(range(len(modes))), modes=modes, num_tokens=num_tokens)
        found = steps.find_mixed(output)
        return None if found is None else (found.num_tokens, found.can_draft(output))

    assert find([FINAL_CHUNK, DECODE], [20, 9]) == (64, True)
    assert find([PARTIAL_CHUNK], [64]) == (64, True) and find([PARTIAL_CHUNK], [65]) == (100, True)
    # A pass behind a verification of one row has N + 1.
    assert find([FINAL_CHUNK, *[DECODE] * 7], [2, *[1] * 7]) == (100, True)
    assert find([FINAL_CHUNK, *[DECODE] * 8], [50, *[1] * 8]) == (64, False)
    assert find([FINAL_CHUNK], [101]) is None
