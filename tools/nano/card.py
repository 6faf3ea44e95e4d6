"""Writes the model card from what training and evaluation measured.

    python -m tools.nano.card specbench/assets/inkling_nano

Reads, in `measured/`, `training_STAGE.json` of each stage (train.py --record), `evaluation.json` and `listening.json`
(evaluate.py --out) and, for the off-distribution note, `gsm8k.json` (evaluate.py on GSM8K's test rows).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

from tools.nano.data import AUDIO_FIRST_SHARE, GSM8K_SHARE
from tools.nano.evaluate import AUDIO_FAULTS, FAULTS
from tools.nano.listening import NUM_HELD_OUT_ITEMS
from tools.nano.problems import NUM_HELD_OUT_PROBLEMS
from tools.nano.stories import PLOT_WEIGHTS

STAGES = ("reading", "hearing", "both")
MEASURED = Path(__file__).parent / "measured"
TEMPLATE = Path(__file__).parent / "card_template.md"


def read(name: str) -> dict:
    """One measured file."""
    return json.loads((MEASURED / name).read_text(encoding="utf-8"))


def cells(values: list[float], digits: int = 1) -> str:
    """Fractions as per cent, as table cells."""
    return " | ".join(f"{100 * value:.{digits}f}" for value in values)


def fault_line(name: str, row: dict) -> str:
    """One row of the fault table."""
    positions = " ".join(f"{100 * value:.0f}" for value in row["values"][1:])
    largest = max(range(1, len(row["z_scores"])), key=lambda index: abs(row["z_scores"][index]))
    said = (FAULTS | AUDIO_FAULTS)[name]
    return (
        f"| {said} | {row['values'][0]:.3f} ({row['differences'][0]:+.3f}, {row['errors'][0]:.3f}) "
        f"| {row['z_scores'][0]:+.1f} | {positions} | {row['z_scores'][largest]:+.1f} at {largest - 1} |"
    )


def gsm8k_note() -> str:
    """How it does on real questions, where measured."""
    if not (MEASURED / "gsm8k.json").exists():
        return ""
    result = read("gsm8k.json")
    values, num_right = result["right"]["values"], sum(result["marks"])
    return (
        f"- On {result['num_problems']} real GSM8K test questions: {num_right} "
        f"right, acceptance length {values[0]:.2f}, position 0 {100 * values[1]:.0f} %.\n"
    )


def stage(name: str) -> SimpleNamespace:
    """One training record, with what follows from it."""
    record = read(f"training_{name}.json")
    tokens = record["slots"] * record["row_fill"]
    return SimpleNamespace(**record, tokens_m=tokens / 1e6, epochs=tokens / record["epoch_tokens"])


def stage_table(stages: list[SimpleNamespace]) -> str:
    """What the stages differ in, one column each."""
    rows = {
        "problems": "{0.num_problems:,}",
        "listening questions": "{0.num_items:,}",
        "steps": "{0.steps:,} of {0.rows_per_step} rows of 512 slots",
        "tokens": "{0.tokens_m:.0f} M",
        "passes over the data": "{0.epochs:.2f}",
        "rates of Muon and AdamW": "{0.muon_rate:g}, {0.adam_rate:g}",
        "training, seconds": "{0.training_seconds:.0f}",
        "compiling before, seconds": "{0.setup_seconds:.0f}",
        "hardware": "one {0.hardware}",
    }
    return "\n".join(f"| {name} | {' | '.join(form.format(one) for one in stages)} |" for name, form in rows.items())


def stage_commands(stages: dict[str, SimpleNamespace]) -> str:
    """How each stage is run; the last one writes the packaged folder."""
    lines, before = [], None
    for name, one in stages.items():
        out = name if name != list(stages)[-1] else "specbench/assets/inkling_nano"
        init = f" --init {before}" if before else ""
        lines.append(
            f"    python -m tools.nano.train{init} --out {out} --gsm8k GSM8K_TRAIN.jsonl \\\n"
            f"        --problems {one.num_problems} --items {one.num_items} --steps {one.steps} "
            f"--muon-rate {one.muon_rate:g} --adam-rate {one.adam_rate:g} \\\n"
            f"        --record tools/nano/measured/training_{name}.json"
        )
        before = name
    return "\n".join(lines)


def shares(groups: dict[str, list[int]]) -> str:
    """Right of all, by group."""
    return ", ".join(f"{name} {right}/{count}" for name, (right, count) in sorted(groups.items()))


def fault_lines(result: dict) -> str:
    return "\n".join(fault_line(name, row) for name, row in result["faults"].items())


def heard_fields() -> dict[str, object]:
    """What the template tells about listening questions."""
    result = read("listening.json")
    right, errors = result["right"]["values"], result["right"]["errors"]
    return {
        "heard_problems": result["num_problems"], "heard_prompt": result["mean_prompt_tokens"],
        "heard_answer": result["mean_answer_tokens"], "heard_frames": result["mean_frames"],
        "heard_accuracy": 100 * result["accuracy"], "heard_error": 100 * result["accuracy_error"],
        "always_first": 100 * result["always_first"], "by_task": shares(result["by"]["task"]),
        "by_difficulty": shares(result["by"]["difficulty"]), "heard_mtp1": 100 * result["mtp1"]["values"][1],
        "heard_length": right[0], "heard_length_error": errors[0], "heard_rounds": result["num_rounds"],
        "heard_profile": cells(right[1:]), "heard_profile_errors": cells(errors[1:]),
        "heard_faults": fault_lines(result), "num_clips": NUM_HELD_OUT_ITEMS,
    }  # fmt: skip


def card() -> str:
    """The model card's text."""
    stages, result = {name: stage(name) for name in STAGES}, read("evaluation.json")
    last = stages[STAGES[-1]]
    right, errors = result["right"]["values"], result["right"]["errors"]
    return TEMPLATE.read_text(encoding="utf-8").format(
        stages=stage_table(list(stages.values())), commands=stage_commands(stages), millions=last.parameters / 1e6,
        gsm8k_share=GSM8K_SHARE, gsm8k=last.num_gsm8k_rows, audio_first=AUDIO_FIRST_SHARE, **heard_fields(),
        num_problems=result["num_problems"], prompt=result["mean_prompt_tokens"], answer=result["mean_answer_tokens"],
        accuracy=100 * result["accuracy"], accuracy_error=100 * result["accuracy_error"],
        mtp1=100 * result["mtp1"]["values"][1], mtp1_length=result["mtp1"]["values"][0],
        mtp1_error=result["mtp1"]["errors"][0], length=right[0], length_error=errors[0], rounds=result["num_rounds"],
        profile=cells(right[1:]), profile_errors=cells(errors[1:]), faults=fault_lines(result),
        num_plots=len(PLOT_WEIGHTS), num_test=NUM_HELD_OUT_PROBLEMS, gsm8k_note=gsm8k_note(),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the model card.")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    (args.folder / "README.md").write_text(card(), encoding="utf-8")


if __name__ == "__main__":
    main()
