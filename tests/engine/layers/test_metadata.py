"""Slots, taps and keys against their definitions, position by position; dead rows and the null block by canaries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.layers.metadata import (
    AttentionMetadata,
    DeviceLayout,
    num_table_columns,
)
from specbench.engine.layers.metadata_builder import AttentionMetadataBuilder
from tests.engine.paged_sequences import PagedSequences, load_target

BLOCK_SIZE = 4


def slot_of(sequences: PagedSequences, group: int, sequence: int, position: int) -> int:
    if position < 0:
        return position % sequences.block_size
    block = int(sequences.tables[group, sequence, 1 + position // sequences.block_size])
    return block * sequences.block_size + position % sequences.block_size


LAYOUTS = pytest.mark.parametrize(
    ("first_positions", "num_rows"),
    [
        ([0], [1]),
        ([37], [1]),
        ([0, 5, 40], [1, 1, 1]),
        ([0, 5, 40], [4, 4, 4]),
        ([3, 30, 0], [1, 5, 3]),
        ([0], [150]),
        ([20, 7, 0], [140, 1, 20]),
        ([0, 1], [17, 17]),
    ],
)


@LAYOUTS
def test_slots_and_keys_are_what_their_definition_says(
    tiny_folder: Path, first_positions: list[int], num_rows: list[int]
) -> None:
    target = load_target(tiny_folder)
    sequences = PagedSequences(target, 3, 200, BLOCK_SIZE)
    requests = [2, 0, 1][: len(num_rows)]
    metadata = sequences.metadata(requests, first_positions, num_rows)
    rows = [
        (request, first + row)
        for request, first, count in zip(requests, first_positions, num_rows, strict=True)
        for row in range(count)
    ]
    assert metadata.positions.tolist() == [position for _, position in rows]
    for tensor in (metadata.positions, *metadata.slot_mapping.values(), *metadata.tap_slots.values()):
        assert tensor.is_contiguous(), "kernels go from one element to the next"
    for group, spec in enumerate(target.cache_groups()):
        expected = [slot_of(sequences, group, request, position) for request, position in rows]
        assert metadata.slot_mapping[spec.name].tolist() == expected
        # Kernels walk over the slots by row number alone.
        assert metadata.slot_mapping[spec.name].is_contiguous()
        if spec.kind == "short_conv":
            taps = [slot_of(sequences, group, request, p - back) for request, p in rows for back in (3, 2, 1, 0)]
            assert metadata.tap_slots[spec.name].tolist() == taps
            assert all(slot < BLOCK_SIZE for (_, p), slot in zip(rows, taps[::4], strict=True) if p < 3)
        else:
            check_keys(metadata, sequences, group, spec, target.relative_extents[spec.name], rows)


def check_keys(
    metadata: AttentionMetadata,
    sequences: PagedSequences,
    group: int,
    spec: CacheGroupSpec,
    extent: int,
    rows: list[tuple[int, int]],
) -> None:
    """Every row sees exactly the slots of the positions in its window, each with the column of its distance."""
    covered = []
    for segment in metadata.segments:
        keys = segment.keys[spec.name]
        slots = keys.slots.view(segment.num_reqs, -1).tolist()
        columns = keys.columns.view(segment.num_reqs, segment.num_rows, -1).tolist()
        indices = torch.arange(metadata.num_tokens)[slice(None) if segment.rows is None else segment.rows]
        for index, row in enumerate(indices.tolist()):
            request, position = rows[row]
            covered.append(row)
            req, q = divmod(index, segment.num_rows)
            seen = {
                slot: column
                for slot, column in zip(slots[req], columns[req][q], strict=True)
                if column > 0 and not (spec.window and column > extent)
            }
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            expected = {
                slot_of(sequences, group, request, key): min(position - key, extent) + 1
                for key in range(first, position + 1)
            }
            assert seen == expected
    assert sorted(set(covered)) == list(range(metadata.num_tokens))


@LAYOUTS
def test_paged_rows_say_the_same_as_slots(tiny_folder: Path, first_positions: list[int], num_rows: list[int]) -> None:
    """Positions and slots follow from what a kernel gets; without segments nothing else changes."""
    target = load_target(tiny_folder)
    sequences = PagedSequences(target, 3, 200, BLOCK_SIZE)
    requests = [2, 0, 1][: len(num_rows)]
    num_live = torch.tensor([max(count - 1, 0) for count in num_rows])
    layout = sequences.layout(first_positions, num_rows, num_live.tolist())
    with_segments = sequences.builder.build(sequences.tables[:, requests], layout)
    groups = target.cache_groups()
    builder = AttentionMetadataBuilder(
        groups, BLOCK_SIZE, target.relative_extents, torch.device("cpu"), needs_segments=False
    )
    metadata = builder.build(sequences.tables[:, requests], layout)
    assert metadata.segments == () and with_segments.segments
    paged = metadata.paged
    assert (paged.num_reqs, paged.max_rows) == (len(num_rows), max(num_rows))
    assert paged.query_start_loc.dtype == torch.int32 and paged.num_live is layout.num_live
    starts = paged.query_start_loc.tolist()
    assert starts == list(layout.query_start_loc_np) == with_segments.paged.query_start_loc.tolist()
    rows = torch.arange(starts[-1])
    request_of_row = torch.bucketize(rows, paged.query_start_loc, right=True) - 1
    offsets = rows - paged.query_start_loc[request_of_row]
    positions = paged.first_position[request_of_row] + offsets
    assert torch.equal(metadata.positions, positions) and torch.equal(with_segments.positions, positions)
    for spec in groups:
        blocks = paged.block_tables[spec.name][request_of_row, positions // BLOCK_SIZE + 1].long()
        slots = torch.where(offsets < num_live[request_of_row], blocks * BLOCK_SIZE + positions % BLOCK_SIZE, -1)
        assert torch.equal(metadata.slot_mapping[spec.name], slots)
        assert torch.equal(with_segments.slot_mapping[spec.name], slots)
        if spec.kind == "short_conv":
            assert torch.equal(metadata.tap_slots[spec.name], with_segments.tap_slots[spec.name])


@LAYOUTS
@pytest.mark.parametrize("num_left", [0, 5])
def test_counts_on_the_device_say_the_same(
    tiny_folder: Path, first_positions: list[int], num_rows: list[int], num_left: int
) -> None:
    target = load_target(tiny_folder)
    sequences = PagedSequences(target, 3, 200, BLOCK_SIZE)
    requests = [2, 0, 1][: len(num_rows)]
    expected = sequences.metadata(requests, first_positions, num_rows)
    builder = AttentionMetadataBuilder(
        target.cache_groups(), BLOCK_SIZE, target.relative_extents, torch.device("cpu"), needs_segments=False
    )
    # Two requests of padding, of which the last has the rows that are left.
    total = sum(num_rows) + num_left
    layout = DeviceLayout.of(torch.tensor([*num_rows, 0, 0]), torch.tensor([*first_positions, 0, 0]), total, 200)
    tables = torch.cat([sequences.tables[:, requests], torch.zeros_like(sequences.tables[:, :2])], 1)
    metadata = builder.build_on_device(tables, layout)
    live = slice(0, sum(num_rows))
    assert torch.equal(metadata.positions[live], expected.positions) and not metadata.positions[live.stop :].any()
    starts = metadata.paged.query_start_loc.tolist()
    assert starts == [*expected.paged.query_start_loc.tolist(), live.stop, total]
    for name, slots in expected.slot_mapping.items():
        assert torch.equal(metadata.slot_mapping[name][live], slots)
        assert (metadata.slot_mapping[name][live.stop :] == -1).all()
    for name, taps in expected.tap_slots.items():
        assert torch.equal(metadata.tap_slots[name][: len(taps)], taps)


@pytest.mark.parametrize("num_rows", [[4, 4], [4, 6]])
def test_dead_rows_write_nothing_and_the_null_block_stays_zero(tiny_folder: Path, num_rows: list[int]) -> None:
    target = load_target(tiny_folder)
    sequences = PagedSequences(target, 2, 40, BLOCK_SIZE)
    token_ids = torch.arange(sum(num_rows)) + 3
    with torch.inference_mode():
        prompt = sequences.metadata([0, 1], [0, 0], [9, 9])
        target.forward(target.embed(torch.arange(18)), prompt, sequences.caches)
        before = {name: [[t.clone() for t in s] for s in pool.layers] for name, pool in sequences.caches.items()}
        metadata = sequences.metadata([0, 1], [9, 9], num_rows, num_live=[2, 0])
        output = target.forward(target.embed(token_ids), metadata, sequences.caches)
        alone = sequences.metadata([0], [9], [2])
        expected = target.forward(target.embed(token_ids[:2]), alone, sequences.caches)
    assert output.hidden_states.isfinite().all()
    torch.testing.assert_close(output.hidden_states[:2], expected.hidden_states)
    for group, spec in enumerate(target.cache_groups()):
        live = {slot_of(sequences, group, 0, position) for position in (9, 10)}
        for layer, old_layer in zip(sequences.caches[spec.name].layers, before[spec.name], strict=True):
            for stream, old in zip(layer, old_layer, strict=True):
                changed = (stream != old).flatten(1).any(1).nonzero().flatten().tolist()
                assert set(changed) - {len(stream) - 1} == live, "only live rows and the scratch row may change"
                assert not stream[:BLOCK_SIZE].any()


def test_a_table_that_ends_with_the_window_is_enough(tiny_folder: Path) -> None:
    """The last position that a table covers: the window's blocks would run past its end."""
    target = load_target(tiny_folder)
    sequences = PagedSequences(target, 1, 40, BLOCK_SIZE)
    assert sequences.tables.shape[2] == num_table_columns(40, BLOCK_SIZE)
    metadata = sequences.metadata([0], [39], [1])
    assert metadata.slot_mapping["target.sliding_window"].tolist() == [slot_of(sequences, 1, 0, 39)]
