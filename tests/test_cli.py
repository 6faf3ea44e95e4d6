"""The command line: every option composes, every mistake is one line and its exit code, sweeps go on over failures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench import benchmark, cli
from specbench.cli import conf_dir, groups, job_name, main
from specbench.model_choice import PACKAGED_CHECKPOINT
from specbench.reports import report_files
from specbench.run_config import RunConfig
from tests.fake_engine import Script

#: What an option needs besides its name.
NEEDED = {
    ("load", "trace"): ["load.trace=times.txt"],
    **{("model", name): ["model.checkpoint=owner/name"] for name in ("hf", "llama", "qwen3", "smollm2")},
    ("eval", "prompts"): ["eval.data=rows.jsonl"],
    ("eval", "lm_eval"): ["eval.tasks=[gsm8k]"],
}
OPTIONS = [(group, option) for group, options in groups().items() for option in options]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    script = Script()
    monkeypatch.setattr(benchmark, "embedded_machinery", script.machinery)
    monkeypatch.setattr(report_files, "run_plots", lambda *_: [])  # they take seconds, and have tests of their own
    monkeypatch.chdir(tmp_path)
    return script


def compose(overrides: list[str]) -> RunConfig:
    composer = cli.Composer(overrides)
    return composer.compose(composer.overrides)[0]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a command that a mistake stops."""
    assert main(argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


# ---- conf/


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=["=".join(pair) for pair in OPTIONS])
def test_every_option_composes(group: str, option: str) -> None:
    chosen = [] if group in ("model", "experiment") else ["+model=inkling"]
    config = compose([*chosen, f"{group}={option}", *NEEDED.get((group, option), [])])
    if group != "experiment":
        assert config.to_dict()[group]["name"] == option


@pytest.mark.parametrize("path", sorted(conf_dir().rglob("[!_]*.yaml")), ids=lambda path: path.stem)
def test_every_file_begins_with_how_to_run_it(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    first = lines[1] if lines[0].startswith("# @package") else lines[0]
    assert first.startswith("# specbench +")
    assert path.stem == "config" or path.stem in first


@pytest.mark.parametrize("spelling", ["model=inkling", "+model=inkling"])
def test_both_spellings_of_model(spelling: str) -> None:
    assert compose([spelling]).model.name == "inkling"


def test_an_experiment_gives_way_to_the_command_line() -> None:
    assert compose(["+experiment=quickstart"]).model.name == "inkling"
    config = compose(["experiment=quickstart", "+model=inkling_nano", "spec=mtp1", "eval.num_samples=3"])
    assert (config.model.name, config.spec.name, config.eval.num_samples) == ("inkling_nano", "mtp1", 3)


# ---- Mistakes


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["spec=mtp8"], "model: none was chosen; say +model=NAME, one of hf, inkling, inkling_nano"),
        (["model.checkpoint=x"], "model: none was chosen"),
        (["+model=inklin"], "model=inklin: no such option; did you mean 'inkling'?"),
        (["+model=inkling", "spec=mpt8"], "spec=mpt8: no such option; did you mean 'mtp8'?"),
        (["+model=inkling", "spec=[a,b]"], "spec: must name one of"),
        (["+model=inkling", "spce=mtp8"], "spce: unknown key; did you mean 'spec'?"),
        (["+model=inkling", "spec.metod=mtp"], "spec.metod: unknown key; did you mean 'spec.method'?"),
        (["+model=inkling", "+spec.metod=mtp"], "spec.metod: unknown key; did you mean 'spec.method'?"),
        (["+model=inkling", "spec=mtp1,mtp2"], "spec=mtp1,mtp2: several values are a sweep; put -m before"),
        (["+model=inkling", "cache.block_size=0"], "cache.block_size: must be at least 1, not 0"),
        (["+model=inkling", "load.repeats=two"], "load.repeats: must be a whole number, not 'two'"),
        (["+model=inkling", "spec=[mtp1"], "spec=[mtp1: not KEY=VALUE as Hydra reads it"),
        (["+model=inkling", "oops"], "oops: not KEY=VALUE as Hydra reads it"),
        (["+model=inkling", "eval=prompts"], "eval.data: has no default; say eval.data=VALUE"),
        (["+model=hf"], "model.checkpoint: has no default; say model.checkpoint=VALUE"),
        (["+model=llama", "model.checkpoint=null"], "model.checkpoint: model=llama needs one; say"),
        (["+model=hf", "model.checkpoint=./nowhere"], "model.checkpoint: ./nowhere is not a folder"),
        (
            ["+model=inkling", "spec=mtp_multi", "spec.num_speculative_tokens=9"],
            "spec.num_speculative_tokens: 9 drafts",
        ),
        (["+model=inkling", "spec=mtp8", "spec.faults=[zork]"], "spec.faults: unknown fault 'zork'; known: "),
        (["+model=inkling", "cache.block_size=2"], "cache.block_size: 2 is below 3"),
        (["+model=inkling", "cache.num_blocks=2"], "cache.num_blocks: 2 blocks of 16 tokens hold less than one"),
        (["+model=inkling", "model.max_model_len=0"], "model.max_model_len: must be at least 1, not 0"),
        (["+model=inkling", "eval.data=nowhere.jsonl"], "eval.data: nowhere.jsonl does not exist"),
        (["+model=inkling", "eval.scorer=robst"], "eval.scorer: unknown scorer 'robst': did you mean 'robust'?"),
        (["+model=inkling", "engine.device=cuda:99"], "engine.device: cuda:99 is not there"),
        (["+model=inkling", "strict=true"], "model.checkpoint: unset, so inkling-nano would run in place of inkling"),
        (["rport"], "rport: unknown command; did you mean 'report'?"),
        (["+model=inkling", "hydra.run.dir=/x"], "hydra.run.dir: a run's directory is named by what ran"),
        (["--mutirun"], "--mutirun: unknown flag; did you mean '--multirun'?"),
        (["list", "modle"], "modle: no such group; did you mean 'model'?"),
        (["report", "nowhere"], "nowhere: not a run directory, it has no run.json"),
        (["resume", "nowhere"], "nowhere: not a run directory, it has no run.json"),
        (["score", "nowhere", "eval.data=x"], "eval.data=x: only the scorer can change after a run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(script: Script, capsys: pytest.CaptureFixture[str], argv: list[str], line: str) -> None:
    assert refused(capsys, *argv).startswith(f"specbench: {line}")
    assert not script.started
    assert not Path("outputs").exists()


def broken_checkpoint(folder: Path, breaking: str) -> Path:
    """The packaged checkpoint, spoiled."""
    shutil.copytree(PACKAGED_CHECKPOINT, folder)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    weights = folder / "mtp.safetensors"
    if breaking == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif breaking == "no config":
        (folder / "config.json").unlink()
    else:
        tensors = load_file(weights)
        name = min(tensors)
        tensors |= {name: torch.zeros(3, 5)}
        if breaking == "missing tensor":
            del tensors[name]
        save_file(tensors, weights)
    return folder


@pytest.mark.parametrize(
    ("breaking", "says"),
    [
        ("missing tensor", "is missing"),
        ("wrong shape", "[3, 5]"),
        ("truncated", "truncated"),
        ("no config", "config.json: no such file"),
    ],
)
def test_a_broken_checkpoint(
    script: Script, capsys: pytest.CaptureFixture[str], tmp_path: Path, breaking: str, says: str
) -> None:
    folder = broken_checkpoint(tmp_path / "broken", breaking)
    line = refused(capsys, "+model=hf", f"model.checkpoint={folder}", "spec=mtp8", "eval=prompts", "eval.data=x")
    assert says in line and str(folder) in line
    assert not script.started


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no rows"),
        ('{"question": "1?", "answer": "#### 1"}\n{"question": \n', "line 2"),
        ('{"a": 1}\n', "line 1"),
    ],
)
def test_bad_data(script: Script, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, says: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(content)
    line = refused(capsys, "+model=inkling", f"eval.data={rows}")
    assert says in line and str(rows) in line


def test_ids_outside_the_vocabulary(script: Script, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "ids.jsonl"
    data.write_text('{"prompt_token_ids": [5, 6]}\n{"prompt_token_ids": [5, 999999]}\n')
    line = refused(capsys, "+model=inkling", "eval=prompts", f"eval.data={data}")
    assert "prompt_token_ids of 1: ids must lie in 0 .. 2047" in line
    assert not script.started


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+model=inklin", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


# ---- What the commands print


def test_help_version_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for group, options in groups().items():
        assert group in text and ", ".join(options) in text
    for command in cli.COMMANDS:
        assert f"specbench {command}" in text
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("specbench ")
    assert main(["list", "spec"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("mtp1")
    assert main(["list", "experiment"]) == 0
    shown = [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == groups()["experiment"], "a name and what it says stay apart"


def test_hydras_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+model=inkling", "spec=mtp3", "--cfg", "job"]) == 0
    assert "num_speculative_tokens: 3" in capsys.readouterr().out


def test_dry_run_loads_and_writes_nothing(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "+model=inkling_nano", "spec=mtp1,mtp8", "dry_run=true"]) == 0
    text = capsys.readouterr().out
    assert text.count("checkpoint  ") == text.count("memory  ") == text.count("data  ") == 2
    assert "nano_problems runs in place of gsm8k" in text
    assert not script.started and not Path("outputs").exists()


def test_one_run_prints_the_report_s_path(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=inkling", "spec=mtp4", "eval.num_samples=5"]) == 0
    out, err = capsys.readouterr()
    report = Path(out.splitlines()[-1].removeprefix("report: "))
    assert report.is_file() and report.parts[:4] == ("outputs", "inkling-nano", "mtp4", "nano_problems")
    assert "not Inkling" in err and "not GSM8K" in err
    assert (report.parent / ".hydra" / "config.yaml").is_file()
    assert main(["report", str(report.parent)]) == 0
    assert main(["report", str(report.parent), "--format", "json", "-o", "metrics.json"]) == 0
    assert json.loads(Path("metrics.json").read_text())["requests"]["completed"] == 5
    assert main(["score", str(report.parent), "eval.scorer=official"]) == 0


def test_an_interrupt_exits_130(script: Script) -> None:
    script.num_left = 2
    assert main(["model=inkling", "eval.num_samples=5"]) == 130
    script.num_left = -1
    assert main(["resume", str(next(Path("outputs").rglob("run.json")).parent)]) == 0


def test_an_unforeseen_error_exits_one(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.num_left, script.ending = 0, RuntimeError("out of\nmemory")
    assert main(["model=inkling", "eval.num_samples=5"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "specbench: RuntimeError: out of memory (--debug shows where)"


# ---- Sweeps


SWEEP = ["-m", "+model=inkling_nano", "spec=none,mtp2", "eval.num_samples=4"]


def test_a_sweep_s_jobs_have_directories_named_by_their_overrides(script: Script) -> None:
    assert main(SWEEP) == 0
    names = {path.parent.name for path in Path("outputs").rglob("run.json")}
    assert names == {f"eval.num_samples=4,model=inkling_nano,spec={spec}" for spec in ("none", "mtp2")}
    for path in Path("outputs").rglob("run.json"):
        spec = json.loads(path.read_text())["config"]["spec"]["name"]
        assert f"spec={spec}" in (path.parent / ".hydra" / "overrides.yaml").read_text()


def test_a_finished_job_is_skipped_only_when_nothing_changed(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(SWEEP) == 0
    capsys.readouterr()
    num_started = len(script.started)
    assert main(SWEEP) == 0
    err = capsys.readouterr().err
    assert err.count("skipped ") == 2 and "finished at" in err
    assert "commit" in err or "outside git" in err
    assert len(script.started) == num_started
    scored = next(Path("outputs").rglob("run.json")).parent
    assert main(["score", str(scored), "eval.scorer=boxed"]) == 0
    assert main(SWEEP) == 0
    assert len(script.started) == num_started
    metrics = json.loads((scored / "metrics.json").read_text())
    assert metrics["eval"]["scorer"] == "robust", "a skipped job shows the scorer that the job asks for"
    stored = next(Path("outputs").rglob("fingerprint.json"))
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"sha256": "another"}))
    assert main(SWEEP) == 0
    assert len(script.started) == num_started + 1
    assert len(list(Path("outputs").rglob("*@1"))) == 1, "what ran before keeps its files"


def test_a_failing_job_leaves_error_json_and_stops_no_other(script: Script) -> None:
    argv = ["-m", "+model=inkling_nano", "spec=mtp_multi", "spec.num_speculative_tokens=9,1", "eval.num_samples=4"]
    assert main(argv) == 2
    (error,) = Path("outputs").rglob("error.json")
    content = json.loads(error.read_text())
    assert content["exit_code"] == 2 and "9 drafts need 9 MTP modules" in content["error"]
    assert len(list(Path("outputs").rglob("report.md"))) == 1


def test_a_job_that_breaks_is_run_again(script: Script) -> None:
    script.num_left, script.ending = 6, RuntimeError("out of memory")
    assert main(SWEEP) == 1
    script.num_left = -1
    assert main(SWEEP) == 0
    runs = [json.loads(path.read_text())["status"] for path in Path("outputs").rglob("run.json")]
    assert sorted(runs) == ["failed", "finished", "finished"]


def test_a_mistake_in_one_job_stops_the_sweep_before_it_starts(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "load.concurrency: must be at least 1" in refused(capsys, *SWEEP, "load.concurrency=4,0")
    assert not script.started


def test_sweeps_are_strict(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "+model=inkling", "spec=mtp1,mtp2"]) == 2
    assert capsys.readouterr().err.count("strict=true refuses") == 2
    assert main(["-m", "+model=inkling", "spec=mtp1,mtp2", "strict=false", "eval.num_samples=2"]) == 0


def test_job_names_are_folders() -> None:
    assert job_name(["+model=a", "eval.data=/x/y.jsonl", "output_root=o"]) == "eval.data=_x_y.jsonl,model=a"
    assert job_name([]) == "defaults"
    long = [job_name([f"eval.data={'x' * 300}{end}"]) for end in "ab"]
    assert long[0] != long[1] and all(len(name) <= 200 for name in long)


# ---- Whole processes


def specbench(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specbench.cli", *argv], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_help_and_mistakes_import_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; from specbench.cli import main; main(sys.argv[1:]); "
        "print([name for name in ('torch', 'transformers', 'datasets', 'pandas') if name in sys.modules])"
    )
    for argv in (
        ["--help"],
        ["+model=inklin"],
        ["+model=inkling", "spec.num_speculative_tokens=9", "engine.device=cpu"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *argv], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "[]", argv


def test_the_real_engine_from_another_directory(tmp_path: Path) -> None:
    overrides = ("engine.device=cpu", "eval.num_samples=4", "load.concurrency=2")
    done = specbench("+model=inkling", "spec=mtp8", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.rglob("run.json")
    record = json.loads(run.read_text())
    assert record["status"] == "finished" and record["output_check"]["status"] == "identical"
    assert json.loads((run.parent / "metrics.json").read_text())["acceptance"]["num_speculative_tokens"] == 8
