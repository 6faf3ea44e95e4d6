"""Ranks that something else has started, and who gets which device."""

from __future__ import annotations

import pytest

from specbench.engine.execution.rank_processes import Launched, find_launched, rank_device
from specbench.engine.execution.step_message import STEP, StepMessage
from specbench.engine.scheduling.step import DECODE, NewBlocks, SchedulerOutput
from specbench.errors import UserError

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_torchruns_variables_are_read() -> None:
    assert Launched.find({}) is None
    assert Launched.find({"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert Launched.find(TORCHRUN) == Launched(rank=3, size=4, local_rank=1, host="127.0.0.1", port=29500)
    with pytest.raises(UserError, match="WORLD_SIZE is set and MASTER_PORT is not"):
        Launched.find({name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"})
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"):
        with pytest.raises(UserError, match=f"{name}: must be a whole number, not 'two'"):
            Launched.find(TORCHRUN | {name: "two"})


def test_ranks_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert find_launched("auto", 2) is None
    with pytest.raises(
        UserError, match=r"parallel\.start: torchrun starts 2 processes, and this one was started alone"
    ):
        find_launched("torchrun", 2)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert find_launched("spawn", 2) is None
    with pytest.raises(UserError, match=r"parallel\.tensor_parallel_size: 2, and 4 ranks were started"):
        find_launched("auto", 2)


def test_ranks_take_gpus_in_a_row() -> None:
    assert [rank_device("cpu", 1), rank_device("cuda", 1), rank_device("cuda:2", 1)] == ["cpu", "cuda:1", "cuda:3"]


def test_ranks_share_gpus_where_they_are_told_to() -> None:
    assert [rank_device("cuda:1", rank, 2) for rank in range(4)] == ["cuda:1", "cuda:1", "cuda:2", "cuda:2"]


def test_a_step_of_decoding_is_the_buffer_alone_and_reads_back() -> None:
    output = SchedulerOutput(
        7,
        new_blocks=[NewBlocks(1, 0, 3, [9, 8]), NewBlocks(0, 2, 0, [5])],
        finished_rows=[1],
        rows=[0, 2],
        modes=[DECODE, DECODE],
        num_tokens=[4, 1],
        max_seq_lens=[20, 9],
    )
    message = StepMessage(max_num_seqs=3)
    size = len(message.buffer_np)
    assert message.pack(output) == b"" and message.command == STEP
    assert message.unpack(b"") == output
    output.new_blocks = [NewBlocks(0, 0, 0, list(range(100)))]
    output.finished_rows = [0, 1, 2, 0]
    following = message.pack(output)
    assert message.num_following_bytes == len(following) > 0 and len(message.buffer_np) == size
    assert message.unpack(following) == output
