"""The story of one run, readable aloud: decide, start the engine, warm up, measure, check the output, report.

Belongs here: the order of things, what is written when, and that a run's status is honest however it ends. Does not
belong here: deciding (plan/), running requests (engine/), judging records (reports/).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specbench import __version__, environment, terminal
from specbench.arrivals import ClosedLoad
from specbench.beside_plain import PlainSide, run_beside_plain, without_speculation
from specbench.engine.config import EngineConfig
from specbench.errors import UserError
from specbench.evals.registry import load_task
from specbench.evals.task import EvalModel, rescore
from specbench.generate import AudioSource, GenerateListener, GenerateRequest, GenerateResult, Target
from specbench.machinery import Machinery, embedded_machinery, follow_rank_0
from specbench.measuring import RunClock, StartedRun, measure
from specbench.model_choice import choose_model
from specbench.outcome import Outcome
from specbench.plan import Plan, fingerprint, prepare
from specbench.record_columns import EngineStepColumns
from specbench.recorded_drafts import AUTO, DRAFTS_FILE, recorded_in, write_drafts
from specbench.records import BASELINE_FOLDER, OutputCheck, RunRecord
from specbench.redaction import redact
from specbench.reports.gates import gates_exit_code
from specbench.reports.identities import broken_identities
from specbench.reports.report_files import Report, recompute
from specbench.run_config import ReportConfig, RunConfig
from specbench.run_directory import METRICS_FILE, RUN_FILE, EventLog, RunDirectory
from specbench.signals import Terminated, ignore_signals, terminable

FINGERPRINT_FILE = "fingerprint.json"
ERROR_FILE = "error.json"


@dataclass(frozen=True, slots=True)
class Invocation:
    """How a run was asked for."""

    command: str
    overrides: tuple[str, ...]
    #: YAML of the configuration as composed.
    composed: str
    #: Names a sweep job's directory; None for a plain run.
    job_name: str | None


# ---- The commands


def run(config: RunConfig, invocation: Invocation) -> Outcome:
    """One run in a new directory. Of ranks that were started together only the first has one."""
    _follow_if_asked(config)
    plan = prepare(config, is_sweep=False)
    directory = RunDirectory.create(_new_run_path(plan))
    return execute(plan, directory, invocation, EventLog())


def _follow_if_asked(config: RunConfig) -> None:
    """Does not return in a process that is not the first of ranks that were started together."""
    parallel = config.parallel
    if parallel.tensor_parallel_size > 1:
        follow_rank_0(parallel.start, parallel.tensor_parallel_size, parallel.timeout_s)
    elif parallel.start != "spawn" and (num_ranks := _num_launched()) > 1:
        raise UserError(
            f"parallel.tensor_parallel_size: 1, and {num_ranks} ranks were started: each would run all; make them "
            "equal, or say parallel.start=spawn"
        )


def _num_launched() -> int:
    """Processes that torchrun has started."""
    text = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if not text.isdecimal():
        raise UserError(f"WORLD_SIZE: must be a whole number, not {text!r}; torchrun sets it")
    return int(text)


def _refuse_launched(config: RunConfig) -> None:
    """UserError in a sweep whose ranks something else has started."""
    if config.parallel.start != "spawn" and _num_launched() > 1:
        raise UserError("parallel.start: the jobs of a sweep start their ranks themselves; run it without torchrun")


def run_sweep_job(config: RunConfig, invocation: Invocation) -> Outcome:
    """One job of a sweep, in the directory named by its overrides. However it fails, the other jobs go on."""
    path = None
    try:
        _refuse_launched(config)
        plan = prepare(config, is_sweep=True)
        path = _job_path(config, plan.choice.ran, plan.task.data.name, invocation)
        if (skipped := _skip_if_done(plan, path, invocation)) is not None:
            return skipped
        _move_aside(path)
        outcome = execute(plan, RunDirectory.create(path), invocation, EventLog())
        return dataclasses.replace(outcome, job_name=invocation.job_name)
    except Exception as error:
        exit_code = 2 if isinstance(error, UserError) else 1
        path = path or _job_path(config, *_what_would_run(config), invocation)
        _write_error(path, error, exit_code)
        terminal.say(f"specbench: job {invocation.job_name}: {' '.join(str(error).split())}")
        return Outcome("failed", exit_code, path, job_name=invocation.job_name, error=str(error))


def resume(path: Path) -> Outcome:
    """Go on with an interrupted run: only the requests that its journal lacks."""
    directory = RunDirectory.open(path)
    before = directory.read_run()
    if before.status == "finished":
        raise UserError(f"{path}: finished at {before.finished_at}, nothing is left to run; start a new run instead")
    config = RunConfig.from_dict(before.config)
    _follow_if_asked(config)
    plan = prepare(config, is_sweep=False)
    _refuse_if_changed(plan, path)
    log = directory.read_journal()
    invocation = Invocation(before.command, (), "", job_name=None)
    return execute(plan, directory, invocation, log, before)


def score_again(path: Path, scorer: str) -> Outcome:
    """Another headline scorer, from the recorded texts."""
    record, report = _rescored(path, scorer)
    terminal.print_closing_table(record, report.metrics, record.notices, report.reading_files)
    return Outcome("finished", 0, path, report.metrics)


def _rescored(path: Path, scorer: str) -> tuple[RunRecord, Report]:
    """The run with another headline scorer, written."""
    directory = RunDirectory.open(path)
    record, log = directory.read_run(), directory.read_event_log()
    if record.config["spec"].get("rejection_sample_method") == "synthetic":
        raise UserError(f"{path}: drafts were accepted by coins, so the text answers nothing; score a verified run")
    if record.config["model"].get("load") == "random":
        raise UserError(f"{path}: the weights were random, so the text answers nothing; score a run of a checkpoint")
    log.samples = rescore(log.samples, scorer)
    directory.write_tables(log)
    record.config["eval"]["scorer"] = scorer
    directory.write_run(record)
    return record, recompute(path)


# ---- One run


@dataclass(frozen=True, slots=True, eq=False)
class OpenRun:
    """A run whose directory is there."""

    plan: Plan
    directory: RunDirectory
    record: RunRecord
    #: What an interrupted run left.
    log: EventLog
    clock: RunClock


def execute(
    plan: Plan,
    directory: RunDirectory,
    invocation: Invocation,
    log: EventLog,
    before: RunRecord | None = None,
) -> Outcome:
    """Run what is left of `plan` in `directory`. `log` and `before` are what an interrupted run left there."""
    terminal.panel(plan.notices)
    for line in plan.differences:
        terminal.status(f"resolved {line}")
    watch = environment.ProcessWatch()
    run = _open(plan, directory, invocation, log, before)
    baseline = None if plan.baseline is None else _open_baseline(plan.baseline, directory, invocation)
    with ExitStack() as ending:
        ending.enter_context(_honest_ending([run] if baseline is None else [run, baseline]))
        machinery = embedded_machinery()
        ending.callback(machinery.close)
        # The run without speculation goes first in each turn.
        in_turns = [_start(one, machinery) for one in (baseline, run) if one is not None]
        measured = measure(in_turns)
        results = [_whole(*pair) for pair in zip(in_turns, measured, strict=True)]
        terminal.status("checking the output")
        for one, found in zip(in_turns, results, strict=True):
            one.record.memory = one.engine.memory_budget()
            one.record.output_check = _check_output(one.plan.config, machinery, one.engine, found)
        plain = None if baseline is None else PlainSide(in_turns[0].engine, results[0])
        beside = run_beside_plain(plan, machinery, in_turns[-1].engine, results[-1], run.clock, plain)
        run.record.notices += beside.notices
        run.record.losslessness = beside.losslessness
        *_, report = [_finish(one, watch) for one in in_turns]
    metrics, record = report.metrics, run.record
    terminal.print_closing_table(record, metrics, record.notices[len(plan.notices) :], report.reading_files)
    return Outcome("finished", _exit_code(metrics) or _gates_exit_code(report), directory.path, metrics)


def _open(
    plan: Plan, directory: RunDirectory, invocation: Invocation, log: EventLog, before: RunRecord | None
) -> OpenRun:
    record = _open_record(plan, directory, invocation, before)
    return OpenRun(plan, directory, record, log, RunClock(from_s=_last_time(log)))


def _open_baseline(plan: Plan, directory: RunDirectory, invocation: Invocation) -> OpenRun:
    """The run without speculation that takes turns with the one in `directory`, in a folder of that."""
    path, own = directory.path / BASELINE_FOLDER, dataclasses.replace(invocation, composed="")
    if not (path / RUN_FILE).exists():
        return _open(plan, RunDirectory.create(path), own, EventLog(), None)
    opened = RunDirectory.open(path)
    return _open(plan, opened, own, opened.read_journal(), opened.read_run())


def _start(run: OpenRun, machinery: Machinery) -> StartedRun:
    config = _with_drafts(run.plan, machinery, run.directory, run.clock)
    engine = machinery.start_engine(config, run.clock, terminal.status)
    return StartedRun(run.plan, engine, run.directory, run.record, run.log, run.clock)


def _whole(run: StartedRun, measured: list[GenerateResult]) -> list[GenerateResult]:
    """What earlier segments measured too."""
    return _in_order(run.plan, _earlier_results(run.plan, run.log) + measured)


def _finish(run: StartedRun, watch: environment.ProcessWatch) -> Report:
    """Tables, run.json and report of a run that has come to its end."""
    log = run.directory.finalise()
    if run.plan.task.judge is not None:
        judged = run.plan.task.judge(log.samples)
        log.samples, run.record.task_results = judged.samples, judged.results
        run.directory.write_tables(log)
    run.record.hardware["at_end"] = environment.state() | {"other_processes": watch.heavy()}
    run.record.status, run.record.error, run.record.finished_at = "finished", None, _now()
    run.directory.write_run(run.record)
    return recompute(run.directory.path)


def _with_drafts(plan: Plan, machinery: Machinery, directory: RunDirectory, clock: Callable[[], float]) -> EngineConfig:
    """The engine's settings, recorded drafts as a file of this run where it needs them."""
    config, drafts = plan.engine_config, plan.config.spec.drafts
    if drafts is None or (drafts != AUTO and Path(drafts).is_file()):
        return config
    file = directory.path / DRAFTS_FILE
    if drafts != AUTO:
        write_drafts(file, recorded_in(Path(drafts)))
    elif not file.exists():  # a resumed run has recorded them
        terminal.status("recording plain decoding to draft from")
        plain = machinery.start_engine(without_speculation(config), clock, terminal.status)
        results: list[GenerateResult] = []
        requests = [request for request in plan.requests if request.repeat == 0]
        plain.generate(requests, ClosedLoad(plan.config.side_concurrency), GenerateListener(results.append))
        write_drafts(file, [(result.prompt_token_ids, result.output_token_ids) for result in results])
    return dataclasses.replace(config, drafts=str(file))


@contextmanager
def _honest_ending(runs: Sequence[OpenRun]) -> Iterator[None]:
    """Whatever ends the run, the first of `runs`, early is in run.json of each before it goes on its way."""
    with terminable():
        try:
            yield
        except BaseException as error:
            ignore_signals()
            _write_ending(runs, error)
            raise


def _write_ending(runs: Sequence[OpenRun], error: BaseException) -> None:
    for run in reversed(runs):
        num_done = sum(not request.is_warmup for request in run.directory.read_journal().requests)
        run.record.status, run.record.finished_at = "failed", _now()
        run.record.error = f"{_reason(error)}, after {num_done} of {len(run.plan.requests)} requests"
        run.directory.write_run(run.record)
    # The command line says what any other error was.
    said = run.record.error if isinstance(error, KeyboardInterrupt) else f"{num_done} requests are kept"
    if num_done or not isinstance(error, UserError):
        terminal.say(f"specbench: {said}; go on with: specbench resume {run.directory.path}")


def _reason(error: BaseException) -> str:
    if isinstance(error, Terminated):
        return "ended by SIGTERM"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _open_record(plan: Plan, directory: RunDirectory, invocation: Invocation, before: RunRecord | None) -> RunRecord:
    """run.json with status "running", and the files beside it that say how the run was asked for."""
    model, commit = plan.model_identity(), environment.commit()
    record = RunRecord(
        status="running",
        config=plan.config.to_dict(),
        command=invocation.command,
        version=__version__,
        num_segments=1 if before is None else before.num_segments + 1,
        commit=commit.commit,
        is_dirty=commit.is_dirty,
        hardware=environment.hardware() | {"at_start": environment.state()},
        packages=environment.packages(),
        model=model,
        draft_model=plan.draft_identity(),
        data=plan.task.data,
        acceptance_source="engine",
        started_at=_now() if before is None else before.started_at,
        notices=list(plan.notices),
    )
    if before is not None:
        record.notices += _resume_notices(before)
    directory.write_run(record)
    if before is None:
        _write_json(directory.path / FINGERPRINT_FILE, fingerprint(plan, model))
        if invocation.composed:
            _write_hydra_files(directory.path, invocation)
    return record


def _check_output(
    config: RunConfig, machinery: Machinery, engine: Target, results: list[GenerateResult]
) -> OutputCheck:
    """Replay what was emitted, outside measured time."""
    limit = config.report.output_check_requests
    if limit == 0:
        return OutputCheck("not_checked", reason="report.output_check_requests=0")
    if config.spec.rejection_sample_method == "synthetic":
        return OutputCheck("not_applicable", reason="synthetic acceptance: the text means nothing")
    assert config.sampling.temperature is not None
    if config.sampling.temperature > 0:
        return OutputCheck("not_applicable", reason=f"sampled at temperature {config.sampling.temperature:g}")
    completed = [result for result in results if result.record.error is None]
    if not completed:
        return OutputCheck("not_checked", reason="no request was completed")
    return machinery.check_output(engine, completed, limit)


def _exit_code(metrics: dict) -> int:
    """1 when requests failed, the text is wrong or the counts contradict each other, and says so."""
    num_failed = metrics["requests"]["failed"] + metrics["requests"]["aborted"]
    if num_failed:
        terminal.say(f"specbench: {num_failed} requests failed; the report and requests.parquet say why")
    is_wrong = metrics["checks"]["output"]["status"] == "mismatch"
    if is_wrong:
        terminal.say("specbench: the output check failed: emitted tokens are not those of plain decoding")
    is_lossy = metrics["checks"]["losslessness"]["status"] == "mismatch"
    if is_lossy:
        terminal.say("specbench: speculation is not lossless: the report's table says what differs from plain decoding")
    broken = broken_identities(metrics)
    if broken:
        terminal.say(f"specbench: identities broken: {', '.join(broken)}; the counts contradict each other, trust none")
    return 1 if num_failed or is_wrong or is_lossy or broken else 0


def _gates_exit_code(report: Report) -> int:
    """3 where a gate of the run failed, 4 where one is undecided, and says which."""
    for result in report.gates:
        if result.exit_code:
            terminal.say(f"specbench: {result.sentence}")
    return gates_exit_code(report.gates)


# ---- Resuming


def _earlier_results(plan: Plan, log: EventLog) -> list[GenerateResult]:
    """What earlier segments of a resumed run finished, as far as the output check needs it."""
    samples = {(sample.sample_id, sample.turn, sample.repeat): sample for sample in log.samples}
    requests = {request.request_id: request for request in plan.requests}
    results = []
    for record in log.requests:
        if record.is_warmup or record.error is not None:
            continue
        sample = samples[record.sample_id, record.turn, record.repeat]
        assert sample.prompt_token_ids is not None
        prompt, output = list(sample.prompt_token_ids), list(sample.output_token_ids)
        asked = requests[record.request_id]
        audio = _heard(asked, requests)
        results.append(
            GenerateResult(record, [], prompt, output, sample.output_text, sampling=asked.sampling, audio=audio)
        )
    return results


def _heard(request: GenerateRequest, requests: Mapping[str, GenerateRequest]) -> tuple[AudioSource, ...]:
    """The clips of a conversation up to this turn."""
    before = () if request.follows is None else _heard(requests[request.follows], requests)
    return before + request.audio


def _in_order(plan: Plan, results: list[GenerateResult]) -> list[GenerateResult]:
    """In the order of the samples: those that finish first are the short ones, a poor choice to check."""
    place = {request.request_id: index for index, request in enumerate(plan.requests)}
    return sorted(results, key=lambda result: place[result.record.request_id])


def _last_time(log: EventLog) -> float:
    times = [request.last_token_s for request in log.requests if request.last_token_s is not None]
    return max(*times, float(EngineStepColumns.of(log.engine_steps).end_s.max(initial=0.0)), 0.0)


def _resume_notices(before: RunRecord) -> list[str]:
    earlier = [notice for notice in before.notices if notice.startswith("Resumed")]
    return [
        *earlier,
        f"Resumed at {_now()} ({before.error or 'killed'}): times run over several segments, so duration and "
        "throughput are not given.",
    ]


def _refuse_if_changed(plan: Plan, path: Path) -> None:
    """UserError when the records to come would not belong to those that are there."""
    stored = _read_json(path / FINGERPRINT_FILE)
    if stored is None:
        raise UserError(
            f"{path / FINGERPRINT_FILE}: missing or unreadable, so what ran cannot be compared; start a new run"
        )
    now = fingerprint(plan, plan.model_identity())
    changed = [
        part
        for part in ("config", "checkpoint", "drafter", "data", "code", "hardware")
        if stored.get(part) != now[part]
    ]
    if changed:
        raise UserError(f"{path}: {', '.join(changed)} changed since the run began; start a new run instead")


# ---- Directories


def _new_run_path(plan: Plan) -> Path:
    """Named by what ran and when; a second run within a second gets a number."""
    parent = Path(plan.config.output_root, plan.choice.ran, plan.config.spec.name, plan.task.data.name)
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path, number = parent / stamp, 1
    while path.exists():
        number += 1
        path = parent / f"{stamp}_{number}"
    return path


def _job_path(config: RunConfig, model_name: str, data_name: str, invocation: Invocation) -> Path:
    assert invocation.job_name is not None
    return Path(config.output_root, "sweeps", model_name, data_name, invocation.job_name)


def _what_would_run(config: RunConfig) -> tuple[str, str]:
    """Names of model and data for the directory of a job that may not come to run; as asked where they are unknown."""
    model, data = config.model.name, config.eval.name
    with suppress(UserError):
        choice = choose_model(config.model)
        model = choice.ran
        data = load_task(config.eval, EvalModel(choice.packaged)).data.name
    return model, data


def _skip_if_done(plan: Plan, path: Path, invocation: Invocation) -> Outcome | None:
    """A job that finished here before under the very same conditions."""
    stored = _read_json(path / FINGERPRINT_FILE)
    if stored is None or stored["sha256"] != fingerprint(plan, plan.model_identity())["sha256"]:
        return None
    record = RunDirectory.open(path).read_run()
    metrics = _read_json(path / METRICS_FILE)
    if record.status != "finished" or metrics is None:
        return None
    (path / ERROR_FILE).unlink(missing_ok=True)  # of a later try that failed in its checks
    scorer = plan.config.eval.scorer
    if scorer is not None and scorer != record.config["eval"]["scorer"]:  # `specbench score` was here
        metrics = _rescored(path, scorer)[1].metrics
    commit = (
        "outside git"
        if record.commit is None
        else f"commit {record.commit[:12]}{' with changes' if record.is_dirty else ''}"
    )
    terminal.say(f"skipped {invocation.job_name}: finished at {record.finished_at}, {commit}")
    return Outcome("skipped", _judge_again(path, plan.config.report), path, metrics, invocation.job_name)


def _judge_again(path: Path, config: ReportConfig) -> int:
    """The exit code of today's gates on a run that finished before; they are part of no fingerprint."""
    if not config.gates and config.baseline is None:
        return 0
    directory = RunDirectory.open(path)
    record = directory.read_run()
    record.config["report"] |= {"gates": list(config.gates), "baseline": config.baseline}
    directory.write_run(record)
    return _gates_exit_code(recompute(path))


def _move_aside(path: Path) -> None:
    """What an earlier, different or unfinished job left keeps its files under another name."""
    if not path.exists():
        return
    number = 1
    while (aside := path.with_name(f"{path.name}@{number}")).exists():
        number += 1
    try:
        os.rename(path, aside)
    except OSError as error:
        raise UserError(f"{path}: cannot be moved aside ({error.strerror}); move it away") from error


def _write_error(path: Path, error: Exception, exit_code: int) -> None:
    content = {"error": str(error), "type": type(error).__name__, "exit_code": exit_code, "at": _now()}
    content["traceback"] = "".join(traceback.format_exception(error))
    _write_json(path / ERROR_FILE, redact(content))


def _write_hydra_files(path: Path, invocation: Invocation) -> None:
    """.hydra/, as Hydra itself leaves it: the composed configuration and the overrides."""
    folder = path / ".hydra"
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(invocation.composed, encoding="utf-8")
    overrides = "".join(f"- {json.dumps(override)}\n" for override in invocation.overrides)
    (folder / "overrides.yaml").write_text(overrides or "[]\n", encoding="utf-8")


def _write_json(path: Path, content: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"specbench: {path}: cannot be written ({error.strerror})", file=sys.stderr)


def _read_json(path: Path) -> dict | None:
    """None where there is no such file, or none that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
