"""The commands other than a run: what a run left behind, once more.

Belongs here: their arguments, what goes to the terminal or into a file, and their exit codes. Does not belong here:
runs and sweeps (cli.py), what a report says (reports/).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.conf_folder import conf_dir, groups, groups_text, how_to
from specbench.errors import UserError, near_name
from specbench.outcome import heaviest
from specbench.run_config import ALWAYS_WRITTEN, REPORT_FORMATS

if TYPE_CHECKING:
    from specbench.reports.compare import Pair
    from specbench.reports.compared_run import ComparedRun


def _list_command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("specbench list", description="The options of a group, and how to run each.")
    parser.add_argument("group", nargs="?")
    group = parser.parse_args(argv).group
    known = groups()
    if group is None:
        print(groups_text())
        return 0
    if group not in known:
        raise UserError(f"{group}: no such group; {near_name(group, known)}")
    width = max(map(len, known[group])) + 2
    for option in known[group]:
        print(f"{option:<{width}}{how_to(conf_dir() / group / f'{option}.yaml')}")
    return 0


def _report_command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("specbench report", description="Everything again, from the event log of a run.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="a run to compare with")
    parser.add_argument("--format", choices=ALWAYS_WRITTEN + REPORT_FORMATS, default="md")
    parser.add_argument("-o", "--output", type=Path, help="a file; a folder for csv, svg and png")
    parser.epilog = "Without -o: md, json and pr go to the terminal, the others into the run's directory."
    arguments = parser.parse_args(argv)
    from specbench import sweep

    if sweep.is_sweep(arguments.directory):
        if arguments.baseline or arguments.output or arguments.format != "md":
            raise UserError(f"{arguments.directory}: a sweep, of which all files are made again; leave the options out")
        return heaviest(sweep.report(arguments.directory))
    from specbench.reports.report_files import TEXT_FORMATS, export, recompute, write_format
    from specbench.run_directory import RunDirectory

    report, form = recompute(arguments.directory, arguments.baseline), arguments.format
    if arguments.output is not None:
        written = export(report, form, arguments.output)
    elif form in TEXT_FORMATS:
        print(report.text(form), end="")
        written = []
    else:
        written = write_format(RunDirectory.open(arguments.directory), report, form)
    for path in written:
        print(path)
    faults = _layout_exit_code(() if report.comparison is None else report.comparison.pairs)
    return _trust_exit_code(report.compared_runs) or faults


def _trust_exit_code(runs: Iterable[ComparedRun]) -> int:
    """1 where a run has broken identities, a wrong text or failed requests, and says of all of them which."""
    from specbench.reports.identities import distrust

    runs = list(runs)
    reasons = [f"{run.label}: {reason}" for run in runs if (reason := distrust(run.metrics)) is not None]
    if reasons:
        print(f"specbench: {'; '.join(reasons)}; trust no figure of such a run", file=sys.stderr)
    num_failed = {run.label: run.metrics["requests"]["failed"] + run.metrics["requests"]["aborted"] for run in runs}
    failures = [f"{label}: {count} requests failed" for label, count in num_failed.items() if count]
    if failures:
        print(f"specbench: {'; '.join(failures)}; speed is that of the others", file=sys.stderr)
    return 1 if reasons or failures else 0


def _layout_exit_code(pairs: Iterable[Pair]) -> int:
    """1 where acceptance in float32 depends on how the model was spread, and says where."""
    faults = [pair.layout for pair in pairs if pair.layout is not None and pair.layout.is_fault]
    for fault in faults:
        print(f"specbench: {fault.sentence.replace('**', '')}", file=sys.stderr)
    return 1 if faults else 0


def _hand_over(text: str, output: Path | None) -> None:
    """To the terminal, or to a file whose name goes there."""
    if output is None:
        print(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}); name another file with -o") from error
    print(output)


def _compare_command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("specbench compare", description="Runs side by side, the first of them the base.")
    parser.add_argument("base", type=Path)
    parser.add_argument("new", type=Path, nargs="+")
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="GATE",
        help="'PATH OPERATOR NUMBER [* baseline]'; exit 3 where one fails, 4 where one is undecided",
    )
    parser.add_argument("--undecided", choices=("fail", "pass"), default="fail", help="what undecided gates do")
    parser.add_argument("--format", choices=("md", "json", "pr", "html"), default="md")
    parser.add_argument("-o", "--output", type=Path, help="a file; the terminal without it")
    arguments = parser.parse_args(argv)
    from specbench.reports.compare import compare_directories
    from specbench.reports.compare_data import comparison_data
    from specbench.reports.compare_sections import comparison_markdown
    from specbench.reports.comparison_plots import comparison_plots
    from specbench.reports.gates import check_paths, gates_exit_code, judge_comparison, parse_gates
    from specbench.reports.html import report_html
    from specbench.reports.pull_request import comparison_pull_request

    gates = parse_gates(arguments.gate, is_undecided_good=arguments.undecided == "pass")
    comparison = compare_directories(arguments.base, arguments.new)
    check_paths(gates, comparison.runs)
    results = judge_comparison(gates, comparison)
    if arguments.format == "json":
        text = json.dumps(comparison_data(comparison, results), indent=2, ensure_ascii=False, allow_nan=False)
    elif arguments.format == "pr":
        text = comparison_pull_request(comparison, results)
    else:
        text = comparison_markdown(comparison, results)
        text = report_html(text, comparison_plots(comparison.runs)) if arguments.format == "html" else text
    _hand_over(text, arguments.output)
    for result in results:
        if result.exit_code:
            print(f"specbench: {result.sentence}", file=sys.stderr)
    faults = _layout_exit_code(comparison.pairs)
    return _trust_exit_code(comparison.runs) or faults or gates_exit_code(results)


def _import_command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "specbench import",
        description="A result of another tool as a run directory: the JSON of vllm bench serve, a line of SGLang's "
        "bench_serving, a folder of specdec_bench.",
    )
    parser.add_argument("source", type=Path, metavar="FILE_OR_FOLDER")
    parser.add_argument("--result", type=int, help="which one, from 1, where a file holds several")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="outputs/imported/NAME without it")
    parser.add_argument("--model", metavar="NAME", help="what the model is called in runs to compare with")
    parser.add_argument("--label", metavar="NAME", help="what its way of speculating is called beside other runs")
    parser.add_argument("--data", metavar="NAME", help="what was asked")
    parser.add_argument("--tensor-parallel-size", type=int, metavar="N", help="devices, for throughput per device")
    arguments = parser.parse_args(argv)
    from specbench.reports.exchange.imports import Stated, import_result

    output = arguments.output or Path("outputs", "imported", arguments.source.resolve().stem)
    stated = Stated(arguments.model, arguments.label, arguments.data, arguments.tensor_parallel_size)
    command = shlex.join(["specbench", "import", *argv])
    directory = import_result(arguments.source, output, arguments.result, stated, command)
    print(directory.path)
    return 0


def _export_command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("specbench export", description="A run in the format of another tool.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--format", choices=("vllm", "speculation_profile"), required=True)
    parser.add_argument("-o", "--output", type=Path, help="a file; the terminal without it")
    arguments = parser.parse_args(argv)
    from specbench.reports.exchange.exports import export_text

    _hand_over(export_text(arguments.directory, arguments.format), arguments.output)
    return 0


def _score_command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("specbench score", description="Score a run again, without running it again.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("override", metavar="eval.scorer=NAME")
    arguments = parser.parse_args(argv)
    key, equals, scorer = arguments.override.partition("=")
    if key != "eval.scorer" or not equals:
        raise UserError(f"{arguments.override}: only the scorer can change after a run; say eval.scorer=NAME")
    from specbench import benchmark

    return benchmark.score_again(arguments.directory, scorer).exit_code


def _resume_command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("specbench resume", description="Go on with a run that was interrupted.")
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args(argv)
    from specbench import benchmark

    return benchmark.resume(arguments.directory).exit_code


def _doctor_command(argv: list[str]) -> int:
    argparse.ArgumentParser("specbench doctor", description="What this machine can run, and why not.").parse_args(argv)
    from specbench import doctor

    return doctor.run()


#: Name -> what runs it.
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "list": _list_command,
    "report": _report_command,
    "compare": _compare_command,
    "import": _import_command,
    "export": _export_command,
    "score": _score_command,
    "resume": _resume_command,
    "doctor": _doctor_command,
}
