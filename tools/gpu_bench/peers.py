"""The same work by others, where they are installed: the same prompts, rules and clock, weights as random as ours.

A peer that is not installed, or cannot run the shape, is said to be so. transformers compiles for one to two minutes a
batch size, and vLLM starts for half a minute or more.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .cases import Settings, positive_median, prompt_ids, synchronize

#: Runs prompts to so many output tokens each, and returns when all are there.
Generate = Callable[[Sequence[Sequence[int]], int], None]


def transformers_peer(settings: Settings, folder: Path) -> Generate:
    """A static cache and the compilation that comes with it: its fastest way for a fixed batch."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    with torch.device(settings.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], num_output: int) -> None:
        ids = torch.tensor(prompts, device=settings.device)
        wanted = GenerationConfig(
            max_new_tokens=num_output,
            min_new_tokens=num_output,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            cache_implementation="static",
        )
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=wanted)
        assert output.shape[1] == ids.shape[1] + num_output

    return generate


def vllm_peer(settings: Settings, folder: Path) -> Generate:
    """Its offline interface with what it ships as defaults."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=settings.max_model_len,
        max_num_seqs=max(settings.batch_sizes),
        enable_prefix_caching=False,
    )

    def generate(prompts: Sequence[Sequence[int]], num_output: int) -> None:
        sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": list(ids)} for ids in prompts], sampling, use_tqdm=False)
        assert all(len(one.outputs[0].token_ids) == num_output for one in outputs)

    return generate


PEERS: dict[str, Callable[[Settings, Path], Generate]] = {"transformers": transformers_peer, "vllm": vllm_peer}


def is_installed(peer: str) -> bool:
    return importlib.util.find_spec(peer) is not None


def peer_step_s(peer: str, settings: Settings, folder: Path) -> dict[int, float | None]:
    """Batch -> seconds a step, by the rules that we are measured by; None where it cannot be told."""
    generate = PEERS[peer](settings, folder)
    try:
        return {batch: _step_s(generate, settings, batch) for batch in settings.batch_sizes}
    finally:
        del generate
        gc.collect()


def _step_s(generate: Generate, settings: Settings, batch: int) -> float | None:
    def seconds(num_output: int, seed: int) -> float:
        prompts = [prompt_ids(settings, index, seed) for index in range(batch)]
        synchronize(settings.device)
        start_s = time.perf_counter()
        generate(prompts, num_output)
        synchronize(settings.device)
        return time.perf_counter() - start_s

    short, long = settings.num_outputs
    torch.compiler.reset()  # what was compiled for another batch would make the batch's size a variable
    for num_output in (long, short):  # compiles, and warms up; a cache that held the longer run holds the shorter one
        seconds(num_output, seed=99)
    return positive_median(
        [(seconds(long, seed) - seconds(short, seed)) / (long - short) for seed in range(settings.num_runs)]
    )
