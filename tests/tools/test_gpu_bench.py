"""The GPU benchmark: floors by hand, verdicts, and every section on tiny shapes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specbench.engine.execution.engine_memory import plan_engine_memory
from specbench.errors import UserError
from specbench.model_choice import SHAPES_FOLDER
from specbench.records import EngineStep
from tools.gpu_bench import parallel, peers
from tools.gpu_bench.cases import (
    ON_GPU,
    BatchRun,
    Drafting,
    EngineShelf,
    Settings,
    StepTime,
    engine_config,
    positive_median,
    prompt_ids,
    run_batch,
)
from tools.gpu_bench.ceilings import Ceilings
from tools.gpu_bench.engine_fields import engine_fields
from tools.gpu_bench.floors import kv_read, shape_bytes
from tools.gpu_bench.goals import Verdict, quotient
from tools.gpu_bench.main import conclude, main, split_by_section
from tools.gpu_bench.parallel import ParallelStep, speedup_verdicts
from tools.gpu_bench.peers import is_installed, peer_step_s, transformers_peer
from tools.gpu_bench.prefill import step_kinds
from tools.gpu_bench.profile import added_time
from tools.gpu_bench.recording import BLOCK_STEPS, Blocks, Shares
from tools.gpu_bench.sections import SECTIONS, Measured, check_acceptance, print_step
from tools.gpu_bench.shapes import expert_counts, open_shape, shape_folder

HEAD = 2 * 151936 * 4096


def bytes_of(name: str):
    checkpoint = open_shape(SHAPES_FOLDER / name)
    return shape_bytes(checkpoint, *expert_counts(checkpoint))


def test_a_kernel_that_waits_adds_what_comes_after():
    """b starts early and waits for a; a gap is nobody's; c ends before what is around it."""
    spans = [(0.0, 10.0, "a"), (2.0, 13.0, "b"), (20.0, 29.0, "a"), (21.0, 25.0, "c")]
    assert added_time(spans) == {"a": 19.0, "b": 3.0, "c": 0.0}


def test_bytes_of_a_dense_step():
    """Qwen3-8B: 15.14 GB without the token table, 147,456 bytes of keys and values a token."""
    weights = bytes_of("qwen3_8b")
    layer = 2 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 4096 * 12288) + 2 * (2 * 4096 + 2 * 128)
    assert weights.dense == 36 * layer + 2 * 4096
    assert weights.head == HEAD
    assert weights.target_read(1) == weights.target_read(64) == 36 * layer + 2 * 4096 + HEAD
    assert weights.target_read(1) / 1e9 == pytest.approx(15.14, abs=0.01)
    assert weights.target_operations(7) == 7 * weights.target_read(1)
    config = engine_config(Settings(device=torch.device("cuda")), SHAPES_FOLDER / "qwen3_8b", Drafting())
    assert kv_read(plan_engine_memory(config).specs, "target", 1216) == 1216 * 147_456


def test_bytes_of_drafts():
    """MiMo-7B: a module of 0.211 G parameters and a head of 0.621 G, again for each draft."""
    weights = bytes_of("mimo_7b")
    assert (weights.modules[0] / 2e9, weights.head / 2e9) == pytest.approx((0.211, 0.621), abs=5e-4)
    assert weights.draft_read(4) == 4 * (weights.modules[0] + weights.head)
    inkling = bytes_of("inkling_8b")
    assert inkling.draft_read(8) == sum(inkling.modules) + 8 * inkling.head


def test_bytes_of_weights_in_codes():
    """FP8: a byte each, and 4 of a scale for 128; norms and head stay in bf16."""
    checkpoint = open_shape(SHAPES_FOLDER / "qwen3_8b_fp8", "keep")
    weights = shape_bytes(checkpoint, *expert_counts(checkpoint))
    matrices = 36 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 4096 * 12288)
    norms = 36 * 2 * (2 * 4096 + 2 * 128) + 2 * 4096
    assert weights.dense == matrices * (128 + 4) // 128 + norms and weights.head == HEAD


def test_experts_that_rows_touch():
    weights = bytes_of("qwen3_30b_a3b")
    assert weights.experts == 2 * 48 * 128 * 3 * 2048 * 768
    assert weights.share_of_experts(1) == pytest.approx(8 / 128)
    assert weights.share_of_experts(2) == pytest.approx(1 - (120 / 128) ** 2)
    assert weights.target_read(10_000) == pytest.approx(weights.dense + weights.head + weights.experts)


def test_windowed_keys_are_read_up_to_the_window():
    config = engine_config(Settings(device=torch.device("cuda")), SHAPES_FOLDER / "inkling_8b", Drafting())
    token = 2 * 4 * 128 * 2
    assert kv_read(plan_engine_memory(config).specs, "target", 1216) == token * (3 * 1216 + 19 * 512)


def test_the_floor_is_the_longer_of_reading_and_computing():
    ceilings = Ceilings(bytes_per_s=4e12, operations_per_s=800e12)
    assert ceilings.floor_s(4e12, 0) == 1.0
    assert ceilings.floor_s(1e9, 800e12) == 1.0


def step(number: int, end_s: float, num_prefill: int = 0, num_decode: int = 2) -> EngineStep:
    return EngineStep(number, 0.0, end_s, num_prefill, num_decode, 2, 0.0, 0.5, 0.2, 0.1, 0, 0, 0)


def test_steps_with_prompts_or_without_the_whole_batch_are_left_out():
    run = BatchRun(1.0, (None, None), (step(0, 1, 9), step(1, 2), step(2, 3), step(3, 4, 0, 1)))  # type: ignore[arg-type]
    assert [one.engine_step for one in run.decode_steps] == [1, 2]


def test_the_gap_is_what_no_part_accounts_for():
    values = {"batch": 1, "step_s": 9.0, "spread": 0.0, "token_per_s": 1.0, "prefill_s": 1.0, "schedule_s": 0.0}
    time = StepTime(**values, interval_s=1.0, target_s=0.5, verify_s=0.2, draft_s=0.1, drafts_a_step=0.0)
    assert time.gap_share == pytest.approx(0.2)
    unknown = StepTime(**values, interval_s=1.0, target_s=None, verify_s=None, draft_s=None, drafts_a_step=0.0)
    assert unknown.gap_share is None


def test_an_engine_is_shared_until_another_is_wanted(tmp_path: Path):
    settings = Settings(torch.device("cpu"), 12, (4, 8), 1, (1, 2), scratch=tmp_path, is_small=True)
    shelf, folder = EngineShelf(), shape_folder("mimo_7b", tmp_path)
    first = shelf.engine(settings, folder, Drafting("mtp_single", 2))
    assert shelf.engine(settings, folder, Drafting("mtp_single", 2, (1.0, 1.0))) is first
    run = run_batch(first, settings, 2, 8, seed=0)
    assert run.acceptance_length > 2.5  # all drafts of all steps but the last
    assert first.runner.stages.conditional_rates.tolist() == [1.0, 1.0]  # what a GPU goes by
    shelf.engine(settings, folder, Drafting("mtp_single", 2, (0.8, 0.6)))
    drawn = run_batch(first, replace(settings, num_outputs=(4, 64)), 2, 64, seed=0)
    check_acceptance(drawn, (0.8, 0.6))
    with pytest.raises(ValueError, match=r"where the rates mean 1\.00"):
        check_acceptance(drawn, (0.0, 0.0))
    torch.testing.assert_close(first.runner.stages.conditional_rates, torch.tensor([0.8, 0.75]))
    shelf.engine(settings, folder, Drafting("mtp_single", 2))
    assert run_batch(first, settings, 2, 8, seed=0).acceptance_length == 1
    (second,) = run_batch(first, settings, 1, 8, seed=0, first=1).results
    assert (second.record.request_id, tuple(second.prompt_token_ids)) == ("1", prompt_ids(settings, 1, seed=0))
    assert shelf.engine(settings, folder, Drafting()) is not first


def test_verdicts_and_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    met, missed = Verdict("low", 1.0, 1.1), Verdict("high", 1.0, 1.1, is_least=True)
    unmeasured = Verdict("unknown", None, 1.0)
    assert [verdict.is_met for verdict in (met, missed, unmeasured)] == [True, False, False]
    assert conclude([met], None) == 0
    assert conclude([met, missed, unmeasured], tmp_path / "goals.json") == 1
    assert "1 met, 1 missed, 1 not measured" in capsys.readouterr().out
    # In a trial only a section that failed counts.
    failed = Verdict("the section runs", None, 1.0, is_failure=True)
    trials = ([met, missed, unmeasured], [failed])
    assert [conclude(verdicts, None, is_trial=True) for verdicts in trials] == [0, 1]
    rows = json.loads((tmp_path / "goals.json").read_text())
    assert [row["is_met"] for row in rows] == [True, False, False]


def test_engine_fields_from_the_command_line():
    wanted = {"pipeline_depth": 1, "cuda_graphs": False, "max_num_batched_tokens": 64}
    texts = ["pipeline_depth=1", "cuda_graphs=off", "max_num_batched_tokens=64"]
    assert engine_fields(texts, torch.device("cuda"), ON_GPU | {"attention_backend": "torch"}) == wanted
    assert engine_fields([], torch.device("cpu"), {}) == {}


def test_a_step_that_cannot_be_told_from_noise_is_not_measured():
    """Two runs of which the longer took no longer: no time, no ratio, and no goal that it meets."""
    assert [positive_median(values) for values in ([-1.0, -2.0, 3.0], [0.0], [2.0, -1.0, 1.0])] == [None, None, 1.0]
    values = {"batch": 16, "spread": None, "token_per_s": 1.0, "prefill_s": 1.0, "schedule_s": 0.0}
    parts = {"interval_s": 1.0, "target_s": 0.5, "verify_s": 0.2, "draft_s": 0.1, "drafts_a_step": 4.0}
    measured = Measured(StepTime(step_s=None, **values, **parts), floor_s=1.0, draft_floor_s=0.1)
    assert measured.ratio is None
    print_step("unknown", measured)
    verdict = Verdict("step over floor", quotient(measured.time.step_s, 1.0), 1.25)
    assert not verdict.is_met and verdict.line().endswith("not measured")


def test_numbers_for_all_sections_and_for_one():
    assert split_by_section(["3", "decode=5"], (1,)) == ((3,), {"decode": (5,)})
    assert split_by_section(["verify=1,16"], (1, 16, 64)) == ((1, 16, 64), {"verify": (1, 16)})
    for text, message in (("decod=5", "no section 'decod'"), ("decode=x", "must be numbers"), ("0", "must be numbers")):
        with pytest.raises(UserError, match=message):
            split_by_section([text], (1,))


def test_what_was_measured_before_it_was_stopped_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def stopped(bench: object) -> list[Verdict]:
        raise KeyboardInterrupt

    monkeypatch.setitem(SECTIONS, "attention", lambda bench: [Verdict("before", 1.0, 2.0)])
    monkeypatch.setitem(SECTIONS, "decode", stopped)
    assert main(["--small", "--device", "cpu", "--only", "attention", "decode", "verify"]) == 1
    printed = capsys.readouterr().out
    assert "before" in printed and "decode: the section ends" in printed and "== verify" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "qwen9"], "qwen9 is not SHAPE"),
        (["--profile", "mimo_7b:mtp_single"], "is not SHAPE"),
        (["--runs", "many"], "many: must be numbers"),
        (["--engine", "graphs=on"], "--engine graphs=on: no field 'graphs' to set; there are attention_backend, block"),
        (["--engine", "pipeline_depth=2"], "--engine pipeline_depth=2: pipeline_depth is one of 0, 1"),
        (["--engine", "cuda_graphs"], "--engine cuda_graphs: cuda_graphs is one of true, on, false, off"),
        (["--engine", "cuda_graphs=on"], "there are none on cpu"),
        (["--engine", "attention_backend=flashinfer"], "flashinfer does not run on cpu"),
        (["--engine", "block_size=-4"], "block_size is a whole number above 0"),
        (["--device", "gpu"], "--device gpu: must be cuda, cuda:N or cpu"),
        (["--json", "no/such/folder.json"], "there is no folder no/such"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["--small", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_mistakes_of_the_benchmark_of_ranks_are_one_line(capsys: pytest.CaptureFixture[str]):
    small = ["--small", "--device", "cpu", "--no-sums"]
    assert parallel.main([*small, "--shapes", "mimo_7b", "--mtp", "8"]) == 2
    assert "bench_parallel: --mtp: mimo_7b has 1 modules, not 8" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert parallel.main([]) == 2
        assert "bench_parallel: --device: torch sees no GPU" in capsys.readouterr().err


def test_texts_that_begin_alike_are_counted():
    said = parallel.same_texts([[1, 2], [1, 3], [4, 4]], [[1, 2], [1, 2], [5, 4]])
    assert said == "1 of 3 texts begin, 2 with the same token, as those of"


def test_tiny_shapes_keep_their_family_and_modules(tmp_path: Path):
    for name in ("mimo_7b", "inkling_8b"):
        tiny, real = open_shape(shape_folder(name, tmp_path)), open_shape(shape_folder(name, None))
        assert tiny.config["architectures"] == real.config["architectures"]
        small, large = (shape_bytes(one, *expert_counts(one)) for one in (tiny, real))
        assert len(small.modules) == len(large.modules)
        assert small.target_read(1) < 1e7


def test_every_section_runs_on_tiny_shapes(capsys: pytest.CaptureFixture[str]):
    """A CPU meets few goals, and its steps may be lost in noise; what counts is that every goal is looked at."""
    assert main(["--small", "--device", "cpu", "--runs", "1", "recording=2", "--shapes", "inkling_8b", "qwen3_8b"]) == 0
    printed = capsys.readouterr().out
    assert "failed:" not in printed
    assert all(f"\n== {section}: " in printed for section in SECTIONS)
    assert printed.count("engine ready") == 9


def test_steps_by_kind():
    steps = [
        replace(step(0, end_s, prompt, decode), num_tokens=prompt + decode)
        for prompt, decode, end_s in ((600, 0, 1.0), (0, 4, 2.0), (30, 4, 4.0), (0, 4, 5.0), (600, 2, 9.0))
    ]
    found = {kind.name: (kind.num_steps, kind.share, kind.interval_ms) for kind in step_kinds(steps)}
    assert found == {
        "decoding": (2, 0.25, 1e3),
        "mixed, 512 rows or fewer": (1, 0.25, 2e3),
        "mixed, more rows": (1, 0.5, 4e3),
    }


def test_a_peer_runs_the_same_prompts_by_the_same_rules(tmp_path: Path):
    settings = Settings(torch.device("cpu"), 12, (2, 4), num_runs=1, batch_sizes=(1, 2), scratch=tmp_path)
    lengths: list[tuple[int, int]] = []
    generate = transformers_peer(settings, shape_folder("qwen3_8b", tmp_path))
    generate([prompt_ids(settings, index, 0) for index in range(2)], 3)
    peers.PEERS["counting"] = lambda *_: lambda prompts, num_output: lengths.append((len(prompts), num_output))
    try:
        assert set(peer_step_s("counting", settings, tmp_path)) == {1, 2}
    finally:
        del peers.PEERS["counting"]
    assert sorted(set(lengths)) == [(1, 2), (1, 4), (2, 2), (2, 4)]
    assert not is_installed("no_such_engine")


def test_an_interval_of_the_median_between_order_statistics():
    """Of 15 values the 4th and the 12th: 96.5 %, by the binomial law; the 5th and the 11th would be 88 %."""
    shares = Shares.of([index / 100 for index in range(15)])
    assert (shares.low, shares.median, shares.high) == (0.03, 0.07, 0.11)
    assert Shares.of([0.5]) == Shares(0.5, 0.5, 0.5, 1)
    assert (Shares.of(range(5)).low, Shares.of(range(6)).low, Shares.of(range(9)).low) == (0, 0, 1)


def test_steps_that_lengthen_cost_both_kinds_of_blocks_alike():
    """Evenly, or by a jump in one group of three: what a recorded step takes longer is found, beside none in blocks
    that are alike."""
    differences: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(4):
        blocks = Blocks(random.Random(seed))
        for number in range(12 * 4 * BLOCK_STEPS + 3):
            step_s = 1 + number / 1000 + number // 64 / 50
            blocks.add(step_s * (1.01 if blocks.is_recorded else 1.0), 0.0)
        for is_null in differences:
            differences[is_null] += blocks.differences(is_null)
    assert len(differences[False]) == len(differences[True]) == 24
    real, null = (Shares.of(differences[is_null]) for is_null in (False, True))
    assert (real.low, real.median, real.high) == pytest.approx((0.01, 0.01, 0.01), abs=1e-9)
    assert (null.low, null.median, null.high) == pytest.approx((0, 0, 0), abs=1e-9)
    assert max(differences[True]) > 0.004


def test_speed_ups_that_have_a_goal():
    def step(way: str, batch: int, step_s: float) -> ParallelStep:
        unknown = {"interval_s": None, "target_s": None, "verify_s": None, "draft_s": None}
        time = StepTime(batch, step_s, spread=0, token_per_s=1, prefill_s=1, schedule_s=0, drafts_a_step=0, **unknown)
        return ParallelStep(way, time, 1e-3, None)

    steps = [step("1", 16, 3.3e-3), step("1", 1, 1e-3), step("one_shot", 16, 2e-3), step("one_shot", 1, 1e-3)]
    (verdict,) = speedup_verdicts("qwen3_8b", steps)
    assert verdict.measured == pytest.approx(1.65) and verdict.is_met
    assert not speedup_verdicts("inkling_8b", steps)
