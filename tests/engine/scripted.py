"""A target that says a given text, and a proposer that guesses it, wrong at chosen places. One request at a time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specbench.engine.execution.model_runner import ModelRunner
from specbench.engine.layers.metadata import TargetOutput
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.proposers.proposer import DraftBatch, ProposerRequirements
from tests.engine.harness import make_engine
from tests.engine.tiny_inkling import build_tiny_inkling

EOS = 1
VOCAB = 300


def build_folder(folder: Path) -> Path:
    """A tiny checkpoint with a byte-level tokenizer: one token a byte, so every character beyond ASCII is split."""
    build_tiny_inkling(folder, num_modules=0, vocab_size=VOCAB, unpadded_vocab_size=VOCAB, num_hidden_layers=2)
    vocab = {"<pad>": 0, "<eos>": EOS}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class ScriptedModel:
    """Row p's argmax is token p + 1 of the script, whatever the input was."""

    def __init__(self, model: object, script: list[int]):
        self._model = model
        self._script = torch.tensor(script)

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, embeds: torch.Tensor, metadata: object, caches: object) -> TargetOutput:
        following = self._script[(metadata.positions + 1).clamp_max(len(self._script) - 1)]
        return TargetOutput(following[:, None].float(), following[:, None].float())

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB).float()


class ScriptedProposer:
    """Drafts the script, with token 0 at the positions in `wrong_at` and no draft (-1) at those in `missing_at`."""

    is_capturable = False
    is_capturable_mixed = False
    encodes_content = False

    def __init__(self, script: list[int], k: int, wrong_at: Collection[int], missing_at: Collection[int]):
        self.script, self.k, self.wrong_at, self.missing_at = script, k, wrong_at, missing_at

    def requirements(self) -> ProposerRequirements:
        return ProposerRequirements(self.k, cache_groups=(), num_prompt_lookahead=0, fixed_bytes=0)

    def propose(self, batch: DraftBatch) -> None:
        (column,) = batch.draft_columns.tolist()
        for index in range(self.k):
            position = column + index
            known = self.script[position] if position < len(self.script) else 0
            draft = -1 if position in self.missing_at else 0 if position in self.wrong_at else known
            batch.write_draft(index, torch.tensor([draft]))

    def release(self, rows: list[int]) -> None:
        pass


def scripted_engine(
    folder: Path, script: list[int], k: int, wrong_at: Collection[int] = (), missing_at: Collection[int] = ()
) -> LLMEngine:
    """An engine whose target continues with `script` (prompt included) and whose proposer guesses it."""
    engine = make_engine(folder, 0, max_model_len=512)
    assert engine.tokenizer is not None
    if k:
        _attach_proposer(engine, ScriptedProposer(script, k, wrong_at, missing_at), k)
    engine.runner.stages.model = ScriptedModel(engine.model, script)
    return engine


def _attach_proposer(engine: LLMEngine, proposer: ScriptedProposer, k: int) -> None:
    """Rebuild what depends on k around a proposer that needs neither caches nor weights."""
    config = replace(engine.config, num_speculative_tokens=k)
    engine.config = config
    engine.runner = ModelRunner(config, engine.model, proposer, engine.caches)
    engine.scheduler.config = replace(engine.scheduler.config, num_speculative_tokens=k)
