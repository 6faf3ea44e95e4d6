"""What everyone may ask of a model's config, whatever its family. No torch.

Does not belong here: what one family's layers alone read (its own config).
"""

from __future__ import annotations

from typing import Protocol

from specbench.engine.layers.attention_backends.choose import AttentionFeature


class ModelConfig(Protocol):
    """A family's config, seen from outside the family."""

    @property
    def architecture(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """Token ids that exist."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def is_tied(self) -> bool:
        """Whether the head is the token table."""
        ...

    @property
    def attention_features(self) -> frozenset[AttentionFeature]:
        """What an attention backend must be able to do."""
        ...

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        ...

    @property
    def num_modules(self) -> int:
        """MTP modules in the checkpoint."""
        ...
