"""Results of other tools become runs with the same figures, what they lack is n/a, and runs become theirs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specbench.cli import main
from specbench.errors import UserError
from specbench.reports.compare import compare_directories
from specbench.reports.compare_sections import comparison_markdown
from specbench.reports.exchange.exports import export_text
from specbench.reports.exchange.imports import Stated, import_result, read_result
from specbench.reports.report_files import recompute
from specbench.run_directory import RunDirectory
from tests.reports.event_logs import make_run, make_sample, simulate

SHARED = Path(__file__).resolve().parents[4] / "shared" / "reference" / "vllm_captures"


def vllm_result(num_requests: int = 12, seed: int = 0) -> dict:
    """A detailed result, its sums computed from its lists as `vllm bench serve` does."""
    rng = np.random.default_rng(seed)
    outputs = rng.integers(1, 30, num_requests)
    starts = 500 + np.sort(rng.random(num_requests) * 5)
    ttfts = 0.1 + rng.random(num_requests)
    gaps = [(0.01 + rng.random(max(0, int(one) - 1) // 2)).tolist() for one in outputs]
    latencies = ttfts + [sum(one) for one in gaps]
    tpots = 1000 * (latencies - ttfts)[outputs > 1] / (outputs - 1)[outputs > 1]
    duration = float((starts + latencies).max() - starts.min())
    result = {
        "date": "20260102-030405",
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "model_id": "some/model",
        "num_prompts": num_requests,
        "request_rate": "inf",
        "max_concurrency": 4,
        "duration": duration,
        "completed": num_requests,
        "failed": 0,
        "request_throughput": num_requests / duration,
        "output_throughput": float(outputs.sum() / duration),
        "total_token_throughput": float((outputs.sum() + 10 * num_requests) / duration),
        "input_lens": [10] * num_requests,
        "output_lens": outputs.tolist(),
        "ttfts": ttfts.tolist(),
        "itls": gaps,
        "latencies": latencies.tolist(),
        "start_times": starts.tolist(),
        "generated_texts": [f"text {index}" for index in range(num_requests)],
        "errors": [""] * num_requests,
        "spec_decode_acceptance_rate": 55.0,
        "spec_decode_acceptance_length": 2.1,
        "spec_decode_num_drafts": 100,
        "spec_decode_draft_tokens": 200,
        "spec_decode_accepted_tokens": 110,
        "spec_decode_per_position_acceptance_rates": [0.7, 0.4],
    }
    all_gaps = [gap for one in gaps for gap in one]
    series = {"ttft": 1000 * ttfts, "tpot": tpots, "itl": 1000 * np.array(all_gaps), "e2el": 1000 * latencies}
    for name, values in series.items():
        quantiles = {f"p{percent}": np.percentile(values, percent) for percent in (50, 90, 99)}
        statistics = {"mean": values.mean(), "median": np.median(values), **quantiles}
        result |= {f"{statistic}_{name}_ms": float(value) for statistic, value in statistics.items()}
    return result


def sglang_result() -> dict:
    """A line without details."""
    return {
        "backend": "sglang",
        "dataset_name": "sharegpt",
        "request_rate": float("inf"),
        "max_concurrency": 16,
        "duration": 20.0,
        "completed": 100,
        "total_input_tokens": 1000,
        "total_output_tokens": 4000,
        "total_output_tokens_retokenized": 3990,
        "request_throughput": 5.0,
        "input_throughput": 50.0,
        "output_throughput": 200.0,
        "mean_e2e_latency_ms": 900.0,
        "median_e2e_latency_ms": 800.0,
        "p99_e2e_latency_ms": 2000.0,
        "mean_ttft_ms": 50.0,
        "median_ttft_ms": 40.0,
        "std_ttft_ms": 9.0,
        "p99_ttft_ms": 90.0,
        "mean_tpot_ms": 5.0,
        "median_tpot_ms": 4.0,
        "p99_tpot_ms": 9.0,
        "mean_itl_ms": 15.0,
        "median_itl_ms": 14.0,
        "p99_itl_ms": 19.0,
        "accept_length": 3.25,
    }


def write_specdec(folder: Path, **configuration: object) -> Path:
    """A folder of two runs, the second with the lengths 1 (40), 2 (30), 4 (30)."""
    folder.mkdir()
    lengths = {"1": 40, "2": 30, "4": 30}
    first = {"Request_AL": {"0": {"0": 9.0}}, "Average_AL": 9.0, "Acceptance_Length_Histogram": {"9": 1}}
    second = {"Request_AL": {"7": 2.1, "8": 2.3}, "Average_AL": 2.2, "Acceptance_Length_Histogram": lengths}
    (folder / "acceptance_rate.json").write_text(json.dumps([first, second]))
    statistics = {
        "min": "0.1",
        "max": "0.9",
        "mean": "0.5000",
        "std": "0.1",
        "quantiles": {"0.25": "0.3", "0.5": "0.4"},
    }
    timing = {"Output TPS": 800.5, "Output TPS/gpu": 200.125, "TTFT Time": statistics, "E2E Request Time": statistics}
    (folder / "timing.json").write_text(json.dumps([{}, timing]))
    if configuration:
        (folder / "configuration.json").write_text(json.dumps(configuration))
    return folder


def import_(source: Path, output: Path, result: int | None = None, **stated: object) -> dict:
    """The metrics of the imported run, computed twice: once at the import, once from its directory."""
    directory = import_result(source, output, result, Stated(**stated), "specbench import")
    written = json.loads((directory.path / "metrics.json").read_text())
    assert recompute(directory.path).metrics == written
    return written


@pytest.fixture
def vllm_file(tmp_path):
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps(vllm_result()))
    return path


def test_vllm_s_own_statistics_come_out_of_its_lists_by_our_formulas(tmp_path):
    """What it gives in sum is taken from there, so here the sums are left out."""
    result = vllm_result()
    listed = {key: value for key, value in result.items() if not key.endswith("_ms")}
    path = tmp_path / "lists.json"
    path.write_text(json.dumps(listed))
    directory = import_result(path, tmp_path / "run", None, Stated(), "")
    record = directory.read_run()
    record.reported_metrics = {}
    directory.write_run(record)
    metrics = recompute(directory.path).metrics
    for ours, theirs in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("e2el_ms", "e2el")):
        for name in ("mean", "p50", "p90", "p99"):
            assert metrics["latency"][ours][name] == pytest.approx(result[f"{name}_{theirs}_ms"]), (ours, name)
    assert metrics["throughput"]["duration_s"] == pytest.approx(result["duration"])
    assert metrics["throughput"]["total_token_per_s"] == pytest.approx(result["total_token_throughput"])


def test_a_vllm_result_keeps_its_figures_and_gains_exact_counts(tmp_path, vllm_file):
    result, metrics = vllm_result(), import_(vllm_file, tmp_path / "run")
    acceptance = metrics["acceptance"]
    assert acceptance["accepted_at_position"] == [70, 40] and acceptance["accepted_histogram"] == [30, 30, 40]
    assert acceptance["acceptance_rate"] == 0.55 and acceptance["acceptance_length"] == 2.1
    assert acceptance["per_position_conditional"] == [0.7, 40 / 70]
    assert metrics["latency"]["itl_step_ms"]["p99"] == result["p99_itl_ms"]
    assert metrics["throughput"]["output_token_per_s"] == result["output_throughput"]
    assert metrics["throughput"]["output_token_per_s_per_device"] is None
    assert metrics["requests"]["completed"] == 12 and metrics["checks"]["output"]["status"] == "not_checked"
    text = (tmp_path / "run" / "report.md").read_text()
    assert "some/model" in text and "no step by itself is known" in text and "BROKEN" not in text
    assert (tmp_path / "run" / "plots" / "acceptance_by_position.svg").exists()


def test_positions_of_drafts_of_unequal_length_are_not_given_their_previous(tmp_path):
    path = tmp_path / "ragged.json"
    path.write_text(json.dumps(vllm_result() | {"spec_decode_draft_tokens": 199}))
    acceptance = import_(path, tmp_path / "run")["acceptance"]
    assert acceptance["per_position"] == [0.7, 0.4] and acceptance["per_position_conditional"] == [None, None]


def test_a_vllm_result_without_lists_and_without_speculation(tmp_path):
    lists = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "generated_texts", "errors")
    kept = {key: value for key, value in vllm_result().items() if key not in lists and "spec_decode" not in key}
    path = tmp_path / "short.json"
    path.write_text(json.dumps(kept))
    metrics = import_(path, tmp_path / "run", tensor_parallel_size=4, label="off")
    assert metrics["acceptance"]["drafts"] is None and metrics["acceptance"]["acceptance_rate"] is None
    assert (
        metrics["latency"]["ttft_ms"]["p90"] == kept["p90_ttft_ms"] and metrics["latency"]["itl_step_ms"]["n"] is None
    )
    assert metrics["requests"] == {"completed": 12, "failed": 0, "aborted": 0, "warmup": 0, "warmup_failed": 0}
    run = RunDirectory.open(tmp_path / "run").read_run()
    assert run.config["spec"]["name"] == "off" and run.config["parallel"]["tensor_parallel_size"] == 4
    assert any("Stated at the import" in notice for notice in run.notices)


def test_failed_requests_are_errors(tmp_path):
    result = vllm_result()
    result["errors"][3], result["output_lens"][3], result["failed"], result["completed"] = "timed out\n", 0, 1, 11
    path = tmp_path / "failed.json"
    path.write_text(json.dumps(result))
    import_(path, tmp_path / "run")
    log = RunDirectory.open(tmp_path / "run").read_event_log()
    assert [one.error for one in log.requests if one.error] == ["timed out"] and len(log.samples) == 11


def test_an_sglang_line_keeps_its_length_and_has_no_counts(tmp_path):
    path = tmp_path / "sglang.jsonl"
    path.write_text(json.dumps(sglang_result() | {"accept_length": 1.0}) + "\n" + json.dumps(sglang_result()) + "\n")
    with pytest.raises(UserError, match=r"holds 2 results; choose one with --result 1 to 2"):
        read_result(path, None)
    metrics = import_(path, tmp_path / "run", result=2)
    assert metrics["acceptance"]["acceptance_length"] == 3.25 and metrics["acceptance"]["drafts"] is None
    assert metrics["throughput"]["total_token_per_s"] == 250 and metrics["latency"]["e2el_ms"]["p99"] == 2000
    assert metrics["latency"]["e2el_ms"]["p90"] is None and metrics["requests"]["completed"] == 100
    text = (tmp_path / "run" / "report.md").read_text()
    assert "| 3.25 |" in " ".join(text.split()) and "speculation was off" not in text and "sharegpt" in text


def test_a_specdec_folder_counts_chunks(tmp_path):
    folder = write_specdec(
        tmp_path / "saved",
        engine="TRTLLM",
        engine_version="1.2",
        speculative_algorithm="EAGLE3",
        draft_length=3,
        tp_size=4,
        concurrency=8,
        model_dir="/models/some/model",
        dataset="speed",
        gpu="a GPU",
        runtime_params={"sampling_kwargs": {"temperature": 0}},
    )
    metrics = import_(folder, tmp_path / "run", result=2)
    acceptance = metrics["acceptance"]
    assert acceptance["accepted_at_position"] == [60, 30, 30] and acceptance["accepted_histogram"] == [40, 30, 0, 30]
    assert acceptance["acceptance_length"] == 1 + 120 / 100 and acceptance["per_request_mean_length"] == 2.2
    assert acceptance["draft_tokens"] == 300 and acceptance["num_speculative_tokens"] == 3
    assert metrics["throughput"]["output_token_per_s_per_device"] == 200.125
    assert metrics["latency"]["ttft_ms"] == {"n": None, "mean": 500, "p50": 400, "p90": None, "p99": None}
    run = RunDirectory.open(tmp_path / "run").read_run()
    assert run.config["spec"]["name"] == "eagle3, k = 3" and run.packages == {"trtllm": "1.2"}
    assert run.config["sampling"]["temperature"] == 0


def test_a_specdec_folder_with_merged_chunks_and_without_configuration(tmp_path):
    folder = write_specdec(tmp_path / "saved", draft_length=1)
    acceptance = import_(folder, tmp_path / "run", result=2)["acceptance"]
    assert len(acceptance["per_position"]) == 3
    assert any("30 chunks" in notice for notice in RunDirectory.open(tmp_path / "run").read_run().notices)
    bare = write_specdec(tmp_path / "bare")
    acceptance = import_(bare, tmp_path / "run2", result=2)["acceptance"]
    assert acceptance["draft_tokens"] is None and acceptance["acceptance_rate"] is None


def test_speculation_that_was_off_is_no_acceptance_of_nothing(tmp_path):
    folder = write_specdec(tmp_path / "saved", speculative_algorithm="NONE", draft_length=3)
    metrics = import_(folder, tmp_path / "run", result=2)
    assert metrics["acceptance"]["drafts"] is None and metrics["acceptance"]["acceptance_length"] is None


@pytest.fixture
def own(tmp_path):
    directory = RunDirectory.create(tmp_path / "own")
    run = make_run(4)
    run.config["load"] = {"concurrency": 3}
    directory.write_run(run)
    log = simulate(seed=4, num_requests=30)
    log.samples = [make_sample(one.sample_id, 1.0) for one in log.requests if not one.is_warmup]
    directory.write_tables(log)
    return recompute(directory.path)


def test_a_run_exported_to_vllm_s_format_comes_back_with_its_figures(tmp_path, own):
    path = tmp_path / "exported.json"
    path.write_text(export_text(own.directory, "vllm"))
    exported = json.loads(path.read_text())
    assert "not Inkling" in exported["model_id"] and "not GSM8K" in exported["label"]
    assert len(exported["itls"]) == len(exported["ttfts"]) == exported["num_prompts"]
    assert [len(gaps) for gaps in exported["itls"]].count(0) < 20
    back, there = import_(path, tmp_path / "back"), own.metrics
    for name in ("ttft_ms", "tpot_ms", "e2el_ms", "itl_step_ms"):
        assert back["latency"][name] == pytest.approx(there["latency"][name]), name
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_at_position", "accepted_histogram"):
        assert back["acceptance"][name] == there["acceptance"][name], name
    for name in ("duration_s", "output_token_per_s", "output_token_per_s_per_user", "request_per_s"):
        assert back["throughput"][name] == pytest.approx(there["throughput"][name]), name


def test_the_lists_of_an_export_give_its_sums(own):
    exported = json.loads(export_text(own.directory, "vllm"))
    latencies = np.array(exported["latencies"])
    sums = [ttft + sum(gaps) for ttft, gaps in zip(exported["ttfts"], exported["itls"], strict=True)]
    np.testing.assert_allclose(latencies, sums)
    assert 1000 * latencies.mean() == pytest.approx(exported["mean_e2el_ms"])
    assert exported["start_times"] == sorted(exported["start_times"])


def test_a_profile_s_numbers_agree_with_each_other_and_with_the_run(own):
    profile, acceptance = json.loads(export_text(own.directory, "speculation_profile")), own.metrics["acceptance"]
    assert profile["schema_version"] == "1.0" and profile["measured"] is True
    np.testing.assert_allclose(profile["marginal_accept_rates"], acceptance["per_position"], atol=1e-6)
    np.testing.assert_allclose(
        np.cumprod(profile["conditional_accept_rates"]), profile["marginal_accept_rates"], atol=1e-5
    )
    histogram = {int(length): steps for length, steps in profile["acceptance_length_histogram"].items()}
    mean = sum(length * steps for length, steps in histogram.items()) / sum(histogram.values())
    assert mean == pytest.approx(profile["mean_accept_length"], abs=1e-6) == profile["accept_length_by_k"]["4"]
    assert all(check["passed"] for check in profile["validation"].values())
    assert "not Inkling" in profile["draft_checkpoint"]["name"] and set(profile["per_category"]) == {"a", "b"}


def test_a_run_without_drafts_has_no_profile(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_run(make_run(None, method="none"))
    directory.write_tables(simulate(seed=0, k=0))
    with pytest.raises(UserError, match="there is no profile"):
        export_text(directory.path, "speculation_profile")


def test_runs_of_different_tools_stand_side_by_side(tmp_path, vllm_file, own):
    import_(vllm_file, tmp_path / "vllm", model=own.run.model.ran)
    (tmp_path / "line.jsonl").write_text(json.dumps(sglang_result()))
    import_(tmp_path / "line.jsonl", tmp_path / "sglang", model=own.run.model.ran)
    import_(write_specdec(tmp_path / "saved"), tmp_path / "specdec", result=2)
    others = [tmp_path / name for name in ("vllm", "sglang", "specdec")]
    text = comparison_markdown(compare_directories(own.directory, others))
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert [cell.strip() for cell in rows["Acceptance length"].split("|")[3:6]] == ["2.10", "3.25", "2.20"]
    assert "the models differ" in text
    assert comparison_markdown(compare_directories(tmp_path / "vllm", [tmp_path / "sglang", own.directory]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "a.json:1: not JSON"),
        ("a.json", "[1, 2]", "holds no JSON object"),
        ("a.json", "", "holds no JSON object"),
        ("a.json", '{"some": "thing"}', "not a result of `vllm bench serve`"),
        ("a.json", json.dumps(vllm_result() | {"ttfts": "fast"}), "ttfts must be a list"),
        ("a.json", json.dumps(vllm_result() | {"ttfts": [None] * 12}), "ttfts must be a list of numbers"),
        (
            "a.json",
            json.dumps(vllm_result() | {"input_lens": [1]}),
            "input_lens has 1 entries where other",
        ),
        (
            "a.json",
            json.dumps(vllm_result() | {"completed": -1}),
            "completed must be a whole number, 0 or more",
        ),
        ("a.json", json.dumps(vllm_result() | {"duration": "long"}), "duration must be a number, not 'long'"),
        ("a.json", json.dumps(vllm_result() | {"model_id": 5}), "model_id must be a text, not 5"),
        ("a.json", json.dumps(vllm_result() | {"itls": [3] * 12}), "itls must be a list of lists of numbers"),
        ("b.jsonl", json.dumps(sglang_result()) + "\n{torn", "b.jsonl:2: not JSON"),
    ],
)
def test_malformed_results_are_one_line_that_names_file_and_key(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read_result(path, None)
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_folders_that_are_none_and_results_that_are_not_there(tmp_path, vllm_file, own):
    for source, result, message in (
        (tmp_path / "nowhere", None, "cannot be read"),
        (tmp_path, None, "has neither acceptance_rate.json nor timing.json"),
        (own.directory, None, "a run directory of specbench already"),
        (vllm_file, 2, "--result 2: .* holds 1"),
        (vllm_file, 0, "--result 0"),
    ):
        with pytest.raises(UserError, match=message):
            read_result(source, result)
    (write_specdec(tmp_path / "bad") / "acceptance_rate.json").write_text('[{"Acceptance_Length_Histogram": {"x": 1}}]')
    with pytest.raises(UserError, match="its keys must be lengths"):
        read_result(tmp_path / "bad", 1)


def test_the_commands(tmp_path, vllm_file, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(vllm_file)]) == 0
    assert capsys.readouterr().out.strip() == "outputs/imported/vllm"
    assert main(["import", str(vllm_file)]) == 2 and "already holds a run" in capsys.readouterr().err
    assert main(["export", "outputs/imported/vllm", "--format", "vllm", "-o", "again.json"]) == 0
    assert json.loads(Path("again.json").read_text())["spec_decode_num_drafts"] == 100
    assert main(["export", "outputs/imported/vllm", "--format", "speculation_profile"]) == 0
    assert main(["report", "outputs/imported/vllm", "--format", "pr"]) == 0
    assert main(["compare", "outputs/imported/vllm", "outputs/imported/vllm"]) == 0


@pytest.mark.skipif(not SHARED.is_dir(), reason="no captures here")
def test_a_captured_vllm_result_prints_what_its_console_printed(tmp_path):
    metrics = import_(SHARED / "ngram_eager_c4_bench.json", tmp_path / "run")
    acceptance, latency, throughput = metrics["acceptance"], metrics["latency"], metrics["throughput"]
    assert f"{100 * acceptance['acceptance_rate']:.2f} {acceptance['acceptance_length']:.2f}" == "50.20 3.01"
    assert [f"{100 * one:.2f}" for one in acceptance["per_position"]] == ["69.57", "52.17", "44.57", "34.24"]
    assert f"{latency['tpot_ms']['p50']:.2f} {latency['e2el_ms']['p99']:.2f}" == "65.73 6892.96"
    assert f"{throughput['duration_s']:.2f} {throughput['output_token_per_s']:.2f}" == "37.63 48.95"
