"""A rank that dies or hangs, and Ctrl-C: the run ends soon, says why, keeps what is finished, leaves nobody behind.

Ranks are children of the run, or torchrun's.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specbench.run_directory import RunDirectory
from tests.engine.harness import engine_config, outputs, token_request
from tests.engine.tiny_inkling import build_tiny_inkling

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

NUM_REQUESTS, NUM_TOKENS = 8, 8
#: A run whose rank has gone ends within this, on a machine that does nothing else; a busy one has longer.
BOUND_S, LONG_S = 20.0, 120.0
PROMPTS = [[random.Random(index).randrange(2, 60) for _ in range(6 + 3 * index)] for index in range(NUM_REQUESTS)]

STARTED: list[subprocess.Popen] = []


#: Two ranks, and an address on the loopback device for them to meet.
TORCHRUN = ("torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", "-m")


def die_with_parent() -> None:
    """In a process that has a session of its own: whatever ends the tests ends it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Run:
    """The command line on two ranks, in a process group of its own."""

    def __init__(
        self, folder: Path, *arguments: str, launcher: tuple[str, ...] = (), more: dict[str, str] | None = None
    ) -> None:
        """more: variables of the environment."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)} | (more or {})
        environment.pop("TRITON_INTERPRET", None)  # other tests' kernels run in the interpreter, for minutes
        self.process = subprocess.Popen(
            [sys.executable, "-m", *launcher, "specbench.cli", *arguments],
            cwd=folder,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        STARTED.append(self.process)

    def rank_pids(self) -> list[int]:
        """Ranks 1 and up."""
        pid = self.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            named = [(int(child), Path(f"/proc/{child}/cmdline").read_bytes()) for child in children]
        except OSError:
            return []
        return [child for child, command in named if b"spawn_main" in command]

    def wait_for_rank(self) -> int:
        return wait_for(self.rank_pids, self.process)[0]

    def end(self) -> tuple[int, str, float]:
        """Exit code, what stands on the terminal, and how long that took."""
        start_s = time.monotonic()
        _, said = self.process.communicate(timeout=LONG_S)
        return self.process.returncode, said, time.monotonic() - start_s


class TorchRun(Run):
    """The same, the ranks being torchrun's children."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        super().__init__(folder, *arguments, launcher=TORCHRUN)

    def rank_pid(self, rank: int) -> int:
        """Of either rank, once it has started."""

        def found() -> list[int]:
            return [pid for pid, of_rank in _children_by_rank(self.process.pid) if of_rank == str(rank)]

        return wait_for(found, self.process)[0]


def _children_by_rank(pid: int) -> list[tuple[int, str]]:
    """torchrun's children, and the ranks that they have been told."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        told = [(int(child), Path(f"/proc/{child}/environ").read_bytes().split(b"\0")) for child in children]
    except OSError:
        return []
    return [
        (child, entry.removeprefix(b"RANK=").decode())
        for child, entries in told
        for entry in entries
        if entry.startswith(b"RANK=")
    ]


def wait_for(found: Callable[[], list], process: subprocess.Popen) -> list:
    end_s = time.monotonic() + 90
    while not (values := found()):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return values


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Nothing that a test has started outlives it."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    sizes = {"vocab_size": 64, "unpadded_vocab_size": 61, "num_hidden_layers": 2, "local_layer_ids": [0]}
    build_tiny_inkling(folder / "model", num_modules=0, **sizes)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in PROMPTS))
    return folder


def start(folder: Path, output: str, *more: str) -> Run:
    return Run(folder, *arguments(folder, output, *more))


def torchrun(folder: Path, output: str, *more: str) -> TorchRun:
    return TorchRun(folder, *arguments(folder, output, *more))


def arguments(folder: Path, output: str, *more: str) -> tuple[str, ...]:
    return (
        "model=hf",
        f"model.checkpoint={folder / 'model'}",
        "model.max_model_len=128",
        "spec=ngram",
        "report.output_check_requests=2",
        "load.warmup=1",
        "eval=prompts",
        "eval.data=prompts.jsonl",
        f"eval.max_output_tokens={NUM_TOKENS}",
        "sampling.ignore_eos=true",
        "load.concurrency=2",
        "parallel=tp2",
        f"output_root={folder / output}",
        *more,
    )


def run_directory(folder: Path, output: str) -> Path | None:
    return next((file.parent for file in (folder / output).rglob("run.json")), None)


def num_finished(folder: Path, output: str) -> int:
    """Requests in the journal so far."""
    directory = run_directory(folder, output)
    if directory is None or not (directory / "journal.jsonl").exists():
        return 0
    return (directory / "journal.jsonl").read_text().count('"kind":"request"')


def check_failed(folder: Path, output: str, run: Run, pids: list[int], reason: str, bound_s: float = BOUND_S) -> Path:
    code, said, seconds = run.end()
    assert (code, seconds < bound_s) == (1, True), (code, seconds, said)
    assert reason in said and "Traceback" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    directory = run_directory(folder, output)
    assert directory is not None
    record = RunDirectory.open(directory).read_run()
    assert record.status == "failed" and reason in (record.error or "")
    return directory


def check_resumed(folder: Path, directory: Path) -> None:
    """Every request once, and its text that of one rank."""
    code, said, _ = Run(folder, "resume", str(directory)).end()
    assert code == 0, said
    log = RunDirectory.open(directory).read_event_log()
    measured = [request for request in log.requests if not request.is_warmup]
    assert [request.num_output_tokens for request in measured] == [NUM_TOKENS] * NUM_REQUESTS
    from specbench.engine.llm_engine import LLMEngine

    engine = LLMEngine(engine_config(folder / "model", 0))
    alone = outputs(engine, [token_request(str(i), ids, NUM_TOKENS) for i, ids in enumerate(PROMPTS)])
    said_by_prompt = {tuple(sample.prompt_token_ids or ()): list(sample.output_token_ids) for sample in log.samples}
    assert said_by_prompt == {tuple(ids): alone[str(i)] for i, ids in enumerate(PROMPTS)}


def kill_and_resume(folder: Path, output: str, is_time: Callable[[], list], bound_s: float = BOUND_S) -> None:
    run = start(folder, output)
    pid = run.wait_for_rank()
    wait_for(is_time, run.process)
    os.kill(pid, signal.SIGKILL)
    directory = check_failed(folder, output, run, [pid], "SIGKILL", bound_s)
    check_resumed(folder, directory)


def test_a_killed_rank_ends_the_run_and_resume_completes_it(folder: Path) -> None:
    kill_and_resume(folder, "killed", lambda: [True] * (num_finished(folder, "killed") >= 3), LONG_S)


@pytest.mark.slow
@pytest.mark.parametrize("point", range(9))
def test_a_rank_killed_at_any_point(folder: Path, point: int) -> None:
    """While it starts, imports, loads and connects; in the warm-up; between and inside requests."""
    output = f"point{point}"
    if point < 4:
        due_s = time.monotonic() + (0.05, 0.4, 0.9, 1.5)[point] + 0.5
        kill_and_resume(folder, output, lambda: [True] * (time.monotonic() > due_s))
    else:
        kill_and_resume(folder, output, lambda: [True] * (num_finished(folder, output) > (point - 4) * 2))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run(folder: Path) -> None:
    run = start(folder, "hung", "parallel.timeout_s=4")
    pid = run.wait_for_rank()
    wait_for(lambda: [True] * (num_finished(folder, "hung") >= 3), run.process)
    os.kill(pid, signal.SIGSTOP)
    check_failed(folder, "hung", run, [pid], "no answer within 4 s from rank 1")


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["spawn", "torchrun"])
@pytest.mark.parametrize("num_done", [0, 2, 5, NUM_REQUESTS])
def test_a_rank_that_hangs_at_any_point(folder: Path, num_done: int, launch: str) -> None:
    """In the warm-up, between and inside requests, in the output check."""
    output = f"hung{num_done}_{launch}"
    more = ("parallel.timeout_s=4", "eval.max_output_tokens=40", "report.output_check_requests=8")
    run = start(folder, output, *more) if launch == "spawn" else torchrun(folder, output, *more)
    pid = run.rank_pid(1) if isinstance(run, TorchRun) else run.wait_for_rank()
    wait_for(lambda: [True] * (num_finished(folder, output) > num_done), run.process)
    os.kill(pid, signal.SIGSTOP)
    if isinstance(run, TorchRun):
        end_of_torchrun(folder, output, run, f"rank 1 (process {pid})")
    else:
        check_failed(folder, output, run, [pid], f"rank 1 (process {pid})")


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(folder: Path) -> None:
    run = start(folder, "interrupted")
    pid = run.wait_for_rank()
    wait_for(lambda: [True] * (num_finished(folder, "interrupted") >= 3), run.process)
    os.killpg(run.process.pid, signal.SIGINT)
    code, said, seconds = run.end()
    assert (code, seconds < BOUND_S) == (130, True), said
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_ranks_do_not_outlive_a_killed_run(folder: Path) -> None:
    run = start(folder, "orphans")
    pid = run.wait_for_rank()
    run.process.kill()
    run.process.communicate()
    end_s = time.monotonic() + BOUND_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


# ---- Ranks that torchrun has started


def end_of_torchrun(folder: Path, output: str, run: TorchRun, reason: str, bound_s: float = BOUND_S) -> Path:
    """Its exit code is torchrun's own; what the run has to say stands in run.json and on the terminal."""
    pids = [pid for pid, _ in _children_by_rank(run.process.pid)]
    code, said, seconds = run.end()
    assert (code, seconds < bound_s) == (1, True), (code, seconds, said)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    directory = run_directory(folder, output)
    assert directory is not None, said
    record = RunDirectory.open(directory).read_run()
    assert record.status == "failed" and reason in (record.error or ""), (record.error, said)
    return directory


def test_a_killed_rank_of_torchrun_is_named_and_resume_completes_the_run(folder: Path) -> None:
    run = torchrun(folder, "torchrun")
    pid = run.rank_pid(1)
    wait_for(lambda: [True] * (num_finished(folder, "torchrun") >= 3), run.process)
    os.kill(pid, signal.SIGKILL)
    directory = end_of_torchrun(folder, "torchrun", run, f"rank 1 (process {pid}) has gone", LONG_S)
    check_resumed(folder, directory)


@pytest.mark.slow
@pytest.mark.parametrize("point", range(4))
def test_a_rank_of_torchrun_killed_before_the_first_step(folder: Path, point: int) -> None:
    """While it waits for rank 0, connects, and loads."""
    output = f"torchrun{point}"
    run = torchrun(folder, output)
    pid = run.rank_pid(1)
    wait_for(lambda: [True] * (run_directory(folder, output) is not None), run.process)
    time.sleep(0.3 * point)
    os.kill(pid, signal.SIGKILL)
    end_of_torchrun(folder, output, run, f"rank 1 (process {pid}) has gone")


@pytest.mark.slow
def test_a_rank_of_torchrun_that_hangs_is_named(folder: Path) -> None:
    run = torchrun(folder, "torchrun_hung", "parallel.timeout_s=4")
    pid = run.rank_pid(1)
    wait_for(lambda: [True] * (num_finished(folder, "torchrun_hung") >= 3), run.process)
    os.kill(pid, signal.SIGSTOP)
    reason = f"no answer within 4 s from rank 1 (process {pid}) (no sign of life: rank 1 (process {pid}))"
    end_of_torchrun(folder, "torchrun_hung", run, reason)


@pytest.mark.slow
def test_ctrl_c_ends_torchrun(folder: Path) -> None:
    run = torchrun(folder, "torchrun_interrupted")
    run.rank_pid(1)
    wait_for(lambda: [True] * (num_finished(folder, "torchrun_interrupted") >= 3), run.process)
    os.killpg(run.process.pid, signal.SIGINT)
    end_of_torchrun(folder, "torchrun_interrupted", run, "interrupted, after")


@pytest.mark.slow
@pytest.mark.parametrize("who", ["rank 0", "all"])
def test_sigterm_of_ranks_started_by_hand(folder: Path, who: str) -> None:
    """As Slurm starts and ends them: an ending from outside, not a rank's failure."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        Run(folder, *arguments(folder, f"by hand {who}"), more=place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    wait_for(lambda: [True] * (num_finished(folder, f"by hand {who}") >= 3), ranks[0].process)
    for rank in ranks if who == "all" else ranks[:1]:
        rank.process.terminate()
    code, said, seconds = ranks[0].end()
    assert (code, seconds < BOUND_S) == (143, True), said
    assert "ended by SIGTERM, after" in said and "RankFailure" not in said
    other_code, _, seconds = ranks[1].end()
    assert other_code == (143 if who == "all" else 0) and seconds < BOUND_S


@pytest.mark.slow
def test_rank_0_of_torchrun_killed(folder: Path) -> None:
    """Nobody is left who could write run.json; the journal is whole, and the other rank has gone."""
    run = torchrun(folder, "torchrun_rank_0")
    pids = [run.rank_pid(0), run.rank_pid(1)]
    wait_for(lambda: [True] * (num_finished(folder, "torchrun_rank_0") >= 3), run.process)
    os.kill(pids[0], signal.SIGKILL)
    code, said, seconds = run.end()
    assert (code, seconds < BOUND_S) == (1, True), said
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    directory = run_directory(folder, "torchrun_rank_0")
    assert directory is not None
    check_resumed(folder, directory)


@pytest.mark.slow
def test_rank_0_of_torchrun_that_hangs(folder: Path) -> None:
    """The other rank leaves, and torchrun, after 30 s, kills what is stopped."""
    run = torchrun(folder, "torchrun_stopped", "parallel.timeout_s=4")
    pids = [run.rank_pid(0), run.rank_pid(1)]
    wait_for(lambda: [True] * (num_finished(folder, "torchrun_stopped") >= 3), run.process)
    os.kill(pids[0], signal.SIGSTOP)
    code, said, seconds = run.end()
    assert (code, seconds < BOUND_S + 40.0) == (1, True), (seconds, said)
    assert "rank 1: PeerLost: rank 0 hangs: no sign of life for 10 s" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


# ---- Hanging in any phase


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["spawn", "torchrun"])
def test_a_rank_that_stops_when_all_is_done_spoils_nothing(folder: Path, launch: str) -> None:
    output = f"done_{launch}"
    more = ("report.output_check_requests=0", "parallel.timeout_s=4")
    run = start(folder, output, *more) if launch == "spawn" else torchrun(folder, output, *more)
    pid = run.rank_pid(1) if isinstance(run, TorchRun) else run.wait_for_rank()
    # The warm-up is a request, too.
    wait_for(lambda: [True] * (num_finished(folder, output) > NUM_REQUESTS), run.process)
    os.kill(pid, signal.SIGSTOP)
    code, said, seconds = run.end()
    # torchrun counts the rank that had to be killed as a failure.
    assert (code, seconds < BOUND_S) == (0 if launch == "spawn" else 1, True), said
    assert not Path(f"/proc/{pid}").exists()
    directory = run_directory(folder, output)
    assert directory is not None and RunDirectory.open(directory).read_run().status == "finished"
    assert (directory / "report.md").exists()


@pytest.mark.slow
def test_sigterm_is_an_ending_like_any_other(folder: Path) -> None:
    run = start(folder, "terminated")
    pid = run.wait_for_rank()
    wait_for(lambda: [True] * (num_finished(folder, "terminated") >= 3), run.process)
    run.process.terminate()
    code, said, seconds = run.end()
    assert (code, seconds < BOUND_S) == (143, True), said
    assert "ended by SIGTERM, after" in said and not Path(f"/proc/{pid}").exists()
