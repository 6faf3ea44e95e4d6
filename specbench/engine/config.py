"""What the embedded engine needs to know, resolved: no `auto`, no `None` that somebody fills in later.

Belongs here: one field a setting. Does not belong here: defaults, ranges and rules for users (run_config.py), what a
checkpoint says (models/).
"""

from __future__ import annotations

from dataclasses import dataclass

from specbench.engine.shard import WHOLE, Shard

#: Wiring mistakes that can be injected into multi-module drafting, to see which table shows them.
FAULTS = (
    "raw_embedding",
    "pre_norm_hidden",
    "post_norm_chain",
    "ignored_window",
    "skipped_reprefill",
    "module_0_everywhere",
    "hidden_off_by_one",
    "deaf_modules",
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The embedded engine's settings."""

    #: Folder with config.json, tokenizer files and safetensors; of random weights, config.json is enough.
    checkpoint: str
    #: "float32" or "bfloat16".
    dtype: str
    #: "cpu", "cuda" or "cuda:N".
    device: str
    #: Tokens of prompt and output together.
    max_model_len: int
    #: Requests that may run at once.
    max_num_seqs: int
    #: Token budget of one step.
    max_num_batched_tokens: int
    #: Tokens of a cache block.
    block_size: int
    #: Blocks of each full-attention group; windowed groups get what max_num_seqs requests can need. None: what
    #: max_num_seqs requests of max_model_len need, as far as memory_limit allows.
    num_blocks: int | None
    #: Drafts a step; 0 is plain decoding.
    num_speculative_tokens: int
    #: "none" or a name in proposer_table.py.
    proposer: str
    #: "chain" (a module gets the previous module's hidden) or "target" (every module gets the target's).
    hidden_feedback: str = "chain"
    #: Verify no more drafts than tokens that max_output_tokens still allows.
    trim_to_max_tokens: bool = False
    #: "greedy" (a draft is the argmax of its logits) or "probabilistic" (drawn at the request's temperature).
    draft_sample_method: str = "greedy"
    #: "standard", "block" or "synthetic": how drafts are accepted (sampling/verification.py).
    rejection_sample_method: str = "standard"
    #: Synthetic only: chance that drafts 0 .. i are all accepted, for each i below k.
    synthetic_acceptance_rates: tuple[float, ...] = ()
    faults: tuple[str, ...] = ()
    #: Of proposer "draft_model": folder of the draft's checkpoint.
    draft_checkpoint: str | None = None
    #: Of proposer "ngram": the newest tokens that must occur before, at least and at most.
    ngram_min: int = 2
    ngram_max: int = 4
    #: Of proposer "stub": a file of JSON lines with `prompt_token_ids` and `output_token_ids`.
    drafts: str | None = None
    #: Of proposer "stub": drafts accepted at each step of a request, over again; or, in its place, the share of steps
    #: that accept more than i drafts, for each position i.
    accepted_counts: tuple[int, ...] | None = None
    accepted_rates: tuple[float, ...] | None = None
    #: "checkpoint", or "random": weights of target and draft are drawn, for speed alone.
    load: str = "checkpoint"
    #: "dequantise" on loading, or "keep" FP8 and NVFP4 matrices in codes, which products convert.
    quantised_weights: str = "dequantise"
    #: A folder or file; None takes the checkpoint's own.
    tokenizer: str | None = None
    #: A Jinja file; None takes the checkpoint's own.
    chat_template: str | None = None
    #: The most bytes that weights, caches and buffers may take together; None: no limit.
    memory_limit: int | None = None
    #: Share the blocks of equal prefixes between requests.
    prefix_caching: bool = False
    #: A name in layers/attention_backends/choose.py.
    attention_backend: str = "torch"
    #: Steps that may be outstanding when the next one is scheduled: 0 or 1.
    pipeline_depth: int = 0
    #: Which rank this is of those that hold the model together; 0 where it is of all of them.
    shard: Shard = WHOLE
    #: Pad steps of decoding to a few shapes and replay what was recorded of these; on a CPU it runs anew, padded.
    cuda_graphs: bool = False
    #: "spawn" (rank 0 starts the others), "torchrun" (they are there already) or "auto".
    rank_start: str = "auto"
    #: Seconds that a step may take on several ranks.
    rank_timeout_s: float = 120.0
    #: "nccl", "one_shot" (few rows through kernels over the GPUs' memory) or "auto": the latter where it can be had.
    rank_all_reduce: str = "auto"
    #: Ranks that share a GPU: more than one for their texts alone, since each has the GPU in turn.
    ranks_per_gpu: int = 1
