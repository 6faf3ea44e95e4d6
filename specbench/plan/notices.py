"""What a user should know of a run that goes on all the same, a sentence each.

Does not belong here: what is refused (run_plan.py), prompts (prompt_checks.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.content.content_tokens import AUDIO
from specbench.engine.models.registry import content_tokens, load_model_config, num_parameters, open_checkpoint
from specbench.generate import GenerateRequest
from specbench.model_choice import ModelChoice
from specbench.resolved_config import CheckpointFacts
from specbench.run_config import RunConfig


def sharing_notices(config: RunConfig) -> Iterable[str]:
    parallel = config.parallel
    if parallel.ranks_per_gpu > 1 and parallel.tensor_parallel_size > 1 and config.engine.device.startswith("cuda"):
        yield (
            f"parallel.ranks_per_gpu={parallel.ranks_per_gpu}: ranks have a GPU in turn, or share it; texts and "
            "acceptance can be read, speed cannot."
        )


def model_notices(choice: ModelChoice, checkpoint: Checkpoint) -> Iterable[str]:
    if checkpoint.is_random:
        millions = num_parameters(checkpoint) / 1e6
        yield (
            f"{choice.ran} ({millions:,.1f} M parameters): weights are drawn at random (model.load=random); the text "
            "means nothing, only speed can be read."
        )
    if choice.packaged:
        millions = num_parameters(checkpoint) / 1e6
        yield f"{choice.ran} (packaged, {millions:.1f} M parameters): not Inkling; name one with model.checkpoint=DIR"


def length_notices(config: RunConfig, facts: CheckpointFacts) -> Iterable[str]:
    asked = config.model.max_model_len
    assert asked is not None
    if asked > facts.max_model_len:
        yield (
            f"model.max_model_len={asked} is more than the {facts.max_model_len} tokens that the checkpoint was made "
            "for: it runs, since distances alone count, and what it says there means little."
        )


def draft_notices(
    config: RunConfig, choice: ModelChoice, draft: ModelChoice | None, requests: Iterable[GenerateRequest]
) -> Iterable[str]:
    if draft is None:
        return
    if draft.path == choice.path:
        yield f"{draft.ran} drafts for itself: each draft is its own next token, and acceptance shows nothing."
    kinds = content_tokens(load_model_config(open_checkpoint(draft.path, config.model.load)))
    if AUDIO not in kinds and any(request.audio for request in requests):
        yield f"{draft.ran} holds no audio tower: it drafts without hearing the clips."


def acceptance_notices(config: RunConfig, requests: Iterable[GenerateRequest]) -> Iterable[str]:
    if config.spec.method == "none":
        return
    if config.eval.name == "prompts" and any(request.prompt_token_ids is not None for request in requests):
        yield "prompts are token ids: if they were drawn at random, acceptance says little about real text."
    if config.sampling.ignore_eos:
        yield "ignore_eos is on: text behind the end of an answer repeats itself, and its acceptance says little."
    if config.spec.rejection_sample_method == "synthetic":
        yield "synthetic acceptance: drafts are accepted by coins; the text means nothing, only speed can be read."
    if config.spec.faults:
        yield f"faults injected on purpose: {', '.join(config.spec.faults)}."


def queue_notices(config: RunConfig) -> Iterable[str]:
    if (config.load.concurrency or 0) > config.engine.max_num_seqs:
        yield (
            f"load.concurrency={config.load.concurrency} is above engine.max_num_seqs={config.engine.max_num_seqs}: "
            "requests queue in the engine, and TTFT holds their wait."
        )
