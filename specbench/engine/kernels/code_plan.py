"""How a product with a weight in codes is cut up: outputs and rows of a program, parts of the inputs.

A program converts a block of codes once for all rows that it has, so there are few tiles of rows; and programs run in
waves of as many as there is room for, so parts of the inputs are those that fill the last wave.

Belongs here: what products of FP8 and of NVFP4 codes share. Does not belong here: either's kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Inputs of a block: of FP8 codes, those that share a scale.
BLOCK_K = 128
#: Outputs of a program are a multiple of it.
TILE_OUTPUTS = 64
#: Of more rows it is faster to write the weight in plain numbers and to read those: it takes as long as two tiles.
MAX_ROWS = 320
_MOST_ROWS_OF_TILE = 160
#: The same of x in fp32, more of which take more room than there is.
_MAX_WIDE_ROWS = 64
#: Of an H200.
_MULTIPROCESSORS = 132
#: What a program costs beside its blocks, in blocks: until the first one is there, and to write its sums.
_BLOCKS_OF_START = 4
#: Bytes of sums that their readers take in a microsecond.
_SUM_BYTES = 3e6


def padded_outputs(num_outputs: int) -> int:
    """Whole tiles."""
    return -(-num_outputs // TILE_OUTPUTS) * TILE_OUTPUTS


@dataclass(frozen=True, slots=True)
class CodePlan:
    """The rows of a program are block_rows and more_rows: powers of two, their sum need not be."""

    block_outputs: int
    block_rows: int
    more_rows: int
    num_splits: int
    num_warps: int
    num_stages: int

    def grid(self, num_rows: int, num_outputs: int) -> tuple[int, int, int]:
        """Programs: tiles of outputs, parts of the inputs, tiles of rows."""
        num_tiles = padded_outputs(num_outputs) // self.block_outputs
        return num_tiles, self.num_splits, -(-num_rows // (self.block_rows + self.more_rows))


@dataclass(frozen=True, slots=True)
class _Tile:
    """A form of program, measured on an H200."""

    plan: CodePlan
    #: Programs that one multiprocessor has room for.
    room: int
    #: Microseconds of a block of every program, while all of them run.
    block_time: float


def plan_product(
    bits: int, num_rows: int, num_outputs: int, num_inputs: int, most: int | None = None, *, is_wide: bool = False
) -> CodePlan | None:
    """For codes of so many bits and x [num_rows, num_inputs], of fp32 if is_wide, in at most so many splits. None where
    the weight is better converted before."""
    if num_rows > (_MAX_WIDE_ROWS if is_wide else MAX_ROWS):
        return None
    num_blocks = num_inputs // BLOCK_K
    most = min(num_blocks, 16 if most is None else most)
    tiles = _tiles(bits, num_rows, num_outputs)
    _, index, splits = min(
        (_microseconds(tile, splits, num_rows, num_outputs, num_blocks), index, splits)
        for index, tile in enumerate(tiles)
        for splits in range(1, most + 1)
    )
    return replace(tiles[index].plan, num_splits=splits)


def _microseconds(tile: _Tile, splits: int, num_rows: int, num_outputs: int, num_blocks: int) -> float:
    """What a product and reading it takes."""
    outputs, _, rows = tile.plan.grid(num_rows, num_outputs)
    waves = -(-outputs * rows * splits // (tile.room * _MULTIPROCESSORS))
    read = (2 if splits == 1 else 4 * splits) * num_rows * num_outputs / _SUM_BYTES
    return waves * (-(-num_blocks // splits) + _BLOCKS_OF_START) * tile.block_time + read


def _tiles(bits: int, num_rows: int, num_outputs: int) -> list[_Tile]:
    """Those to choose from."""
    if num_rows <= 16 and bits == 4:
        # Conversion takes longer than the codes need to arrive, so that more programs are better than deep ones.
        return [_Tile(CodePlan(64, 16, 0, 1, num_warps=4, num_stages=4), 6, 1.5)]
    if num_rows <= 32:
        block_rows, num_stages = (16, 6) if num_rows <= 16 else (32, 4)
        return [_Tile(CodePlan(64, block_rows, 0, 1, num_warps=4, num_stages=num_stages), 3, 0.8)]
    is_pair = padded_outputs(num_outputs) % 128 == 0
    if num_rows <= 64:
        narrow = _Tile(CodePlan(64, 64, 0, 1, num_warps=4, num_stages=3), 3, 1.0)
        wide = _Tile(CodePlan(128, 64, 0, 1, num_warps=8, num_stages=3), 2, 1.12)
        return [narrow, wide] if is_pair else [narrow]
    block_rows, more_rows = _rows_of_tile(num_rows)
    outputs = 128 if is_pair else 64
    return [_Tile(CodePlan(outputs, block_rows, more_rows, 1, num_warps=outputs // 16, num_stages=3), 1, 1.33)]


def _rows_of_tile(num_rows: int) -> tuple[int, int]:
    """Two powers of two, the smaller one 0 where one holds as many, for more than 64 rows in equal tiles."""
    rows = -(-num_rows // -(-num_rows // _MOST_ROWS_OF_TILE))
    block_rows = 64 if rows <= 96 else 128
    rest = rows - block_rows
    return block_rows, 0 if rest <= 0 else 16 if rest <= 16 else 32
