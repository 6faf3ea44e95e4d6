"""Reading the token pool: a request's committed tokens and, behind them, its drafts are one row of it."""

from __future__ import annotations

from torch import Tensor

from specbench.engine.layers import fusion


def read_tokens(
    token_pool: Tensor, rows: Tensor, request_of_row: Tensor | None, positions: Tensor, lookahead: int = 0
) -> Tensor:
    """Tokens at positions + lookahead ([num_tokens]) of each row's request, int64; id 0 where there is none (-1).

    token_pool: [any, width] int64. rows: its row for each request or, without request_of_row ([num_tokens]), for each
    row of the step.
    """
    if fusion.is_fused(token_pool):
        from specbench.engine.kernels.step_preparation import pool_tokens

        return pool_tokens(token_pool, rows, request_of_row, positions, lookahead)
    row_of_token = rows if request_of_row is None else rows[request_of_row]
    return token_pool[row_of_token, positions + lookahead if lookahead else positions].clamp_min_(0)
