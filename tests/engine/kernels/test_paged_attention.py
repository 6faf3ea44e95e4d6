"""Attention over gathered slots equals attention written out row by row."""

from __future__ import annotations

import pytest
import torch

from specbench.engine.kernels.attention import RelativeBias, attend

HEADS, KV_HEADS, HEAD_DIM, D_REL, EXTENT = 4, 2, 8, 3, 5


@pytest.mark.parametrize("is_masked_beyond", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_attend_equals_rows_written_out(num_rows: int, is_masked_beyond: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    num_reqs, num_keys, scale = 2, 9, 0.3
    first_positions = [2, 6]
    query, relative = randn(num_reqs, num_rows, HEADS, HEAD_DIM), randn(num_reqs, num_rows, HEADS, D_REL)
    cache, profiles = randn(40, 2, KV_HEADS, HEAD_DIM), randn(D_REL, EXTENT)
    slots = torch.randperm(39, generator=generator)[: num_reqs * num_keys]
    positions = torch.tensor(first_positions)[:, None] + torch.arange(num_rows)
    distance = positions[:, :, None] - torch.arange(num_keys)
    columns = (distance + 1).clamp(0, EXTENT + 1)[:, None, None]
    bias = RelativeBias(profiles, is_masked_beyond)
    output = attend(query, relative, cache, slots, columns, bias, scale).view(num_reqs, num_rows, HEADS, HEAD_DIM)
    for req in range(num_reqs):
        keys, values = cache[slots.view(num_reqs, -1)[req]].unbind(1)  # [num_keys, KV_HEADS, HEAD_DIM]
        for row in range(num_rows):
            position = first_positions[req] + row
            first = max(0, position - EXTENT + 1) if is_masked_beyond else 0
            seen = range(first, position + 1)
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                scores = torch.stack(
                    [
                        query[req, row, head] @ keys[key, kv_head] * scale
                        + (relative[req, row, head] @ profiles[:, position - key] if position - key < EXTENT else 0)
                        for key in seen
                    ]
                )
                expected = scores.softmax(0) @ values[list(seen), kv_head]
                torch.testing.assert_close(output[req, row, head], expected)


def test_a_row_without_any_key_is_finite() -> None:
    columns = torch.zeros(1, 1, 1, 1, 4, dtype=torch.int64)
    output = attend(
        torch.randn(1, 1, HEADS, HEAD_DIM),
        torch.randn(1, 1, HEADS, D_REL),
        torch.randn(5, 2, KV_HEADS, HEAD_DIM),
        torch.zeros(4, dtype=torch.int64),
        columns,
        RelativeBias(torch.randn(D_REL, EXTENT), is_masked_beyond=True),
        0.5,
    )
    assert output.isfinite().all()
