"""A rank that dies or hangs while the other one's kernels wait for it on a GPU; ranks that torchrun has started. Where
there is one GPU they share it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from specbench.run_directory import RunDirectory
from tests.engine.harness import make_engine, outputs, token_request
from tests.engine.tiny_inkling import build_tiny_inkling
from tests.test_rank_failures import PROMPTS, Run, check_failed, ended, num_finished, run_directory, wait_for

__all__ = ["ended"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
#: Enough for a GPU to be busy while a rank is ended.
NUM_REPEATS, NUM_TOKENS = 400, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    build_tiny_inkling(folder / "model", num_modules=3)
    rows = [{"prompt_token_ids": ids} for _ in range(NUM_REPEATS) for ids in PROMPTS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(folder: Path, output: str, *more: str) -> list[str]:
    return [
        "model=hf",
        f"model.checkpoint={folder / 'model'}",
        "model.max_model_len=128",
        "spec=mtp3",
        "report.output_check_requests=0",
        "load.warmup=1",
        "eval=prompts",
        "eval.data=prompts.jsonl",
        f"eval.max_output_tokens={NUM_TOKENS}",
        "sampling.ignore_eos=true",
        "load.concurrency=2",
        "engine.max_num_seqs=2",
        "parallel=tp2",
        f"parallel.ranks_per_gpu={1 if torch.cuda.device_count() > 1 else 2}",
        f"output_root={folder / output}",
        *more,
    ]


def test_ranks_that_torchrun_started(folder: Path) -> None:
    """The first to run: it compiles what the others need, for whom a step may take a few seconds."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "specbench.cli"]
    start_s = time.monotonic()
    done = subprocess.run(
        [*launcher, *arguments(folder, "torchrun", "eval.num_samples=8", "parallel.start=torchrun")],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start_s < 120
    directory = run_directory(folder, "torchrun")
    assert directory is not None
    log = RunDirectory.open(directory).read_event_log()
    alone = make_engine(folder / "model", device="cuda", attention_backend="triton")
    texts = outputs(alone, [token_request(str(i), ids, NUM_TOKENS) for i, ids in enumerate(PROMPTS)])
    said = {tuple(sample.prompt_token_ids or ()): list(sample.output_token_ids) for sample in log.samples}
    assert said == {tuple(ids): texts[str(i)] for i, ids in enumerate(PROMPTS)}


@pytest.mark.parametrize("sums", ["one_shot", "nccl"])
@pytest.mark.parametrize(
    ("sent", "timeout_s", "reason"),
    [(signal.SIGKILL, 60, "SIGKILL"), (signal.SIGSTOP, 8, "no answer within 8 s from rank 1")],
    ids=["killed", "stopped"],
)
def test_the_other_rank_waits_no_longer(
    folder: Path, sums: str, sent: signal.Signals, timeout_s: int, reason: str
) -> None:
    output = f"{sums} {sent.name}"
    run = Run(folder, *arguments(folder, output, f"parallel.all_reduce={sums}", f"parallel.timeout_s={timeout_s}"))
    pid = run.wait_for_rank()
    wait_for(lambda: [True] * (num_finished(folder, output) >= 3), run.process)
    os.kill(pid, sent)
    directory = check_failed(folder, output, run, [pid], reason)
    assert 3 <= len(RunDirectory.open(directory).read_journal().requests) < len(PROMPTS) * NUM_REPEATS
