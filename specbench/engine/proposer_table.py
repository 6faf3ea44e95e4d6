"""The table of proposers: one line each, for the checks of a configuration and for whoever makes one. No torch.

Belongs here: what must be known of a proposer by name alone. Does not belong here: what a proposer asks for once its
settings are known (ProposerRequirements).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProposerLine:
    """One proposer."""

    #: File of proposers/ and class in it, made with (EngineConfig, the target's Checkpoint).
    implementation: str
    #: The spec.method that chooses it.
    method: str
    #: Whether drafts come from logits, by `DraftBatch.sample_draft`: what spec.draft_sample_method=probabilistic needs.
    has_draft_logits: bool


#: EngineConfig.proposer -> line
PROPOSERS = {
    "draft_model": ProposerLine("draft_model.DraftModel", "draft_model", has_draft_logits=True),
    "mtp_multi": ProposerLine("mtp_multi.MultiModuleMTP", "mtp", has_draft_logits=True),
    "mtp_single": ProposerLine("mtp_single.SingleModuleMTP", "mtp", has_draft_logits=True),
    "ngram": ProposerLine("ngram.NgramLookup", "ngram", has_draft_logits=False),
    "stub": ProposerLine("stub.StubProposer", "stub", has_draft_logits=False),
}
