"""Measures what acceptance is known of the packaged model, for `specbench/reports/known_acceptance.py`.

    python -m tools.nano.known_counts                 # prints the lines to put there, a quarter of an hour on two cores
    python -m tools.nano.known_counts --most 2 --samples 20

One greedy run for each number of drafts, over all packaged problems and over all packaged listening questions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.nano.listening import NUM_HELD_OUT_ITEMS
from tools.nano.problems import NUM_HELD_OUT_PROBLEMS

SAMPLES = {"gsm8k": NUM_HELD_OUT_PROBLEMS, "mmau": NUM_HELD_OUT_ITEMS}
NAMES = {"gsm8k": "_reading", "mmau": "_hearing"}


def run(eval_name: str, k: int, samples: int) -> tuple[dict, dict]:
    """metrics.json and run.json of one run of the command line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-c", "from specbench.cli import main; main()", "+model=inkling_nano", f"spec=mtp{k}",
            f"eval={eval_name}", f"eval.num_samples={samples}", f"output_root={folder}",
            "report.output_check_requests=0",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (made,) = Path(folder).glob("**/metrics.json")
        return tuple(json.loads((made.parent / name).read_text()) for name in ("metrics.json", "run.json"))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--evals", nargs="+", default=list(SAMPLES), choices=list(SAMPLES))
    parser.add_argument("--least", type=int, default=1, help="drafts of the first run")
    parser.add_argument("--most", type=int, default=8, help="drafts of the last run")
    parser.add_argument("--samples", type=int, help="fewer samples, for a trial")
    args = parser.parse_args()
    for name in args.evals:
        for k in range(args.least, args.most + 1):
            metrics, record = run(name, k, args.samples or SAMPLES[name])
            acceptance = metrics["acceptance"]
            counts = ", ".join(f"{count:_}" for count in [acceptance["drafts"], *acceptance["accepted_at_position"]])
            evaluated = metrics["eval"]
            print(f"    {NAMES[name]}({counts}),  # {evaluated['correct']}/{evaluated['total']} right", flush=True)
        print(f"# checkpoint {record['model']['sha256']}, data {record['data']['sha256']}", flush=True)


if __name__ == "__main__":
    main()
