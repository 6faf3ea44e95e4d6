"""Writes the model card from what training and evaluation measured.

    python -m tools.nano.card specbench/assets/inkling_nano

Reads `measured/training.json` (train.py --record), `measured/evaluation.json` (evaluate.py --out) and, for the
off-distribution note, `measured/gsm8k.json` (evaluate.py on GSM8K's test rows).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tools.nano.data import GSM8K_SHARE
from tools.nano.evaluate import FAULTS
from tools.nano.problems import NUM_HELD_OUT_PROBLEMS
from tools.nano.stories import PLOT_WEIGHTS

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
    return (
        f"| {FAULTS[name]} | {row['values'][0]:.3f} ({row['differences'][0]:+.3f}, {row['errors'][0]:.3f}) "
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


def card() -> str:
    """The model card's text."""
    training, result = read("training.json"), read("evaluation.json")
    right, errors = result["right"]["values"], result["right"]["errors"]
    tokens = training["slots"] * training["row_fill"]
    return TEMPLATE.read_text(encoding="utf-8").format(
        millions=training["parameters"] / 1e6, problems=training["num_problems"], gsm8k=training["num_gsm8k_rows"],
        gsm8k_share=GSM8K_SHARE, steps=training["steps"], rows=training["rows_per_step"],
        slots=training["slots"] / 1e6, tokens=tokens / 1e6, epochs=tokens / training["epoch_tokens"],
        training=training["training_seconds"], rate=training["slots"] / training["training_seconds"] / 1e6,
        setup=training["setup_seconds"], data=training["data_seconds"], hardware=training["hardware"],
        num_problems=result["num_problems"], prompt=result["mean_prompt_tokens"], answer=result["mean_answer_tokens"],
        accuracy=100 * result["accuracy"], accuracy_error=100 * result["accuracy_error"],
        mtp1=100 * result["mtp1"]["values"][1], mtp1_length=result["mtp1"]["values"][0],
        mtp1_error=result["mtp1"]["errors"][0], length=right[0], length_error=errors[0], rounds=result["num_rounds"],
        profile=cells(right[1:]), profile_errors=cells(errors[1:]),
        faults="\n".join(fault_line(name, row) for name, row in result["faults"].items()),
        num_plots=len(PLOT_WEIGHTS), num_test=NUM_HELD_OUT_PROBLEMS, gsm8k_note=gsm8k_note(),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the model card.")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    (args.folder / "README.md").write_text(card(), encoding="utf-8")


if __name__ == "__main__":
    main()
