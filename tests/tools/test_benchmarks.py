"""Each benchmark of the processor's work runs, at its smallest: such figures mean nothing, so no goal is judged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny_decoders import build_tiny_decoder

FOLDER = Path(__file__).parents[2] / "tools" / "benchmarks"
#: The smallest run of each, and how many rows its tables then have.
SMALLEST = {
    "engine_overhead.py": ("--repeats 1", 4),
    "report_scale.py": ("--steps 1e3,2e3", 4),
    "scheduler_step.py": ("--rounds 1", 4),
    "sampling_cost.py": ("--device cpu --vocab 2000 --rounds 1", 24),
}
#: A server and real weights.
NEED_MORE = {"decode_speed.py"}
#: Imported by others.
PARTS = {"bare_loop.py"}


def test_every_benchmark_is_run_here_or_needs_more():
    assert {path.name for path in FOLDER.glob("*.py")} == SMALLEST.keys() | NEED_MORE | PARTS


@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs(name):
    arguments, num_rows = SMALLEST[name]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parents[1]), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, FOLDER / name, *arguments.split()], capture_output=True, text=True, env=environment
    )
    assert ran.returncode in (0, 1) and "Traceback" not in ran.stderr, ran.stderr
    rows = [line for line in ran.stdout.splitlines() if len(re.findall(r"(?<=\s)[\d.,]+%?(?=\s|$)", line)) >= 2]
    assert len(rows) >= num_rows, ran.stdout


def test_peers_of_the_decoding_benchmark_emit_the_same_number_of_tokens(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import decode_speed

    folder = build_tiny_decoder(tmp_path, "llama")
    engine = decode_speed.EnginePeer(folder, "float32", 2)
    bare = decode_speed.BareLoop(engine.engine, 2, decode_speed.NUM_PROMPT, decode_speed.NUM_OUTPUT)
    prompts = decode_speed.make_prompts(2, engine.engine.model_config.vocab_size, seed=0)
    counts = [peer(prompts)[0] for peer in (engine, bare.run, decode_speed.TransformersPeer(folder, "float32"))]
    assert counts == [2 * decode_speed.NUM_OUTPUT] * 3
