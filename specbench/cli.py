"""The command line: Hydra for runs and sweeps, one line for every mistake.

Belongs here: argv, composing conf/ into a RunConfig, exit codes. Does not belong here: the other commands
(commands.py), what a run does (benchmark.py), what a value means (run_config.py). The only file that imports hydra or
omegaconf, and both only where they are used: `--help` must come at once.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench import __version__
from specbench.commands import COMMANDS
from specbench.conf_folder import conf_dir, groups, groups_text
from specbench.errors import UserError, near_name
from specbench.outcome import INTERRUPTED, heaviest
from specbench.records import INTERLEAVED
from specbench.run_config import RunConfig, known_keys
from specbench.signals import TERMINATED_EXIT_CODE, Terminated

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


CONFIG_NAME = "config"
#: Groups that no default chooses: `model=x` is rewritten to the `+model=x` that Hydra wants.
UNCHOSEN_GROUPS = ("model", "experiment")
#: Hydra's own flags, handed to Hydra as they are, with the words that follow them.
HYDRA_FLAGS = (
    *("--cfg", "-c", "--info", "-i", "--resolve", "--package", "-p"),
    *("--hydra-help", "--shell-completion", "-sc"),
)
#: Keys that change nothing of what a job records.
IDLE_KEYS = ("output_root", "dry_run", "report.gates", "report.baseline", "report.objective")
#: Launchers and sweepers of Hydra that come as extras: hydra/GROUP=OPTION -> the extra.
PLUGIN_EXTRAS = {
    ("launcher", "joblib"): "joblib",
    ("launcher", "submitit_local"): "submitit",
    ("launcher", "submitit_slurm"): "submitit",
    ("launcher", "ray"): "ray",
    ("sweeper", "optuna"): "optuna",
}
#: Share of failed jobs that hydra/sweeper=optuna goes on with.
OPTUNA_FAILURES = "hydra.sweeper.max_failure_rate"
USAGE = """\
specbench: the instrument that proves a change to speculative decoding.

  specbench [-m] +model=NAME [spec=NAME] [eval=NAME] [KEY=VALUE ...]    one run; a sweep over a,b,c with -m
  specbench list [GROUP]                                the options of a group, and how to run each
  specbench report DIR [--baseline DIR] [--format FORMAT] [-o PATH]
                                                        everything again, from the event log of a run or a sweep
  specbench compare BASE NEW... [--gate GATE]... [--format FORMAT] [-o FILE]
                                                        runs side by side, the first of them the base
  specbench import FILE_OR_FOLDER [-o DIR]              a result of vLLM's, SGLang's or ModelOpt's benchmark as a run
  specbench export DIR --format vllm|speculation_profile [-o FILE]
                                                        a run as theirs
  specbench score DIR eval.scorer=NAME                  score again, without running again
  specbench resume DIR                                  go on with a run that was interrupted
  specbench doctor                                      what this machine can run, and why not

Examples
  specbench +model=inkling spec=mtp8 eval=gsm8k
  specbench +model=inkling spec=mtp8 eval=gsm8k dry_run=true
  specbench -m +model=inkling_nano spec=none,mtp1,mtp8 load.concurrency=1,8
  specbench +model=hf model.checkpoint=DIR spec=mtp4 eval=prompts eval.data=FILE.jsonl

Groups (GROUP=NAME chooses one, GROUP.KEY=VALUE changes a value in it)
{groups}

Flags
  -m, --multirun   sweep over comma-separated values
  --cfg job        print the composed configuration and stop (--info and --hydra-help: Hydra's own)
  --debug          show the traceback of an error
  --version        print the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is returned, and no exception leaves without --debug."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt as error:
        return TERMINATED_EXIT_CODE if isinstance(error, Terminated) else INTERRUPTED
    except BrokenPipeError:  # the reader of stdout, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UserError as error:
        if debug:
            traceback.print_exc()
        print(f"specbench: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"specbench: {type(error).__name__}: {_one_line(str(error))} (--debug shows where)", file=sys.stderr)
        return 1


def _dispatch(argv: list[str]) -> int:
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE.format(groups=groups_text()))
        return 0 if argv else 2
    if "--version" in argv:
        print(f"specbench {__version__}")
        return 0
    if argv[0].isidentifier():
        raise UserError(f"{argv[0]}: unknown command; {near_name(argv[0], COMMANDS)}")
    return _run(argv)


# ---- Runs and sweeps


def _run(argv: list[str]) -> int:
    """One run, or with -m a sweep."""
    is_sweep = "-m" in argv or "--multirun" in argv
    rest = [argument for argument in argv if argument not in ("-m", "--multirun")]
    flags = [argument.partition("=")[0] for argument in rest if argument.startswith("-")]
    for flag in flags:
        if flag not in HYDRA_FLAGS:
            raise UserError(f"{flag}: unknown flag; {near_name(flag, [*HYDRA_FLAGS, '-m', '--multirun', '--debug'])}")
    if flags:
        return _hydra_flags(rest, flags)
    command = shlex.join(["specbench", *argv])
    composer = Composer(rest)
    return _sweep(composer, command) if is_sweep else _single(composer, command)


def _single(composer: Composer, command: str) -> int:
    for override in composer.parsed:
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: several values are a sweep; put -m before the overrides")
    config, composed = composer.compose(composer.overrides)
    if config.dry_run:
        return _dry_run([("run", config)], is_sweep=False)
    from specbench import benchmark

    invocation = benchmark.Invocation(command, tuple(composer.overrides), composed, job_name=None)
    return benchmark.run(config, invocation).exit_code


def _sweep(composer: Composer, command: str) -> int:
    """Every job is composed and checked before the first one starts."""
    jobs = composer.jobs()
    configs = [composer.compose(job)[0] for job in jobs]
    if any(config.dry_run for config in configs):
        return _dry_run(
            [(f"job {job_name(job)}", config) for job, config in zip(jobs, configs, strict=True)], is_sweep=True
        )
    from specbench import sweep
    from specbench.plan import check_objective

    objective = configs[0].report.objective
    if composer.searches or objective is not None:
        check_objective(configs[0])
    directory = composer.sweep_directory or sweep.new_directory(configs[0].output_root)
    exit_codes: list[int] = []
    sweep.begin(directory, sweep.SweepPlan(command, [] if composer.searches else jobs, objective))
    try:
        composer.multirun(SweepJob(command, directory, must_give_objective=composer.searches), directory)
    finally:  # interrupted or not: what has ended is reported
        exit_codes = sweep.report(directory)
    return heaviest(exit_codes)


def _dry_run(jobs: Sequence[tuple[str, RunConfig]], *, is_sweep: bool) -> int:
    """What each job would do; one that can't run says why and lets the others speak."""
    from specbench.plan import describe, prepare

    exit_codes = []
    for title, config in jobs:
        print(f"{title}")
        try:
            print(describe(prepare(config, is_sweep=is_sweep)))
            exit_codes.append(0)
        except UserError as error:
            print(f"specbench: {error}", file=sys.stderr)
            exit_codes.append(2)
    return heaviest(exit_codes)


class SweepJob:
    """What a launcher calls for each job, in this process or in another one."""

    def __init__(self, command: str, directory: Path, *, must_give_objective: bool) -> None:
        self._command = command
        self._directory = directory
        self._must_give_objective = must_give_objective

    def __call__(self, composed: Any) -> float | None:
        """The objective. A sweeper that searches takes an exception for a job without one."""
        from hydra.core.hydra_config import HydraConfig

        from specbench import benchmark, sweep

        hydra = HydraConfig.get()
        overrides = list(hydra.overrides.task)
        invocation = benchmark.Invocation(self._command, tuple(overrides), _yaml(composed), job_name(overrides))
        config = RunConfig.from_dict(_plain(composed))
        objective = sweep.run_job(config, invocation, self._directory, hydra.job.num)
        if objective is None and self._must_give_objective:
            raise UserError(f"job {invocation.job_name}: no {config.report.objective} to give to the sweeper")
        return objective


def job_name(overrides: Sequence[str]) -> str:
    """A folder's name for a job: its overrides, without what chooses no work."""
    kept = [override.lstrip("+") for override in overrides]
    interleaved = f"report.baseline={INTERLEAVED}"  # which makes another run
    kept = [one for one in kept if one.partition("=")[0] not in IDLE_KEYS or one == interleaved]
    name = ",".join(sorted(kept)).replace(os.sep, "_").replace(" ", "_") or "defaults"
    if len(name.encode()) <= 200:
        return name
    import hashlib

    return name.encode()[:180].decode(errors="ignore") + "-" + hashlib.sha256(name.encode()).hexdigest()[:12]


class Composer:
    """Hydra over conf/ for one command line. Every mistake is a UserError of one line."""

    def __init__(self, overrides: list[str]) -> None:
        from hydra import version
        from hydra._internal.hydra import Hydra
        from hydra._internal.utils import create_config_search_path
        from hydra.core.global_hydra import GlobalHydra

        version.setbase("1.3")
        GlobalHydra.instance().clear()
        self._hydra = Hydra.create_main_hydra2("specbench", create_config_search_path(str(conf_dir())))
        self.overrides = _with_plus(overrides)
        self.parsed = _parse(self.overrides)
        if not any(override.key_or_group == "hydra.searchpath" for override in self.parsed):
            for override in self.parsed:
                _check_override(override)
        if not _chooses_model(self.parsed):
            raise UserError(f"model: none was chosen; say +model=NAME, one of {', '.join(groups()['model'])}")

    def compose(self, overrides: list[str]) -> tuple[RunConfig, str]:
        """The checked configuration, and its YAML as composed."""
        from hydra.types import RunMode

        config = self._guarded(
            lambda: self._hydra.config_loader.load_configuration(CONFIG_NAME, overrides, RunMode.RUN)
        )
        job = self._hydra.get_sanitized_cfg(config, "job")
        return RunConfig.from_dict(self._guarded(lambda: _plain(job))), _yaml(job)

    @property
    def searches(self) -> bool:
        """Whether a sweeper of its own deals the jobs, by what earlier ones gave."""
        return self._hydra_value("hydra/sweeper") not in (None, "basic")

    @property
    def sweep_directory(self) -> Path | None:
        """As the user named it."""
        named = self._hydra_value("hydra.sweep.dir")
        return None if named is None else Path(named).absolute()

    def jobs(self) -> list[list[str]]:
        """The overrides of each job, as the basic sweeper deals them; of a sweeper of its own, one that it may deal."""
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        task = [override for override in self.parsed if not override.key_or_group.startswith("hydra")]
        if self.searches:
            return [[_first_of(override) for override in task]]
        batches = self._guarded(lambda: BasicSweeper.split_arguments(task, None))
        return [job for batch in batches for job in batch]

    def multirun(self, job: SweepJob, directory: Path) -> None:
        """Run every job through the launcher and the sweeper that the configuration names."""
        quoted = str(directory).replace("\\", "\\\\").replace("'", "\\'")
        mine = [one for one in self.overrides if not one.startswith("hydra.sweep.dir=")]
        overrides = [*mine, f"hydra.sweep.dir='{quoted}'"]
        if self._hydra_value("hydra/sweeper") == "optuna" and self._hydra_value(OPTUNA_FAILURES) is None:
            overrides.append(f"{OPTUNA_FAILURES}=1.0")  # a job that fails stops no other
        self._guarded(lambda: self._hydra.multirun(CONFIG_NAME, job, overrides))

    def _hydra_value(self, key: str) -> str | None:
        """What the command line says of a key of Hydra's own."""
        return next((str(one.value()) for one in reversed(self.parsed) if one.key_or_group == key), None)

    def _guarded(self, act: Callable[[], Any]) -> Any:
        """What Hydra and OmegaConf refuse becomes one line."""
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        try:
            return act()
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(_one_line(str(error))) from error


def _first_of(override: Override) -> str:
    """The override with the first of its values."""
    from hydra.core.override_parser.types import IntervalSweep

    if not override.is_sweep_override():
        return f"{override.get_key_element()}={override.get_value_element_as_str()}"
    if override.is_discrete_sweep():
        return f"{override.get_key_element()}={next(override.sweep_string_iterator())}"
    interval = override.value()
    assert isinstance(interval, IntervalSweep) and interval.start is not None
    whole = float(interval.start).is_integer()
    return f"{override.get_key_element()}={int(interval.start) if whole else interval.start}"


def _plain(composed: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)  # type: ignore[return-value]


def _yaml(composed: Any) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(composed)


def _parse(overrides: list[str]) -> list[Override]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed = []
    for override in overrides:
        try:
            parsed.append(parser.parse_override(override))
        except HydraException as error:
            raise UserError(f"{override}: not KEY=VALUE as Hydra reads it ({_one_line(str(error))})") from error
    return parsed


def _with_plus(overrides: list[str]) -> list[str]:
    """`model=x` as `+model=x`; as it is where an experiment has chosen a model already."""
    chosen = {"model"} if _experiment_chooses_model(overrides) else set()
    rewritten = []
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        if key in UNCHOSEN_GROUPS:
            override = ("" if key in chosen else "+") + override.lstrip("+")
        rewritten.append(override)
    return rewritten


def _experiment_chooses_model(overrides: list[str]) -> bool:
    names = [
        value
        for key, _, value in (override.lstrip("+").partition("=") for override in overrides)
        if key == "experiment"
    ]
    paths = [conf_dir() / "experiment" / f"{name}.yaml" for name in names]
    return any("/model:" in path.read_text(encoding="utf-8") for path in paths if path.is_file())


def _chooses_model(parsed: list[Override]) -> bool:
    inputs = [override.input_line or "" for override in parsed]
    return any(override.key_or_group == "model" for override in parsed) or _experiment_chooses_model(inputs)


def _check_override(override: Override) -> None:
    """A group, an option of it, or a key that exists; the nearest name otherwise."""
    key = override.key_or_group
    if key == "hydra.run.dir":
        raise UserError("hydra.run.dir: a run's directory is named by what ran; say output_root=DIR for where it goes")
    if key.startswith("hydra"):
        _check_plugin(override)
        return
    known = groups()
    if key not in known:
        if key not in known_keys():
            raise UserError(f"{key}: unknown key; {near_name(key, [*known, *known_keys()])}")
        return
    values = list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]
    for value in values:
        if not isinstance(value, str):
            raise UserError(f"{key}: must name one of {', '.join(known[key])}, not {value!r}")
        if value not in known[key]:
            raise UserError(f"{key}={value}: no such option; {near_name(value, known[key])}")


def _check_plugin(override: Override) -> None:
    """UserError that names the extra of a launcher or sweeper that is not installed."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    root, _, group = override.key_or_group.partition("/")
    extra = PLUGIN_EXTRAS.get((group, str(override.value())))
    if root != "hydra" or extra is None:
        return
    Plugins.instance()  # plugins put their options into the store
    if f"{override.value()}.yaml" not in ConfigStore.instance().list(f"hydra/{group}"):
        raise UserError(
            f"{override.input_line}: not installed; say pip install -e '.[{extra}]' in specbench's repository"
        )


def _hydra_flags(argv: list[str], flags: list[str]) -> int:
    """Hydra's own flags, by Hydra's own main; no job ever starts here."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    overrides = [item for item in argv if "=" in item and not item.startswith("-")]
    words = [item for item in argv if item not in overrides]
    overrides = [] if "--hydra-help" in flags else Composer(overrides).overrides
    GlobalHydra.instance().clear()
    before, sys.argv = sys.argv, ["specbench", *words, *overrides]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME)(lambda _: None)()
    finally:
        sys.argv = before
    return 0


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    # What a launcher sends to other processes must be found there by the module's own name.
    from specbench.cli import main as main_by_name

    sys.exit(main_by_name())
