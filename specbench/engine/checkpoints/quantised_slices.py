"""A rank's slice of a quantised weight: which slices of its codes and scales that is.

Belongs here: edges of blocks, and the refusal of a slice in codes that crosses one. Does not belong here: which slice a
rank has (shard.py), reading (weights.py), torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from specbench.engine.checkpoints.quantised import FP8_BLOCK, NVFP4, NVFP4_BLOCK, scale_kind
from specbench.engine.checkpoints.tensor_entry import TensorEntry
from specbench.engine.shard import Part, Shard
from specbench.errors import UserError

#: Columns that products with codes take at once, in either type.
KEPT_COLUMNS = 128


def stored_slices(entry: TensorEntry, part: Part) -> dict[str, Part] | None:
    """Role -> slice of what is stored under it, where that is not all of it. None where the part begins or ends inside
    a block: then only the whole can be read."""
    assert entry.parts is not None
    slices = {}
    for role, stored in entry.parts.items():
        unit = _unit(entry, role, part.dim)
        if unit is None:
            continue
        is_at_end = part.stop == entry.shape[part.dim]
        if part.start % unit or (part.stop % unit and not is_at_end):
            return None
        slices[role] = Part(part.dim, part.start // unit, stored.shape[part.dim] if is_at_end else part.stop // unit)
    return slices


def _unit(entry: TensorEntry, role: str, dim: int) -> int | None:
    """How many places of the weight's dimension one of the stored tensor covers; None where that has no such
    dimension, or one place for all."""
    assert entry.parts is not None
    stored, last = entry.parts[role].shape, len(entry.shape) - 1
    if entry.dtype == NVFP4:
        if role in ("codes", "block_scale"):
            return {"codes": 2, "block_scale": NVFP4_BLOCK}[role] if dim == last else 1
        return 1 if dim == 0 and last > 1 and stored[:1] == entry.shape[:1] else None  # of each matrix of a stack
    if role == "codes":
        return 1
    kind = scale_kind(entry.shape, stored)
    if kind == "block":
        return FP8_BLOCK if dim >= last - 1 else 1
    return 1 if kind == "row" and dim < last else None


def check_kept_slices(tensors: Mapping[str, TensorEntry], parts: Mapping[str, Part], shard: Shard) -> None:
    """UserError for the first matrix whose codes the ranks cannot share: slices end between blocks, and hold as many
    columns as products take at once."""
    for name, part in parts.items():
        entry = tensors.get(name)  # of modules that are not there, and not asked for
        if entry is None or not entry.is_kept:
            continue
        width = part.stop - part.start
        is_by_columns = part.dim == len(entry.shape) - 1
        if stored_slices(entry, part) is not None and not (is_by_columns and width % KEPT_COLUMNS):
            continue
        unit = KEPT_COLUMNS if is_by_columns else FP8_BLOCK
        of_experts = "say parallel.experts=whole, or " if ".experts." in name else "say "
        raise UserError(
            f"model.quantised_weights: {shard.size} ranks cannot share the {entry.dtype} codes of {name} "
            f"[{', '.join(map(str, entry.shape))}]: the {width} {'columns' if is_by_columns else 'rows'} of a rank are "
            f"no whole blocks of {unit}; {of_experts}dequantise, or lower parallel.tensor_parallel_size"
        )
