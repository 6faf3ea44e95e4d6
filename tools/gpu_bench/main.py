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

from .cases import DECODE_SHAPES, ON_GPU, EngineShelf, Settings
from .ceilings import measure_ceilings
from .engine_fields import engine_fields
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
    parser.add_argument("--engine", nargs="*", default=[], metavar="FIELD=VALUE", help="the engine's own settings")
    parser.add_argument("--profile", metavar="SHAPE[:PROPOSER:K]", help="profile steps of this shape and stop")
    parser.add_argument("--json", type=Path, help="write the verdicts there, too")
    return parser.parse_args(arguments)


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
    short, long = (8, 16) if options.small else options.outputs
    if not 0 < short < long:
        raise UserError(f"--outputs {short} {long}: the second number must be above the first, and that above 0")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: there is no folder {options.json.parent}")
    (num_runs, *_), runs_of = split_by_section(options.runs, (3,))
    batch_sizes, batches_of = split_by_section(["1,2"] if options.small else options.batches, (1, 16, 64))
    with tempfile.TemporaryDirectory() as scratch:
        settings = Settings(
            device=device,
            num_prompt=24 if options.small else 1024,
            num_outputs=(short, long),
            num_runs=num_runs,
            batch_sizes=batch_sizes,
            scratch=Path(scratch),
            is_small=options.small,
            shapes=tuple(options.shapes),
            engine=engine_fields(options.engine, device, ON_GPU if device.type == "cuda" else {}),
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
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: must be cuda, cuda:N or cpu") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: torch sees no GPU; say --small --device cpu for a trial without one")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: torch sees {torch.cuda.device_count()} GPUs")
    return device


def conclude(verdicts: list[Verdict], file: Path | None, *, is_trial: bool = False) -> int:
    """Print goals with met or missed; 1 when one is missed or not measured, or in a trial, whose figures mean nothing,
    when a section failed."""
    print("\n== goals" + (" (a trial: figures mean nothing; it fails where a section does)" if is_trial else ""))
    for verdict in verdicts:
        print(verdict.line())
    if file is not None:
        rows = [
            {"goal": v.goal, "measured": v.measured, "bound": v.bound, "is_least": v.is_least, "is_met": v.is_met}
            for v in verdicts
        ]
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    num_met, num_unknown = sum(v.is_met for v in verdicts), sum(v.measured is None for v in verdicts)
    unknown = f", {num_unknown} not measured" if num_unknown else ""
    print(f"{num_met} met, {len(verdicts) - num_met - num_unknown} missed{unknown}")
    return 1 if any(v.is_failure if is_trial else not v.is_met for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
