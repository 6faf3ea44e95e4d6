"""A matrix and its bias: plain, packed for a CPU, or in codes of fewer bits on a GPU.

Belongs here: one matrix product in all its forms, and whether it is left as partial sums. Does not belong here: how it
is shared between ranks (models/, parallel.py), kernels."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from specbench.engine.kernels.code_plan import CodePlan
    from specbench.engine.kernels.few_rows import RowPlan
    from specbench.engine.kernels.fp8_linear import Fp8Weight
    from specbench.engine.kernels.nvfp4_linear import Nvfp4Weight

#: Below it, what a packed product costs beside its arithmetic (about 10 µs, against 3) outweighs the gain.
_MIN_PACKED_ELEMENTS = 1 << 17
#: The order depends on how many rows a product is expected to have; that for a few suits one and many, too.
_PACKED_FOR_ROWS = 8


class Linear:
    """x -> x weight^T + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, may_split: bool = True) -> None:
        """may_split: whether its product may be left as partial sums where that is asked for."""
        #: [outputs, inputs]
        self._weight = weight
        #: [outputs]
        self._bias = bias
        self._may_split = may_split and weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)
        self._plan = _plan_few_rows(weight) if self._may_split else None

    def __call__(self, x: Tensor) -> Tensor:
        # x: [T, inputs] -> [T, outputs]
        return F.linear(x, self._weight, self._bias)

    def wide(self, x: Tensor) -> Tensor:
        """The same in fp32, which a GPU's product of narrow numbers can leave as it is summed."""
        if x.is_cuda and x.dtype != torch.float32 and self._bias is None:
            return torch.mm(x, self._weight.T, out_dtype=torch.float32)
        return self(x).to(torch.float32)

    def partial_sums(self, x: Tensor, most: int | None = None) -> Tensor:
        """The same [T, outputs], or for few rows on a GPU fp32 [splits, T, outputs], whose sum over splits it is: for
        kernels that take either, or at most so many splits."""
        if not self._may_split:
            return self(x)
        from specbench.engine.kernels import few_rows

        plan = self._plan
        if plan is not None and len(x) <= few_rows.MAX_ROWS and (most is None or plan.num_splits <= most):
            return few_rows.partial_sums(x, self._weight, self._bias, plan)
        if plan is not None and most is None and few_rows.takes_staged(len(x), len(self._weight)):
            return few_rows.staged_sums(x, self._weight, self._bias)
        num_splits = few_rows.num_batched(len(x), *self._weight.shape)
        if num_splits == 1 or self._bias is not None:
            return self(x)
        return few_rows.batched_sums(x, self._weight, num_splits)

    def gated(self, x: Tensor) -> Tensor | None:
        """On a GPU: silu of the first half of [T, outputs] times the second, where one kernel makes it at once."""
        from specbench.engine.kernels import gated_product

        matrix = self.matrix
        if matrix is None or not gated_product.takes(len(x), matrix):
            return None
        return gated_product.gated_product(x.contiguous(), matrix)

    @property
    def matrix(self) -> Tensor | None:
        """[outputs, inputs], where that as it stands is all there is."""
        return self._weight if self._bias is None else None

    @property
    def address_range(self) -> tuple[int, int]:
        """Where the matrix lies: its first address, and one past the last."""
        start = self._weight.data_ptr()
        return start, start + self._weight.nbytes


def _plan_few_rows(weight: Tensor) -> RowPlan | None:
    """How a product of few rows is cut up where a kernel of our own is faster: None elsewhere."""
    from specbench.engine.kernels.few_rows import plan_product
    from specbench.engine.kernels.overlap import may_overlap

    return plan_product(*weight.shape) if may_overlap(weight.device) else None


class PackedLinear(Linear):
    """The same, the matrix kept as oneDNN reads it: in blocks of rows, in bf16 with pairs of columns together.

    Left in rows, a bf16 matrix is put in that order anew at every product, and an fp32 one is left to MKL, which is
    slow on processors other than its maker's. Packing halves the time of products of few rows, and of fp32 ones of any
    number, where the matrix comes from memory. A model small enough for the processor's caches gains nothing.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS), bias)

    @property
    def matrix(self) -> Tensor | None:
        return None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    @property
    def address_range(self) -> tuple[int, int]:
        start = torch.ops.mkldnn.data_ptr(self._weight)
        return start, start + torch.ops.mkldnn._nbytes(self._weight)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A weight as codes and scales."""

    # [outputs, inputs] float8_e4m3fn
    codes: Tensor
    # [outputs, inputs / 128] fp32
    scale: Tensor


@dataclass(frozen=True, slots=True)
class Fp8Stack:
    """Matrices of experts as codes and scales."""

    # [experts, outputs, inputs] float8_e4m3fn
    codes: Tensor
    # [experts, outputs, inputs / 128] fp32
    scale: Tensor

    def matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """One of them, [outputs, inputs]."""
        from specbench.engine.kernels.fp8_linear import converted

        return converted(self.codes[expert], self.scale[expert]).to(dtype)


class CodedLinear(Linear, ABC):
    """The same with the weight in codes, converted inside the product. For many rows it is converted before, since
    their product costs more than reading it."""

    def __init__(self, weight: Fp8Weight | Nvfp4Weight, bias: Tensor | None, bits: int, *, may_split: bool) -> None:
        super().__init__(weight.codes, bias, may_split=may_split)
        self._bits = bits
        self._shape = (weight.num_outputs, weight.num_inputs)
        self._may_split = may_split and weight.codes.is_cuda

    @abstractmethod
    def _product(self, x: Tensor, plan: CodePlan, dtype: torch.dtype) -> Tensor:
        """[splits, T, outputs] in dtype."""

    @abstractmethod
    def _numbers(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs]"""

    @property
    def matrix(self) -> Tensor | None:
        return None

    def __call__(self, x: Tensor) -> Tensor:
        product = self._of_few_rows(x)
        if product is None:
            return F.linear(x, self._numbers(x.dtype), self._bias)
        return product if product.dim() == 2 else product.sum(0).to(x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        product = self._of_few_rows(x, torch.float32)
        if product is None:
            return self(x).to(torch.float32)
        return product if product.dim() == 2 else product.sum(0)

    def partial_sums(self, x: Tensor, most: int | None = None) -> Tensor:
        product = self._of_few_rows(x, most=most) if self._may_split else None
        return self(x) if product is None else product

    def _of_few_rows(self, x: Tensor, dtype: torch.dtype | None = None, most: int | None = None) -> Tensor | None:
        """As partial_sums; whole ones in dtype, that of x where there is none. None for many rows."""
        from specbench.engine.kernels.code_plan import plan_product

        plan = plan_product(self._bits, len(x), *self._shape, most, is_wide=x.dtype == torch.float32)
        if plan is None:
            return None
        if plan.num_splits == 1:
            return self._product(x.contiguous(), plan, dtype or x.dtype).squeeze(0)
        return self._product(x.contiguous(), plan, torch.float32)


class Fp8Linear(CodedLinear):
    """A weight in FP8."""

    def __init__(self, matrix: Fp8Matrix, bias: Tensor | None = None, *, may_split: bool = True) -> None:
        from specbench.engine.kernels.fp8_linear import pack_fp8

        self._packed = pack_fp8(matrix.codes, matrix.scale)
        super().__init__(self._packed, bias, 8, may_split=may_split)

    def gated(self, x: Tensor) -> Tensor | None:
        """silu(gate) * up of a product whose first half are gates, [T, outputs / 2], where one launch makes that."""
        from specbench.engine.kernels.code_plan import plan_product
        from specbench.engine.kernels.fp8_linear import can_gate, fp8_gated_product

        plan = plan_product(self._bits, len(x), *self._shape, is_wide=x.dtype == torch.float32)
        if plan is None or not can_gate(plan, self._packed.num_outputs):
            return None
        return fp8_gated_product(x.contiguous(), self._packed, self._bias, plan)

    def _product(self, x: Tensor, plan: CodePlan, dtype: torch.dtype) -> Tensor:
        from specbench.engine.kernels.fp8_linear import fp8_product

        return fp8_product(x, self._packed, self._bias, plan, dtype)

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        from specbench.engine.kernels.fp8_linear import fp8_numbers

        return fp8_numbers(self._packed, dtype)


@dataclass(frozen=True, slots=True)
class Nvfp4Matrix:
    """A weight as codes and scales of two levels."""

    # [outputs, inputs / 2] uint8, the even column in the low half
    codes: Tensor
    # [outputs, inputs / 16] float8_e4m3fn
    block_scale: Tensor
    # [outputs] fp32
    row_scale: Tensor


@dataclass(frozen=True, slots=True)
class Nvfp4Stack:
    """Matrices of experts in the same codes."""

    # [experts, outputs, inputs / 2] uint8
    codes: Tensor
    # [experts, outputs, inputs / 16] float8_e4m3fn
    block_scale: Tensor
    # [experts] fp32
    scale: Tensor

    def matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """One of them, [outputs, inputs]."""
        from specbench.engine.kernels.nvfp4_linear import converted_nvfp4

        codes = self.codes[expert]
        return converted_nvfp4(codes, self.block_scale[expert], self.scale[expert].expand(len(codes))).to(dtype)


class Nvfp4Linear(CodedLinear):
    """A weight in NVFP4."""

    def __init__(self, matrix: Nvfp4Matrix, bias: Tensor | None = None, *, may_split: bool = True) -> None:
        from specbench.engine.kernels.nvfp4_linear import pack_nvfp4

        self._packed = pack_nvfp4(matrix.codes, matrix.block_scale, matrix.row_scale)
        super().__init__(self._packed, bias, 4, may_split=may_split)

    def _product(self, x: Tensor, plan: CodePlan, dtype: torch.dtype) -> Tensor:
        from specbench.engine.kernels.nvfp4_linear import nvfp4_product

        return nvfp4_product(x, self._packed, self._bias, plan, dtype)

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        from specbench.engine.kernels.nvfp4_linear import nvfp4_numbers

        return nvfp4_numbers(self._packed, dtype)


#: What is read for a product: numbers, or codes.
Matrix = Tensor | Fp8Matrix | Nvfp4Matrix


def make_linear(weight: Matrix, bias: Tensor | None = None, *, may_split: bool = True) -> Linear:
    """Packed where that can be done and pays. may_split: see Linear."""
    if isinstance(weight, Fp8Matrix):
        return Fp8Linear(weight, bias, may_split=may_split)
    if isinstance(weight, Nvfp4Matrix):
        return Nvfp4Linear(weight, bias, may_split=may_split)
    is_packed = can_pack(weight.numel(), weight.dtype, weight.device)
    return PackedLinear(weight, bias) if is_packed else Linear(weight, bias, may_split=may_split)


def can_pack(num_elements: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `make_linear` packs such a matrix, which takes a copy of it."""
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64") or num_elements < _MIN_PACKED_ELEMENTS:
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
