"""Steps padded to a recorded shape: the same text and the same records as without, and padding that writes nothing.

On a CPU the recorded functions are called again on the buffers that a graph would use; the same tests run on a GPU
with graphs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbench.engine.execution.cuda_graphs import capture_sizes, token_sizes
from specbench.engine.execution.stages import Verification
from specbench.engine.layers import fusion
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.proposer_table import PROPOSERS
from specbench.engine.scheduling.step import DECODE, FINAL_CHUNK, SchedulerOutput
from tests.engine.cache_entries import EntryChecker
from tests.engine.devices import DEVICES, ON_GPU
from tests.engine.harness import make_engine, outputs, run, token_request
from tests.engine.oracle import Oracle
from tests.engine.proposers.test_sharing import engine_of, recorded, sharing_requests
from tests.engine.test_speculation import ragged_prompts
from tests.engine.tiny_inkling import build_tiny_inkling

#: The fewer rows a step may have, the fewer graphs are recorded.
FEW_ROWS = {"max_num_batched_tokens": 48}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"), num_modules=8)


def test_numbers_of_rows_that_are_recorded():
    assert token_sizes(100) == [64, 100] and token_sizes(8192) == [64, 128, 256, 384, 512] and token_sizes(8) == [8]


@pytest.mark.parametrize(("most", "last"), [(1, [1]), (3, [1, 2, 3]), (32, [16, 24, 32]), (100, [64, 80, 96, 100])])
def test_sizes_end_with_the_largest_batch(most: int, last: list[int]):
    assert capture_sizes(most)[-len(last) :] == last
    assert capture_sizes(300)[:8] == [1, 2, 4, 8, 16, 24, 32, 40] and capture_sizes(300)[-2:] == [288, 300]


@DEVICES
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_output_equals_plain_decoding(tiny_folder: Path, tmp_path: Path, proposer: str, depth: int, device: dict):
    """Chunks of prompts, preemptions and a shared prefix between the recorded steps."""
    requests = sharing_requests(seed=3)
    plain = outputs(make_engine(tiny_folder), requests)
    drafts = recorded(tmp_path / "drafts.jsonl", requests, plain)
    settings = {"max_num_batched_tokens": 18, "max_num_seqs": 5, "max_model_len": 60, "num_blocks": 30}
    engine = engine_of(
        proposer, tiny_folder, tiny_folder, drafts, 3,
        **device, pipeline_depth=depth, prefix_caching=True, cuda_graphs=True, **settings,
    )  # fmt: skip
    replays = count_replays(engine)
    results = run(engine, requests)
    assert {name: result.output_token_ids for name, result in results.items()} == plain
    steps = [step for result in results.values() for step in result.verify_steps]
    assert sum(step.num_drafted for step in steps) > 0 and sum(replays.values()) > 10
    assert any(size > num_requests for size, num_requests in replays), "some step must be padded"
    check_nothing_was_written_for_padding(engine)


def count_replays(engine: LLMEngine) -> dict[tuple[int, int], int]:
    """(recorded requests, real requests) -> replays, filled as the engine runs."""
    replays: dict[tuple[int, int], int] = {}
    find = engine.runner.captured_steps.find

    def counted(output: SchedulerOutput) -> object:
        captured = find(output)
        if captured is not None:
            shape = (captured.num_requests, output.num_requests)
            replays[shape] = replays.get(shape, 0) + 1
        return captured

    engine.runner.captured_steps.find = counted
    return replays


def check_nothing_was_written_for_padding(engine: LLMEngine) -> None:
    state, size = engine.runner.state, engine.config.block_size
    for pool in engine.caches.values():
        for layer in pool.layers:
            for stream in layer:
                assert not stream[:size].any(), "the null block must stay zero"
    assert not state.block_tables[:, state.scratch_row].any() and not state.counts[:, state.scratch_row].any()


@DEVICES
@pytest.mark.parametrize(("proposer", "k"), [("none", 0), ("mtp_multi", 8), ("mtp_single", 3), ("draft_model", 3)])
def test_padding_writes_nothing(folder: Path, tiny_folder: Path, proposer: str, k: int, device: dict):
    """Canaries in every slot, pool row and table that no request of the step owns: a step of 3 is padded to 4."""
    fields = {"draft_checkpoint": str(tiny_folder)} if proposer == "draft_model" else {}
    checkpoint = tiny_folder if proposer == "draft_model" else folder
    fields |= {"max_num_seqs": 4, **FEW_ROWS}
    engine = make_engine(checkpoint, k, proposer=proposer, **device, cuda_graphs=True, **fields)
    for index, prompt in enumerate(ragged_prompts(3, seed=4)):
        engine.add_request(token_request(f"r{index}", prompt, 60), 0.0)
    while any(one.is_prefilling or one.num_output_tokens == 0 for one in engine.scheduler.running) or (
        not engine.scheduler.running
    ):
        engine.step()
    owned = owned_slots(engine)
    streams = [(name, stream) for name, pool in engine.caches.items() for layer in pool.layers for stream in layer]
    with torch.inference_mode():
        for name, stream in streams:
            free = torch.ones(len(stream), dtype=torch.bool)
            free[list(owned[name])] = False
            free[-1] = False  # the scratch slot
            free[: engine.config.block_size] = False  # the null block: read by all, and zero
            stream[free.nonzero()[:, 0].to(stream.device)] = 77.0
        state = engine.runner.state
        state.token_pool[3] = 55  # the row of nobody
        before = [stream.clone() for _, stream in streams], state.token_pool[3].clone()
        replays = count_replays(engine)
        engine.step()
    assert list(replays) == [(4, 3)]
    for name, slots in owned_slots(engine).items():  # with blocks that this very step was given
        owned[name] |= slots
    for (name, stream), old in zip(streams, before[0], strict=True):
        changed = set((stream != old).flatten(1).any(1).nonzero()[:, 0].tolist()) - {len(stream) - 1}
        assert changed <= owned[name], name
    assert torch.equal(state.token_pool[3], before[1])
    check_nothing_was_written_for_padding(engine)


def owned_slots(engine: LLMEngine) -> dict[str, set[int]]:
    """Cache group -> slots of blocks that running requests hold."""
    size = engine.config.block_size
    slots: dict[str, set[int]] = {}
    for request in engine.scheduler.running:
        tables = engine.scheduler.kv_cache.tables_of(request.row)
        for spec, table in zip(engine.memory.specs, tables, strict=True):
            held = {block * size + offset for block in table.held_blocks() for offset in range(size)}
            slots.setdefault(spec.name, set()).update(held)
    return slots


@DEVICES
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 5, "temperature": 1.0, "min_p": 0.02},
        {"repetition_penalty": 1.3},
        {"bad_words": ()},
        {"logprobs": 2},
    ],
    ids=str,
)
def test_every_way_to_sample(folder: Path, sampling: dict, device: dict):
    """Recorded where temperature is all that is asked for, else run on the recorded buffers; mixed with greedy ones."""
    requests = [
        token_request(f"r{i}", prompt, 14, seed=3, **(sampling if i % 2 else {}))
        for i, prompt in enumerate(ragged_prompts(5, seed=2))
    ]
    expected = run(make_engine(folder), requests)
    for k, depth in ((0, 1), (4, 0), (4, 1)):
        results = run(
            make_engine(folder, k, **device, **FEW_ROWS, cuda_graphs=True, pipeline_depth=depth, max_num_seqs=6),
            requests,
        )
        for name, result in results.items():
            assert result.output_token_ids == expected[name].output_token_ids
            if result.logprobs is not None:
                assert [one.token_id for one in result.logprobs] == result.output_token_ids


@DEVICES
@pytest.mark.parametrize("method", ["standard", "block"])
def test_drawn_drafts_are_the_same_recorded_or_not(folder: Path, method: str, device: dict):
    fields = {"draft_sample_method": "probabilistic", "rejection_sample_method": method, **FEW_ROWS, **device}
    requests = [
        token_request(f"r{i}", prompt, 20, seed=3, temperature=float(i % 2))
        for i, prompt in enumerate(ragged_prompts(4, seed=2))
    ]
    eager = run(make_engine(folder, 4, max_num_seqs=4, **fields), requests)
    recorded_results = run(make_engine(folder, 4, max_num_seqs=4, cuda_graphs=True, **fields), requests)
    for name, result in eager.items():
        assert recorded_results[name].output_token_ids == result.output_token_ids
        counts = [[step.num_accepted for step in one[name].verify_steps] for one in (eager, recorded_results)]
        assert counts[0] == counts[1]


@DEVICES
def test_the_contexts_end_and_caps_leave_dead_rows(folder: Path, device: dict):
    """Fewer rows than recorded near the end of the context; records do not depend on it."""
    prompts = [prompt[:10] for prompt in ragged_prompts(3, seed=4)]
    requests = [token_request(f"r{i}", prompt, 1000) for i, prompt in enumerate(prompts)]
    for trims in (False, True):
        fields = {"max_model_len": 40, "trim_to_max_tokens": trims, **FEW_ROWS, **device}
        eager = run(make_engine(folder, 5, **fields), requests)
        padded = run(make_engine(folder, 5, cuda_graphs=True, **fields), requests)
        for name, result in eager.items():
            other = padded[name]
            assert other.output_token_ids == result.output_token_ids
            assert other.record.finish_reason == "length"
            shape = [(step.num_drafted, step.num_accepted, step.num_emitted) for step in result.verify_steps]
            assert shape == [(step.num_drafted, step.num_accepted, step.num_emitted) for step in other.verify_steps]


@DEVICES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("proposer", ["mtp_multi", "mtp_single", "ngram"])
def test_a_replay_equals_the_functions_bit_for_bit(folder: Path, proposer: str, dtype: str, device: dict):
    sizes = {"max_num_seqs": 4, **FEW_ROWS}
    engine = make_engine(folder, 4, proposer=proposer, dtype=dtype, cuda_graphs=True, **sizes, **device)
    for index, prompt in enumerate(ragged_prompts(3, seed=4)):
        engine.add_request(token_request(f"r{index}", prompt, 60), 0.0)
    used = []
    find = engine.runner.captured_steps.find
    engine.runner.captured_steps.find = lambda output: used.append(find(output)) or used[-1]
    while sum(one is not None for one in used) < 3:
        engine.step()
    captured, kept = used[-1], persistent_tensors(engine)
    before = [tensor.clone() for tensor in kept]
    found = []
    with torch.inference_mode():
        for is_replayed in (True, False):
            for tensor, old in zip(kept, before, strict=True):
                tensor.copy_(old)
            if is_replayed:
                captured.forward()
                captured.verify(Verification.GREEDY)
                captured.draft(is_drawn=False, has_features=False)
                hidden = captured.real_requests(SchedulerOutput(0, rows=[0] * 3)).hidden.hidden_states
            else:
                stages, forwarded = engine.runner.stages, captured._run_forward()
                stages.verify_greedy(forwarded, captured.results)
                stages.draft(forwarded, captured.results, is_sampled=False)
                hidden = forwarded.hidden.hidden_states[: len(hidden)]
            found.append([tensor.clone() for tensor in (*kept, hidden, captured.results.first(3).packed)])
    for replayed, called in zip(*found, strict=True):
        assert torch.equal(replayed, called)


def persistent_tensors(engine: LLMEngine) -> list[torch.Tensor]:
    """What a step changes, scratch slots and rows apart: several rows write there at once, in any order."""
    state = engine.runner.state
    streams = [stream[:-1] for pool in engine.caches.values() for layer in pool.layers for stream in layer]
    proposer = engine.runner.proposer
    values = () if proposer is None else vars(proposer).values()
    own = [value[:-1] for value in values if isinstance(value, torch.Tensor)]
    return [*streams, *own, state.token_pool[:-1], state.counts[:, :-1]]


@pytest.mark.parametrize(
    ("device", "k", "num_requests"),
    [
        pytest.param({"device": "cpu"}, 0, 2, id="interpreter"),
        pytest.param({"device": "cuda"}, 3, 8, marks=ON_GPU, id="cuda"),
    ],
)
def test_chunks_of_prompts_are_replayed_by_their_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: dict, k: int, num_requests: int
):
    """Mixed batches whose forward is replayed say what plain decoding says, beside requests that verify."""
    if device["device"] == "cpu":
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
        monkeypatch.setattr("specbench.engine.kernels.attention_plan._FULL_GRID", 8)  # a program takes a millisecond
    folder = build_tiny_inkling(tmp_path / "tiny", num_hidden_layers=2, local_layer_ids=[0])
    prompts = ragged_prompts(num_requests, seed=9, longest=20)
    requests = [token_request(f"r{i}", prompt, 3) for i, prompt in enumerate(prompts)]
    expected = outputs(make_engine(folder), requests)
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "max_model_len": 48, "attention_backend": "triton"}
    engine = make_engine(folder, k, cuda_graphs=True, pipeline_depth=1, **settings, **device)
    num_rows: list[int] = []
    find = engine.runner.captured_steps.find_mixed
    engine.runner.captured_steps.find_mixed = lambda output: num_rows.append(output.total_tokens) or find(output)
    assert outputs(engine, requests) == expected
    assert len(num_rows) > 1 and min(num_rows) < 16
    check_nothing_was_written_for_padding(engine)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize(
    "proposer", ["mtp_multi", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mtp_single", "draft_model"))]
)
def test_the_kernels_of_a_gpu_change_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proposer: str):
    """Rows, slots, tokens and acceptance by the kernels that a GPU would run, in the interpreter."""
    folder = build_tiny_inkling(tmp_path / "tiny", num_hidden_layers=2, local_layer_ids=[0], num_modules=2)
    requests = [token_request("r0", [5, 9, 11, 5, 9], 6), token_request("r1", [3], 5, temperature=1.0)]
    expected = outputs(make_engine(folder), requests)
    monkeypatch.setattr(fusion, "is_fused", lambda tensor: True)
    monkeypatch.setattr("specbench.engine.kernels.attention_plan._FULL_GRID", 8)
    for attention, rates in (("triton", None), ("torch", (0.7, 0.4))):
        fields: dict = {"attention_backend": attention, "draft_checkpoint": str(folder), "ngram_min": 1}
        if rates is not None:
            fields |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 15, "max_model_len": 32, "pipeline_depth": 1}
        engine = make_engine(folder, 2, proposer=proposer, cuda_graphs=True, **fields, **sizes)
        replays = count_replays(engine)
        if rates is not None:
            monkeypatch.setattr(fusion, "is_fused", lambda tensor: False)
            expected = outputs(make_engine(folder, 2, proposer=proposer, cuda_graphs=True, **fields, **sizes), requests)
            monkeypatch.setattr(fusion, "is_fused", lambda tensor: True)
        assert outputs(engine, requests) == expected
        assert replays
        check_nothing_was_written_for_padding(engine)


def test_only_steps_of_verifications_are_found(folder: Path):
    steps = make_engine(folder, 3, cuda_graphs=True, max_num_seqs=6, **FEW_ROWS).runner.captured_steps

    def find(modes: list[int], num_tokens: list[int]) -> tuple[int, int] | None:
        rows = list(range(len(modes)))
        found = steps.find(SchedulerOutput(step=0, rows=rows, modes=modes, num_tokens=num_tokens))
        return None if found is None else (found.num_requests, found.num_rows)

    assert find([DECODE] * 3, [4, 1, 2]) == (4, 4)
    assert find([DECODE] * 5, [1] * 5) == (6, 1)
    assert find([DECODE], [4]) == (1, 4)
    assert find([DECODE, FINAL_CHUNK], [4, 4]) is None
    assert find([DECODE] * 7, [1] * 7) is None
    assert (
        make_engine(folder, 3).runner.captured_steps.find(SchedulerOutput(0, rows=[0], modes=[DECODE], num_tokens=[1]))
        is None
    )


@DEVICES
@pytest.mark.parametrize("num_modules", [2, 5, 8])
def test_every_entry_and_draft_equals_the_oracle(folder: Path, num_modules: int, device: dict):
    """Every draft, and every entry of every module that a later pass reads, behind every replayed step, after every
    number of accepted drafts: coins decide, so that a graph can hold it."""
    rates = tuple((num_modules - index) / (num_modules + 1) for index in range(num_modules))
    fields = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    engine = make_engine(folder, num_modules, cuda_graphs=True, max_num_seqs=5, **fields, **FEW_ROWS, **device)
    checker = EntryChecker(engine, Oracle(folder))
    replays = count_replays(engine)
    for index, prompt in enumerate(ragged_prompts(3, seed=8, longest=12)):
        engine.add_request(token_request(f"r{index}", prompt, 4 + 12 * num_modules), 0.0)
    num_checked, results = 0, []
    while engine.has_requests:
        results += engine.step()[0]
        num_checked += checker.check_decoding_rows()
    assert sum(replays.values()) > 8 and num_checked > 24 and checker.num_entries > 500
    accepted = {step.num_accepted for result in results for step in result.verify_steps}
    assert accepted == set(range(num_modules + 1))
