"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

import torch

from specbench.errors import UserError

from .cases import DECODE_SHAPES, EngineShelf, Settings
from .ceilings import measure_ceilings
from .goals import Verdict
from .peers import PEERS
from .profile import profile_steps
from .sections import SECTIONS, Bench, run_peers, run_sections


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/bench_gpu.py", description=__doc__)
    parser.add_argument(
        "--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS), help="sections to run; none: peers alone"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes and texts: a trial without a GPU")
    parser.add_argument(
        "--runs",
        nargs="+",
        default=["3"],
        metavar="[SECTION=]N",
        help="of which the median counts",
    )
    parser.add_argument("--outputs", type=int, nargs=2, default=(128, 256), metavar=("SHORT", "LONG"))
    parser.add_argument(
        "--batches",
        nargs="+",
        default=["1,16,64"],
        metavar="[SECTION=]N,N",
        help="batch sizes",
    )
    parser.add_argument("--shapes", nargs="+", choices=DECODE_SHAPES, default=DECODE_SHAPES, help="of section decode")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=[], help="others to run beside ours")
    parser.add_argument("--engine", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of EngineConfig")
    parser.add_argument("--profile", metavar="SHAPE[:PROPOSER:K]", help="profile steps of this shape and stop")
    parser.add_argument("--json", type=Path, help="write the verdicts there, too")
    return parser.parse_args(arguments)


def engine_fields(texts: list[str]) -> dict[str, object]:
    """FIELD=VALUE, a value as JSON where it is that, else as text."""
    fields: dict[str, object] = {}
    for text in texts:
        key, _, value = text.partition("=")
        try:
            fields[key] = json.loads(value)
        except ValueError:
            fields[key] = value
    return fields


def split_by_section(texts: list[str], default: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Numbers for all sections, and those of single ones: 3 decode=5, or 1,16,64 verify=1,16."""
    of_section: dict[str, tuple[int, ...]] = {}
    for text in texts:
        section, equals, numbers = text.rpartition("=")
        if equals and section not in SECTIONS:
            raise UserError(f"{text}: no section {section!r}; there are {', '.join(SECTIONS)}")
        if not all(number.isdigit() and int(number) > 0 for number in numbers.split(",")):
            raise UserError(f"{text}: must be numbers such as 3 or 1,16, or SECTION=3")
        counts = tuple(int(number) for number in numbers.split(","))
        if equals:
            of_section[section] = counts
        else:
            default = counts
    return default, of_section


def main(arguments: list[str] | None = None) -> int:
    # Whoever ends it by a signal gets the figures so far, as by Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(parse(arguments))
    except UserError as error:
        print(f"bench_gpu: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    device = open_device(options.device)
    (num_runs, *_), runs_of = split_by_section(options.runs, (3,))
    batch_sizes, batches_of = split_by_section(["1,2"] if options.small else options.batches, (1, 16, 64))
    with tempfile.TemporaryDirectory() as scratch:
        settings = Settings(
            device=device,
            num_prompt=24 if options.small else 1024,
            num_outputs=(8, 16) if options.small else tuple(options.outputs),
            num_runs=num_runs,
            batch_sizes=batch_sizes,
            scratch=Path(scratch),
            is_small=options.small,
            shapes=tuple(options.shapes),
            engine=engine_fields(options.engine),
        )
        ceilings = measure_ceilings(device, options.small)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(
            f"{name}: copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, bf16 product "
            f"{ceilings.operations_per_s / 1e12:.0f} TFLOP/s; torch {torch.__version__}",
            flush=True,
        )
        bench = Bench(settings, ceilings, EngineShelf())
        if options.profile:
            profile_steps(bench, options.profile)
            return 0
        changes: dict[str, dict[str, object]] = {name: {"num_runs": counts[0]} for name, counts in runs_of.items()}
        for name, sizes in batches_of.items():
            changes.setdefault(name, {})["batch_sizes"] = sizes
        verdicts = run_sections(bench, options.only, changes)
        bench.shelf.clear()
        if options.peers:
            print("\n== peers: the same prompts, rules and clock")
            run_peers(bench, options.peers)
    return conclude(verdicts, options.json, is_trial=options.small)


def open_device(name: str) -> torch.device:
    """UserError where there is none."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: torch sees no GPU; say --small --device cpu for a trial without one")
    return device


def conclude(verdicts: list[Verdict], file: Path | None, *, is_trial: bool = False) -> int:
    """Print goals with met or missed; 1 when one is missed, or in a trial, whose figures mean nothing, when one has no
    figure."""
    print("\n== goals" + (" (a trial: figures mean nothing; it fails where there is none)" if is_trial else ""))
    for verdict in verdicts:
        print(verdict.line())
    if file is not None:
        rows = [
            {"goal": v.goal, "measured": v.measured, "bound": v.bound, "is_least": v.is_least, "is_met": v.is_met}
            for v in verdicts
        ]
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    num_missed = sum(not verdict.is_met for verdict in verdicts)
    print(f"{len(verdicts) - num_missed} met, {num_missed} missed")
    return 1 if any(v.measured is None if is_trial else not v.is_met for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
