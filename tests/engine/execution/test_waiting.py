"""No part of a step waits for the device: only settling does, for one event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.engine.llm_engine import LLMEngine
from specbench.engine.proposer_table import PROPOSERS
from tests.engine.devices import DEVICES, ON_CPU
from tests.engine.harness import make_engine, outputs, run, token_request
from tests.engine.proposers.test_sharing import engine_of, recorded, sharing_requests
from tests.engine.test_speculation import ragged_prompts
from tests.engine.tiny_inkling import build_tiny_inkling

#: Operations whose result's shape or value the host has to learn.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}


class WaitCounter(TorchDispatchMode):
    """Counts operations that would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple = (), keywords: dict | None = None
    ) -> object:
        name = function.overloadpacket.__name__
        indices = arguments[1] if name in ("index", "index_put", "index_put_") else ()
        if name in WAITING or any(one is not None and one.dtype == torch.bool for one in indices):
            self.found.append(name)
        return function(*arguments, **(keywords or {}))


@contextmanager
def no_waiting(device: dict) -> Iterator[None]:
    """Raises where something waits: on a GPU by its driver's word, on a CPU by the operations used."""
    if device == ON_CPU:
        with WaitCounter() as counter:
            yield
        assert counter.found == []
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def watch(engine: LLMEngine, device: dict) -> None:
    """From now on every step is queued under `no_waiting`."""
    execute: Callable = engine.runner.execute

    def watched(output: object) -> object:
        with no_waiting(device):
            return execute(output)

    engine.runner.execute = watched


@DEVICES
@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("proposer", [*PROPOSERS, "none"])
def test_steps_of_every_proposer(tiny_folder: Path, tmp_path: Path, proposer: str, has_graphs: bool, device: dict):
    """Chunks, preemptions and hits among them."""
    requests = sharing_requests(seed=3, max_output_tokens=12)
    plain = outputs(make_engine(tiny_folder), requests)
    drafts = recorded(tmp_path / "drafts.jsonl", requests, plain)
    engine = engine_of(
        proposer, tiny_folder, tiny_folder, drafts, 0 if proposer == "none" else 3,
        **device, pipeline_depth=1, prefix_caching=True, cuda_graphs=has_graphs, max_num_batched_tokens=18,
        max_num_seqs=4, max_model_len=60, num_blocks=19,
    )  # fmt: skip
    watch(engine, device)
    assert {name: result.output_token_ids for name, result in run(engine, requests).items()} == plain


@DEVICES
@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5, "min_p": 0.05},
        pytest.param({"temperature": 0.8, "top_p": 0.9}, id="top_p"),
        {"repetition_penalty": 1.3, "presence_penalty": 0.2},
        {"logit_bias": ((5, 2.0),), "allowed_token_ids": (3, 5, 7)},
        {"min_tokens": 3, "stop_token_ids": (4,)},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
    ],
    ids=str,
)
def test_steps_of_every_parameter(tmp_path: Path, sampling: dict, has_graphs: bool, device: dict):
    has_top_p = "top_p" in sampling or (has_graphs and "top_k" in sampling)  # graphs hold all filters
    if has_top_p and device == ON_CPU:
        pytest.skip("there the likeliest ids are looked at first, which asks how many rows are done")
    folder = build_tiny_inkling(tmp_path / "tiny")
    requests = [token_request(f"r{i}", prompt, 8, **sampling) for i, prompt in enumerate(ragged_prompts(3, seed=2))]
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 32}
    engine = make_engine(folder, 2, **device, **sizes, pipeline_depth=1, cuda_graphs=has_graphs)
    watch(engine, device)
    run(engine, requests)


@pytest.mark.parametrize("method", ["standard", "block", "synthetic"])
@DEVICES
def test_steps_of_every_verification(tmp_path: Path, method: str, device: dict):
    folder = build_tiny_inkling(tmp_path / "tiny")
    fields: dict = {"rejection_sample_method": method}
    if method == "synthetic":
        fields["synthetic_acceptance_rates"] = (0.8, 0.4)
    else:
        fields["draft_sample_method"] = "probabilistic"
    requests = [
        token_request(f"r{i}", prompt, 8, temperature=1.0) for i, prompt in enumerate(ragged_prompts(3, seed=2))
    ]
    fields |= {"max_num_seqs": 3, "max_num_batched_tokens": 32}
    engine = make_engine(folder, 2, **device, pipeline_depth=1, cuda_graphs=True, **fields)
    watch(engine, device)
    run(engine, requests)


def test_the_counter_sees_what_waits():
    ids = torch.tensor([1, 2, 3])
    for wait in (lambda: ids[ids > 1], lambda: ids[0].item(), lambda: bool((ids > 1).all()), lambda: ids.nonzero()):
        with pytest.raises(AssertionError), no_waiting(ON_CPU):
            wait()
