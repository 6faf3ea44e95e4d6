"""Quantised weights as a checkpoint names them: codes and scales folded into one entry under the weight's own name.

Belongs here: layouts, told by names and types of tensors. Does not belong here: arithmetic (dequantise.py), torch.

What is known, weights only (scales of activations are left out: nothing here quantises activations):

    FP8, in blocks      X.weight F8_E4M3 [N, K], X.weight_scale_inv [N / 128, K / 128], rounded up
    FP8, by row or all  X.weight F8_E4M3 [N, K], X.weight_scale [N, 1] or [N] or one number
    NVFP4, ModelOpt     X.weight U8 [N, K / 2], X.weight_scale F8_E4M3 [N, K / 16], X.weight_scale_2 one number
    NVFP4, compressed   X.weight_packed, X.weight_scale, X.weight_global_scale, which divides
    NVFP4, Inkling      X U8 [E, N, K / 2], X.scale F8_E4M3 [E, N, K / 16], X.scale2 [E]

All scales but the one that divides multiply.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path

from specbench.engine.checkpoints.tensor_entry import TensorEntry
from specbench.errors import UserError

#: Types of folded entries.
FP8, NVFP4 = "FP8", "NVFP4"
FP8_BLOCK = 128
NVFP4_BLOCK = 16
#: Types of scales, those of NVFP4's blocks apart.
_SCALE_DTYPES = ("F32", "BF16", "F16")
#: `quant_method` of config.json whose layouts are above.
METHODS = ("fp8", "modelopt", "compressed-tensors")


@dataclass(frozen=True, slots=True)
class _Layout:
    dtype: str
    codes_dtype: str
    #: End of the codes' name, and what stands in its place in the names of the weight and of its scales.
    codes: str
    weight: str
    #: role -> end of the name
    scales: Mapping[str, str]


_LAYOUTS = (
    _Layout(FP8, "F8_E4M3", ".weight", ".weight", {"scale": ".weight_scale_inv"}),
    _Layout(FP8, "F8_E4M3", ".weight", ".weight", {"scale": ".weight_scale"}),
    _Layout(NVFP4, "U8", ".weight", ".weight", {"block_scale": ".weight_scale", "scale": ".weight_scale_2"}),
    _Layout(
        NVFP4,
        "U8",
        ".weight_packed",
        ".weight",
        {"block_scale": ".weight_scale", "inverse_scale": ".weight_global_scale"},
    ),
    _Layout(NVFP4, "U8", "", "", {"block_scale": ".scale", "scale": ".scale2"}),
)
#: Beside quantised weights, of no use to weights alone.
_OF_ACTIVATIONS = (".input_scale", ".input_amax", ".input_global_scale", ".original_shape", ".k_scale", ".v_scale")


def imagined_fp8(name: str, file: Path, shape: tuple[int, ...]) -> TensorEntry:
    """An FP8 matrix that is drawn, not read: codes, and one scale."""
    parts = {"codes": TensorEntry(name, file, "F8_E4M3", shape), "scale": TensorEntry(name, file, "F32", ())}
    return TensorEntry(name, file, FP8, shape, parts=parts)


def imagined_nvfp4(name: str, file: Path, shape: tuple[int, ...]) -> TensorEntry:
    """A stack of NVFP4 matrices that is drawn, not read: codes, scales of blocks, and one of each matrix."""
    *leading, width = shape
    parts = {
        "codes": TensorEntry(name, file, "U8", (*leading, width // 2)),
        "block_scale": TensorEntry(name, file, "F8_E4M3", (*leading, width // NVFP4_BLOCK)),
        "scale": TensorEntry(name, file, "F32", shape[:1]),
    }
    return TensorEntry(name, file, NVFP4, shape, parts=parts)


#: Ends of the names of matrices that are multiplied as one, or alone: all of one line are kept in codes, or none.
_PRODUCTS = (
    (".q_proj.weight", ".k_proj.weight", ".v_proj.weight"),
    (".o_proj.weight",),
    (".gate_proj.weight", ".up_proj.weight"),
    (".down_proj.weight",),
    (".experts.w13_weight", ".experts.w2_weight"),
)
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


def keep_in_codes(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Quantised matrices of plain projections and of experts, marked to stay in codes: experts in stacks of NVFP4, or
    one by one in FP8, where all of a layer's are."""
    marked = dict(tensors) | _kept_experts(tensors)
    for name in tensors:
        for ends in _PRODUCTS:
            if name.endswith(ends[0]) and not _ONE_EXPERT.search(name):
                names = [name.removesuffix(ends[0]) + end for end in ends]
                found = [tensors[other] for other in names if other in tensors and _can_be_kept(tensors[other])]
                if len(found) == len(names) and len({entry.dtype for entry in found}) == 1:
                    marked |= {other: replace(tensors[other], is_kept=True) for other in names}
    return marked


def _kept_experts(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Those of layers whose experts, named one by one, are all in FP8."""
    by_layer: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        if found := _ONE_EXPERT.search(name):
            by_layer.setdefault(name[: found.start()], {})[name] = entry
    kept: dict[str, TensorEntry] = {}
    for entries in by_layer.values():
        num_experts = len({name.rpartition(".experts.")[2].partition(".")[0] for name in entries})
        is_whole = len(entries) == 3 * num_experts
        if is_whole and all(entry.dtype == FP8 and _can_be_kept(entry) for entry in entries.values()):
            kept |= {name: replace(entry, is_kept=True) for name, entry in entries.items()}
    return kept


def _can_be_kept(entry: TensorEntry) -> bool:
    num_dims = {FP8: (2,), NVFP4: (2, 3)}.get(entry.dtype, ())
    return len(entry.shape) in num_dims and entry.shape[-1] % FP8_BLOCK == 0


def kept_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Of a matrix, a stack of them, or a rank's slice, in codes. FP8: a byte each, and a scale in fp32 for 128 of a
    row. NVFP4: half a byte each, a byte of scale for 16 of a row, and one in fp32 a row, or a matrix of a stack."""
    *stacked, num_rows, width = shape
    if dtype == FP8:
        return num_rows * (width + 4 * width // FP8_BLOCK)
    num_scales = stacked[0] if stacked else num_rows
    return prod(shape[:-1]) * (width // 2 + width // NVFP4_BLOCK) + 4 * num_scales


def fold_quantised(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Every quantised weight as one entry of its own shape, with codes and scales as its parts."""
    folded: dict[str, TensorEntry] = {}
    absorbed: set[str] = set()
    for name, entry in tensors.items():
        if entry.dtype not in ("F8_E4M3", "U8"):
            continue
        for layout in _LAYOUTS:
            names = _scale_names(name, entry, layout)
            if names is not None and all(scale in tensors for scale in names.values()):
                weight = name.removesuffix(layout.codes) + layout.weight
                parts = {"codes": entry} | {role: tensors[scale] for role, scale in names.items()}
                folded[weight] = _checked(replace(entry, name=weight, dtype=layout.dtype, parts=parts))
                absorbed |= {name, *names.values()}
                break
    if not folded:
        return dict(tensors)
    kept = {
        name: entry for name, entry in tensors.items() if name not in absorbed and not name.endswith(_OF_ACTIVATIONS)
    }
    return kept | folded


def _scale_names(name: str, entry: TensorEntry, layout: _Layout) -> dict[str, str] | None:
    """Names that the scales would have; None where the codes are of another layout."""
    if entry.dtype != layout.codes_dtype or not name.endswith(layout.codes):
        return None
    stem = name.removesuffix(layout.codes)
    return {role: stem + end for role, end in layout.scales.items()}


def _checked(entry: TensorEntry) -> TensorEntry:
    """The entry with the shape of its weight; UserError where codes and scales do not fit each other."""
    assert entry.parts is not None
    scales_of = {role: part for role, part in entry.parts.items() if role != "codes"}
    shape = entry.shape
    if entry.dtype == FP8:
        fits = scale_kind(shape, scales_of["scale"].shape) is not None
    else:
        shape = (*shape[:-1], 2 * (shape or (0,))[-1])
        of_blocks = (*shape[:-1], shape[-1] // NVFP4_BLOCK)
        (of_all,) = (part.shape for role, part in scales_of.items() if role != "block_scale")
        # One number, or one a matrix of a stack.
        fits = scales_of["block_scale"].shape == of_blocks and (prod(of_all) == 1 or of_all == shape[:-2])
        fits = fits and len(shape) > 1
    types = {role: ("F8_E4M3",) if role == "block_scale" else _SCALE_DTYPES for role in scales_of}
    if not fits or any(part.dtype not in types[role] for role, part in scales_of.items()):
        scales = ", ".join(f"{part.name} {list(part.shape)} of {part.dtype}" for part in scales_of.values())
        raise UserError(
            f"{entry.file}: tensor {entry.parts['codes'].name} {list(entry.shape)} does not fit its scales, {scales}; "
            "fetch the checkpoint again"
        )
    return replace(entry, shape=shape)


def scale_kind(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> str | None:
    """Of FP8: "all", "row" or "block" of 128 times 128; None where the scales fit no matrix of this shape."""
    if scale_shape in ((), (1,)):
        return "all"
    if scale_shape in (shape[:-1], (*shape[:-1], 1)):
        return "row"
    if len(shape) < 2:
        return None
    blocks = (*shape[:-2], ceil(shape[-2] / FP8_BLOCK), ceil(shape[-1] / FP8_BLOCK))
    return "block" if scale_shape == blocks else None
