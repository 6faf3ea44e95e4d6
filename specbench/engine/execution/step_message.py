"""A step's work as the ranks get it: one buffer of fixed layout, the same for every step.

Belongs here: the layout, both ways. Does not belong here: how it travels (rank_groups.py), what is scheduled.

A step of decoding is the buffer alone. What a step may have any amount of (prompts of admitted requests, many blocks at
once, audio) follows it in a second message, whose size the buffer says.

That one is pickled: sampling parameters have lists of any length, and a prompt of 1,024 tokens takes 20 µs to pack and
25 to unpack, of the many milliseconds that its step takes.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np

from specbench.engine.scheduling.step import NewBlocks, SchedulerOutput

#: What a rank is told to do.
STEP, REPLAY, CLOSE = range(3)
#: Command, bytes that follow, step, requests, rows left, entries of new blocks, their ids.
_NUM_HEADERS = 7
#: New blocks of a request that have a place in the buffer, all groups together.
_MAX_BLOCKS = 8


class StepMessage:
    """The buffer. `pack` fills it and returns what follows; `unpack` reads it."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_requests = max_num_seqs
        self._max_entries = _MAX_BLOCKS * max_num_seqs
        sizes = (_NUM_HEADERS, *(max_num_seqs,) * 5, *(self._max_entries,) * 5)
        # int64: headers; rows, modes, tokens, bounds of sequence lengths, rows left; of each entry of new blocks group,
        # row, start and count; block ids
        self.buffer_np = np.zeros(sum(sizes), dtype=np.int64)
        (
            self._header,
            self._rows,
            self._modes,
            self._num_tokens,
            self._max_seq_lens,
            self._finished_rows,
            *self._entries,
            self._block_ids,
        ) = np.split(self.buffer_np, np.cumsum(sizes)[:-1])

    @property
    def command(self) -> int:
        return int(self._header[0])

    @property
    def num_following_bytes(self) -> int:
        return int(self._header[1])

    def pack_command(self, command: int, content: Any = None) -> bytes:
        """A command other than a step; returns what follows."""
        following = b"" if content is None else pickle.dumps(content)
        self._header[:2] = command, len(following)
        return following

    def pack(self, output: SchedulerOutput) -> bytes:
        """Fill the buffer; returns what follows it, most often nothing."""
        more: dict[str, Any] = {}
        if output.new_requests:
            more["new_requests"] = output.new_requests
        if output.content:
            more["content"] = output.content
        columns = (self._rows, self._modes, self._num_tokens, self._max_seq_lens)
        for column, values in zip(
            columns, (output.rows, output.modes, output.num_tokens, output.max_seq_lens), strict=True
        ):
            column[: len(values)] = values
        finished_rows, blocks = output.finished_rows, output.new_blocks
        if len(finished_rows) > self._max_requests:
            finished_rows, more["finished_rows"] = [], finished_rows
        num_ids = sum(len(block.block_ids) for block in blocks)
        if max(len(blocks), num_ids) > self._max_entries:
            blocks, num_ids, more["new_blocks"] = [], 0, blocks
        self._finished_rows[: len(finished_rows)] = finished_rows
        self._pack_blocks(blocks, num_ids)
        following = pickle.dumps(more) if more else b""
        self._header[:] = (
            STEP,
            len(following),
            output.step,
            len(output.rows),
            len(finished_rows),
            len(blocks),
            num_ids,
        )
        return following

    def _pack_blocks(self, blocks: list[NewBlocks], num_ids: int) -> None:
        for index, block in enumerate(blocks):
            fields = (block.group, block.row, block.start, len(block.block_ids))
            for column, value in zip(self._entries, fields, strict=True):
                column[index] = value
        self._block_ids[:num_ids] = [block_id for block in blocks for block_id in block.block_ids]

    def unpack_content(self, following: bytes) -> Any:
        """What `pack_command` was given."""
        return pickle.loads(following)

    def unpack(self, following: bytes) -> SchedulerOutput:
        """The step, as a runner needs it: without the requests' names."""
        _, _, step, num_requests, num_finished, num_entries, _ = self._header.tolist()
        output = SchedulerOutput(
            step,
            new_blocks=list(self._unpack_blocks(num_entries)),
            finished_rows=self._finished_rows[:num_finished].tolist(),
            rows=self._rows[:num_requests].tolist(),
            modes=self._modes[:num_requests].tolist(),
            num_tokens=self._num_tokens[:num_requests].tolist(),
            max_seq_lens=self._max_seq_lens[:num_requests].tolist(),
        )
        for name, value in (pickle.loads(following) if following else {}).items():
            setattr(output, name, value)
        return output

    def _unpack_blocks(self, num_entries: int) -> Iterator[NewBlocks]:
        entries = zip(*(column[:num_entries].tolist() for column in self._entries), strict=True)
        begin = 0
        for group, row, start, count in entries:
            yield NewBlocks(group, row, start, self._block_ids[begin : begin + count].tolist())
            begin += count
