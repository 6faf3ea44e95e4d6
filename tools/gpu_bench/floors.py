"""What a step must read and compute, from a shape alone.

Belongs here: bytes and operations. Does not belong here: seconds (ceilings.py), anything measured.

Counted: every weight of the layers that run, once a pass; the head, once for each set of logits; keys and values of the
tokens that a row may see. Of experts, those that rows of a uniform router touch. Not counted: the rows of the token
table, activations, logits, convolution windows, all of them small beside these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.checkpoints.quantised import kept_bytes
from specbench.engine.checkpoints.tensor_entry import TensorEntry

_ELEMENT_BYTES = 2
_TABLES = ("model.embed_tokens.weight", "model.llm.embed.weight")
_HEADS = ("lm_head.weight", "model.llm.unembed.weight")
_MODULE_PREFIXES = ("model.mtp.layers.", "model.mtp_layers.")


@dataclass(frozen=True, slots=True)
class ShapeBytes:
    """Bytes of a shape's weights as they lie on the device: in bf16, or in codes."""

    #: Of the target's layers: what every row takes, and all routed experts together.
    dense: int
    experts: int
    head: int
    #: Of each MTP module, without the head.
    modules: tuple[int, ...]
    num_experts: int
    num_experts_per_token: int
    #: Numbers in what every row takes, head included.
    num_dense: int

    def target_read(self, num_rows: int) -> float:
        """Bytes of weights that a forward of so many rows reads, head included."""
        return self.dense + self.head + self.experts * self.share_of_experts(num_rows)

    def target_operations(self, num_rows: int) -> float:
        """Multiplications and additions of as many rows, head included."""
        num_active = self.num_dense + self.experts / _ELEMENT_BYTES * self.share_of_experts(1)
        return 2 * num_active * num_rows

    def share_of_experts(self, num_rows: int) -> float:
        """Expected share of the experts that so many rows touch, each choosing by itself and evenly."""
        if not self.num_experts:
            return 0.0
        return 1 - (1 - self.num_experts_per_token / self.num_experts) ** num_rows

    def draft_read(self, num_drafts: int) -> float:
        """Bytes that drafting reads: each pass a module, the last one again where there are fewer, and the head."""
        passes = [self.modules[min(index, len(self.modules) - 1)] for index in range(num_drafts)]
        return sum(passes) + num_drafts * self.head


def shape_bytes(checkpoint: Checkpoint, num_experts: int, num_experts_per_token: int) -> ShapeBytes:
    """Sums over the tensors of a checkpoint."""
    tensors = {name: _num_bytes(entry) for name, entry in checkpoint.tensors.items()}
    modules: dict[str, int] = {}
    dense = experts = head = num_dense = 0
    for name, size in tensors.items():
        if name in _TABLES:
            head += size if not any(other in tensors for other in _HEADS) else 0  # tied
        elif name in _HEADS:
            head += size
        elif name.startswith(_MODULE_PREFIXES):
            index = name.removeprefix(_MODULE_PREFIXES[0]).removeprefix(_MODULE_PREFIXES[1]).partition(".")[0]
            modules[index] = modules.get(index, 0) + size
        elif ".mlp.experts." in name:
            experts += size
        else:
            dense += size
            num_dense += prod(checkpoint.tensors[name].shape)
    ordered = tuple(modules[index] for index in sorted(modules, key=int))
    num_dense += head // _ELEMENT_BYTES
    return ShapeBytes(dense, experts, head, ordered, num_experts, num_experts_per_token, num_dense)


def _num_bytes(entry: TensorEntry) -> int:
    return kept_bytes(entry.dtype, entry.shape) if entry.is_kept else _ELEMENT_BYTES * prod(entry.shape)


def kv_read(specs: Iterable[CacheGroupSpec], owner: str, context: int) -> int:
    """Bytes of keys and values that one request's rows read at such a context, each once however many rows."""
    return sum(
        spec.bytes_per_token * min(context, spec.window or context)
        for spec in specs
        if spec.owner == owner and spec.kind != "short_conv"
    )
