"""The head leaves out the rows of padding that it multiplies by."""

from __future__ import annotations

import torch

from specbench.engine.layers.embedding import LogitsHead, num_head_rows
from specbench.engine.layers.linear import Linear
from specbench.engine.layers.parallel import TensorParallel, Vocabulary


def test_logits_are_those_of_ids_that_exist() -> None:
    num_ids, weight, hidden = 70, torch.randn(80, 8), torch.randn(3, 8)
    head = LogitsHead(Linear(weight), 2.0, Vocabulary(num_ids, TensorParallel()))
    torch.testing.assert_close(head(hidden), hidden / 2 @ weight[:num_ids].T)


def test_a_gpu_multiplies_by_whole_groups_of_rows_where_they_are_stored() -> None:
    assert num_head_rows(70, 128, torch.device("cuda")) == 128
    assert num_head_rows(70, 80, torch.device("cuda")) == 80
    assert num_head_rows(128, 200, torch.device("cuda")) == 128
    assert num_head_rows(70, 128, torch.device("cpu")) == 70
