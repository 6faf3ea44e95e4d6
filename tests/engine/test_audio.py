"""Audio through the whole engine: drafts around it, shared blocks, preemption, the output check, what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench.arrivals import ClosedLoad
from specbench.engine.execution.engine_memory import plan_engine_memory
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.replay import check_output
from specbench.errors import UserError
from specbench.generate import GenerateListener, GenerateRequest, GenerateResult
from tests.engine.cache_entries import EntryChecker
from tests.engine.content.prompts import AUDIO_TOKENS, audio_request, clip, draw, tell
from tests.engine.harness import make_engine, outputs, run, token_request
from tests.engine.oracle import Oracle
from tests.engine.proposers.draft_checks import run_and_check_drafts
from tests.engine.proposers.test_mtp_multi import run_and_check
from tests.engine.test_speculation import force_accepted
from tests.engine.tiny_inkling import build_tiny_inkling

N = 8
MARKER = AUDIO_TOKENS.marker_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"), num_modules=N, has_towers=True)


def around(
    num_before: int, num_tokens: int, num_after: int, seed: int = 0, max_output_tokens: int = 24
) -> GenerateRequest:
    """A clip with so many tokens before and behind it."""
    prompt = [*draw(2 * seed, num_before), MARKER, *draw(2 * seed + 1, num_after)]
    return audio_request(f"r{seed}", prompt, [clip(seed, num_tokens)], max_output_tokens)


# ---- Drafts


@pytest.mark.parametrize("num_after", [0, 1, 3, 6, 7, 8, 20])
@pytest.mark.parametrize(("num_modules", "depth"), [(1, 0), (8, 0), (8, 1)])
def test_every_row_of_every_module_equals_the_oracle(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_modules: int, depth: int, num_after: int
) -> None:
    """Right behind a clip rows that run again after a rejection read its features too."""
    rng = random.Random(num_after)
    force_accepted(monkeypatch, [rng.choice([0, 0, rng.randint(0, num_modules)]) for _ in range(1000)], 246)
    oracle, request = Oracle(folder), around(3, 9, num_after)
    tell(oracle, request)
    assert run_and_check(make_engine(folder, num_modules, pipeline_depth=depth), oracle, [request]) > 100


@pytest.mark.parametrize("budget_above", [0, 1, 4, 7, 8])
def test_a_clip_cut_by_chunks_of_every_size_equals_the_oracle(
    folder: Path, monkeypatch: pytest.MonkeyPatch, budget_above: int
) -> None:
    """The lookahead of a chunk's last rows reaches into the part of the clip that the next chunk runs."""
    rng = random.Random(budget_above)
    force_accepted(monkeypatch, [rng.randint(0, N) for _ in range(1000)], 246)
    oracle = Oracle(folder)
    requests = [around(*sizes, seed, 4) for seed, sizes in enumerate(((0, 30, 0), (5, 17, 2), (1, 1, 9)))]
    for request in requests:
        tell(oracle, request)
    engine = make_engine(folder, N, max_num_seqs=3, max_num_batched_tokens=N + budget_above)
    run_and_check(engine, oracle, requests)


def test_several_clips_beside_text_alone_equal_the_oracle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    force_accepted(monkeypatch, [rng.randint(0, N) for _ in range(1000)], 246)
    oracle = Oracle(folder)
    several = audio_request(
        "a", [9, MARKER, MARKER, *draw(1, 2), MARKER, 4], [clip(s, 2 + 3 * s) for s in range(3)], 20
    )
    requests = [several, token_request("b", draw(2, 12), 12), around(2, 4, 0, 3, 12)]
    tell(oracle, several)
    tell(oracle, requests[2])
    run_and_check(make_engine(folder, N, max_num_batched_tokens=20), oracle, requests)


def test_the_oracle_notices_modules_that_do_not_hear(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, deaf = around(3, 9, 2), {"faults": ("deaf_modules",)}
    assert outputs(make_engine(folder, 4, **deaf), [request]) == plain(folder, [request])
    force_accepted(monkeypatch, [0] * 100, 246)
    oracle = Oracle(folder)
    tell(oracle, request)
    with pytest.raises(AssertionError):
        run_and_check(make_engine(folder, 4, **deaf), oracle, [request])


def test_the_single_module_hears(folder: Path) -> None:
    oracle, request = Oracle(folder), around(2, 6, 0)
    token_ids = tell(oracle, request)
    engine = make_engine(folder, 3, proposer="mtp_single")
    engine.add_request(request, 0.0)
    engine.step()
    pool = engine.runner.state.token_pool[engine.scheduler.running[0].row]
    num_tokens = len(token_ids) + 1
    expected = oracle.single_module_drafts(pool[:num_tokens].tolist(), 3)
    assert pool[num_tokens : num_tokens + 3].tolist() == [int(logits.argmax()) for logits in expected]


def test_a_draft_model_hears_with_its_own_tower(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"num_modules": 0, "seed": 7, "num_hidden_layers": 3, "hidden_size": 32, "local_layer_ids": [1]}
    draft = build_tiny_inkling(tmp_path / "draft", has_towers=True, **shape)
    rng = random.Random(1)
    force_accepted(monkeypatch, [rng.choice([0, 3, rng.randint(0, 3)]) for _ in range(1000)], 246)
    for request in (around(3, 9, 0), around(0, 30, 2)):
        oracle = Oracle(draft)
        tell(oracle, request)
        engine = make_engine(
            folder, 3, proposer="draft_model", draft_checkpoint=str(draft), max_num_batched_tokens=12, pipeline_depth=0
        )
        assert run_and_check_drafts(engine, [request], continued_by(oracle)) > 10


def test_a_draft_model_without_a_tower_reads_placeholders(folder: Path, tmp_path: Path) -> None:
    draft = build_tiny_inkling(tmp_path / "draft", num_modules=0, seed=7)
    requests = [around(3, 9, 4)]
    engine = make_engine(folder, 3, proposer="draft_model", draft_checkpoint=str(draft))
    assert outputs(engine, requests) == plain(folder, requests)


def continued_by(oracle: Oracle) -> Callable[[list[int], int], list[torch.Tensor]]:
    def drafts(committed: list[int], num_drafts: int) -> list[torch.Tensor]:
        tokens, logits = list(committed), []
        for _ in range(num_drafts):
            logits.append(oracle.target_hidden_and_logits(tokens)[1][-1])
            tokens.append(int(logits[-1].argmax()))
        return logits

    return drafts


# ---- Text


def plain(folder: Path, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    return outputs(make_engine(folder), requests)


@pytest.mark.parametrize("proposer", ["mtp_multi", "mtp_single", "ngram"])
@pytest.mark.parametrize("depth", [0, 1])
def test_any_proposer_says_what_plain_decoding_says(folder: Path, proposer: str, depth: int) -> None:
    requests = [around(seed, 3 + 5 * seed, 4 * (seed % 3), seed) for seed in range(5)]
    fields = {"proposer": proposer, "pipeline_depth": depth, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    assert outputs(make_engine(folder, 4, **fields), requests) == plain(folder, requests)


def test_text_depends_on_what_is_heard(folder: Path) -> None:
    prompt = [*draw(0, 4), MARKER, *draw(1, 4)]
    requests = [audio_request(f"r{seed}", prompt, [clip(seed, 9)], 12) for seed in range(4)]
    assert len({tuple(tokens) for tokens in plain(folder, requests).values()}) == 4


def test_generate_runs_what_can_be_heard_and_says_why_of_the_rest(folder: Path, tmp_path: Path) -> None:
    """Clips are heard beside the steps: texts and errors are those of one request after the other."""
    heard = [around(seed, 4 + seed, seed, seed) for seed in range(6)] + [token_request("text", draw(7, 9), 9)]
    deaf = [replace(around(2, 3, 1, seed), audio=(b"noise", tmp_path / "none.wav")[seed % 2 :][:1]) for seed in (7, 8)]
    results: dict[str, GenerateResult] = {}
    listener = GenerateListener(lambda result: results.update({result.record.request_id: result}))
    make_engine(folder, 3, max_num_seqs=2).generate(heard + deaf, ClosedLoad(concurrency=4), listener)
    expected = plain(folder, heard)
    assert {name: results[name].output_token_ids for name in expected} == expected
    errors = [results[request.request_id].record.error for request in deaf]
    assert "none.wav: no such file" in errors[0] and "can't be decoded" in errors[1]
    assert len(results) == len(heard) + len(deaf)


def test_steps_of_text_alone_carry_no_content(folder: Path) -> None:
    engine = make_engine(folder, N)
    engine.add_request(around(2, 5, 1), 0.0)
    engine.add_request(token_request("text", draw(3, 9), 40), 0.0)
    contents = []
    schedule = engine.scheduler.schedule

    def recording_schedule():
        output = schedule()
        contents.append([window.pieces for window in output.content])
        return output

    engine.scheduler.schedule = recording_schedule
    while engine.has_requests:
        engine.step()
    # The chunk, and the steps whose rows may run again right behind the clip.
    assert contents[0] and not any(contents[N:]) and len(contents) > 2 * N


# ---- Shared blocks and preemption


def shared_engine(folder: Path, **fields: object) -> LLMEngine:
    return make_engine(folder, N, prefix_caching=True, **fields)


def steps_of(result: GenerateResult) -> list[tuple[int, int]]:
    return [(step.num_drafted, step.num_accepted) for step in result.verify_steps]


def test_equal_text_with_other_audio_is_no_hit(folder: Path) -> None:
    engine, prompt = shared_engine(folder), [*draw(0, 9), MARKER, *draw(1, 20)]
    clips = {"a": clip(0, 14), "b": clip(1, 14), "a again": clip(0, 14)}
    requests = {name: audio_request(name, prompt, [content], 10) for name, content in clips.items()}
    results = {name: run(engine, [request])[name] for name, request in requests.items()}
    cached = {name: result.record.num_cached_prompt_tokens for name, result in results.items()}
    # Ten tokens and the marker are before the clip; the drafter's keys read N tokens ahead, into it.
    assert cached["a"] == 0 and cached["b"] <= 8 and cached["a again"] >= 24
    for name, request in requests.items():
        expected = run(make_engine(folder, N), [request])[name]
        assert results[name].output_token_ids == expected.output_token_ids
        assert steps_of(results[name]) == steps_of(expected)


def test_a_drafters_block_before_the_clip_is_keyed_by_what_is_heard_behind_it(folder: Path) -> None:
    """Text through the block's edge is equal, and so are the ids behind it: the clips are not."""
    engine, oracle = shared_engine(folder), Oracle(folder)
    prompt = [*draw(0, 16), MARKER, *draw(1, 6)]
    first, second = (audio_request(name, prompt, [clip(seed, 12)], 8) for seed, name in enumerate("ab"))
    run(engine, [first])
    tell(oracle, second)
    checker = EntryChecker(engine, oracle)
    result = run(engine, [second])["b"]
    assert checker.num_entries
    assert result.record.num_cached_prompt_tokens == 8  # of 16 + 1: block 8 .. 11 reads ahead to 19, the clip's third


def test_hits_inside_and_behind_a_clip_leave_every_entry_right(folder: Path) -> None:
    engine, oracle = shared_engine(folder), Oracle(folder)
    prefix, sound = [*draw(0, 5), MARKER], clip(0, 20)
    run(engine, [audio_request("a", [*prefix, *draw(1, 20)], [sound], 8)])
    checker = EntryChecker(engine, oracle)
    for seed, shared in enumerate((0, 5, 20)):
        request = audio_request(f"b{seed}", [*prefix, *draw(1, 20)[:shared], *draw(50 + seed, 5)], [sound], 8)
        oracle._heard.clear()
        tell(oracle, request)
        result = run(engine, [request])[request.request_id]
        assert (result.record.num_cached_prompt_tokens or 0) >= 16
    assert checker.num_entries


def test_preemption_at_every_step_changes_nothing(folder: Path) -> None:
    request = around(4, 11, 2, max_output_tokens=6)
    expected = run(make_engine(folder, N), [request])["r0"]
    num_steps, num_preemptions = 0, 1
    while num_preemptions:
        num_steps += 1
        engine, oracle = make_engine(folder, N, max_num_batched_tokens=12, prefix_caching=True), Oracle(folder)
        tell(oracle, request)
        checker = EntryChecker(engine, oracle)
        engine.add_request(request, 0.0)
        result = None
        for step in range(1000):
            if step == num_steps and engine.scheduler.running:
                engine.scheduler._requeue(engine.scheduler.running[0])
            finished, _ = engine.step()
            if finished:
                result = finished[0]
                break
        assert result is not None and result.output_token_ids == expected.output_token_ids
        assert checker.num_entries
        num_preemptions = result.record.num_preemptions
    assert num_steps > 3


def test_a_busy_engine_says_what_plain_decoding_says(folder: Path) -> None:
    rng = random.Random(3)
    clips = [clip(seed, 18) for seed in range(2)]
    requests = []
    for index in range(16):
        prompt = [*draw(0, 6), MARKER, *draw(10 + index % 2, rng.randint(2, 14)), index]
        requests.append(audio_request(f"r{index}", prompt, [rng.choice(clips)], rng.randint(4, 30)))
    expected = plain(folder, requests)
    for depth in (0, 1):
        fields = {"max_model_len": 96, "num_blocks": 34, "max_num_batched_tokens": 20, "pipeline_depth": depth}
        results = run(shared_engine(folder, **fields), requests)
        assert {name: result.output_token_ids for name, result in results.items()} == expected
        assert sum(result.record.num_preemptions for result in results.values()) > 0
        assert sum(result.record.num_cached_prompt_tokens or 0 for result in results.values()) > 0


# ---- The output check


def test_the_output_check_hears_the_clips(folder: Path) -> None:
    requests = [around(seed, 10 + seed, seed, seed) for seed in range(3)] + [token_request("text", draw(0, 9), 9)]
    engine = make_engine(folder, 3, max_num_batched_tokens=11)
    results = list(run(engine, requests).values())
    check = check_output(engine, results, 10)
    assert (check.status, check.compared, check.identical) == ("identical", 4, 4)


def test_the_output_check_notices_another_clip(folder: Path) -> None:
    engine = make_engine(folder, 3)
    (result,) = run(engine, [around(2, 12, 3)]).values()
    assert check_output(engine, [replace(result, audio=(clip(9, 12),))], 1).status == "mismatch"


# ---- Checkpoints and memory


def test_towers_are_part_of_the_targets_weights(folder: Path) -> None:
    engine = make_engine(folder, 2)
    stored = load_file(folder / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in stored)
    num_bytes = sum(tensor.nbytes for tensor in stored.values())
    assert engine.memory.lines["target_weights"] == engine.model.num_bytes == num_bytes
    assert plan_engine_memory(engine.config).lines == engine.memory.lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.audio.encoder.weight": torch.ones(1280, 63)}, r"model.audio.encoder.weight has shape \[1280, 63\]"),
        ({"model.audio.final_norm.weight": None}, r"model.audio.final_norm.weight \[64\] is missing"),
        ({"model.audio.encoder.bias": torch.ones(64)}, r"model.audio.encoder.bias \[64\] is unknown"),
        ({"model.visual.layers.norm_3.weight": torch.ones(64)}, r"model.visual.layers.norm_3.weight \[64\] is unknown"),
    ],
)
def test_a_tower_that_is_not_the_configs_is_named(
    folder: Path, tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = load_file(folder / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        make_engine(tmp_path)


# ---- What is refused


def refused(engine: LLMEngine, request: GenerateRequest) -> str:
    with pytest.raises(UserError) as caught:
        engine.add_request(request, 0.0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_without_a_tower_refuses_audio(folder: Path, tmp_path: Path) -> None:
    text_only = make_engine(build_tiny_inkling(tmp_path, num_modules=0))
    assert "holds no audio tower" in refused(text_only, around(2, 3, 2))
    assert run(text_only, [token_request("text", [MARKER, 5, 6], 2)])


def test_markers_and_clips_must_match(folder: Path) -> None:
    engine = make_engine(folder)
    assert "2 clips and 1 markers" in refused(engine, audio_request("r", [3, MARKER, 4], [clip(0, 2), clip(1, 2)]))
    assert "1 clips and 0 markers" in refused(engine, audio_request("r", [3, 4], [clip(0, 2)]))
    expanded = [3, MARKER, *[AUDIO_TOKENS.placeholder_id] * 5, 4]
    assert "5 placeholders" in refused(engine, audio_request("r", expanded, [clip(0, 2)]))


def test_an_expanded_prompt_is_taken_as_it_is(folder: Path) -> None:
    request = around(2, 5, 3)
    first = run(make_engine(folder), [request])["r0"]
    again = audio_request("again", first.prompt_token_ids, request.audio, 24)
    second = run(make_engine(folder), [again])["again"]
    assert second.prompt_token_ids == first.prompt_token_ids and second.output_token_ids == first.output_token_ids


def test_a_clip_longer_than_the_context_is_refused_with_its_tokens(folder: Path) -> None:
    message = refused(make_engine(folder, max_model_len=64), around(2, 100, 3))
    assert "a prompt of 106 tokens leaves no room" in message
