"""Multi-module drafting against an oracle that recomputes every module from scratch.

The reference sequence of a pass is the committed tokens followed by the pass's own drafts: row p of module m is a
function of tokens up to p + m + 1 of it. After every pass the newest output at every row 0 .. P of every module, and
every draft, must equal the oracle's.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from specbench.engine.llm_engine import LLMEngine
from specbench.errors import UserError
from tests.engine.harness import make_engine, token_request
from tests.engine.oracle import Oracle
from tests.engine.test_speculation import force_accepted
from tests.engine.tiny_inkling import build_tiny_inkling

VOCAB = 250
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"), num_modules=8)


class PassRecorder:
    """Keeps, for every request row, the newest live output of every module at every position."""

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        self.proposer = engine.runner.proposer
        self.batches: list = []
        # persistent row -> module -> position -> hidden
        self.outputs: dict[int, list[dict[int, torch.Tensor]]] = {}
        self._wrap()

    def _wrap(self) -> None:
        modules, propose = self.proposer.modules.modules, self.proposer.propose
        builder = self.proposer.modules.metadata_builder
        forward_module, build = modules.forward_module, builder.build
        state: dict = {}

        def recording_build(block_tables, layout):
            state["layout"] = layout
            return build(block_tables, layout)

        def recording_forward(module, token_embeds, hidden, metadata, caches):
            output = forward_module(module, token_embeds, hidden, metadata, caches)
            layout, batch = state["layout"], state["batch"]
            for index, row in enumerate(batch.rows.tolist()):
                start = int(layout.query_start_loc_np[index])
                for offset in range(int(layout.num_live[index])):
                    position = int(layout.first_position[index]) + offset
                    self.outputs[row][module][position] = output[start + offset].clone()
            return output

        def recording_propose(batch):
            state["batch"] = batch
            for index, row in enumerate(batch.rows.tolist()):
                if int(batch.first_position[index]) == 0:
                    self.outputs[row] = [{} for _ in range(self.proposer.num_modules)]
            propose(batch)
            self.batches.append(batch)

        modules.forward_module = recording_forward
        builder.build = recording_build
        self.proposer.propose = recording_propose

    def check_last_pass(self, oracle: Oracle) -> int:
        """Compare every row of every module of every request of the last pass; returns the rows compared."""
        batch = self.batches[-1]
        num_modules = self.proposer.num_modules
        num_rows = 0
        for index, row in enumerate(batch.rows.tolist()):
            newest = int(batch.first_position[index] + batch.num_valid[index]) - 1
            column = int(batch.draft_columns[index])
            is_partial = column == self.engine.runner.state.spill_column
            pool = batch.token_pool[row]
            tokens = pool[: newest + 1 + num_modules].tolist() if is_partial else pool[: column + num_modules].tolist()
            if not is_partial:
                assert column == newest + 2
            for module, (hidden, logits) in enumerate(oracle.mtp_chain(tokens, num_modules)):
                recorded = self.outputs[row][module]
                for position in range(newest + 1):
                    difference = (recorded[position] - hidden[position]).abs().max()
                    assert difference < TOLERANCE, (module, position, newest, float(difference))
                    num_rows += 1
                if not is_partial:
                    assert int(logits[newest].argmax()) == tokens[newest + 2 + module]
        return num_rows


def run_and_check(engine: LLMEngine, oracle: Oracle, requests: list) -> int:
    recorder = PassRecorder(engine)
    for request in requests:
        engine.add_request(request, 0.0)
    num_rows = 0
    while engine.has_requests:
        num_passes = len(recorder.batches)
        engine.step()
        if len(recorder.batches) > num_passes:
            num_rows += recorder.check_last_pass(oracle)
    return num_rows


@pytest.mark.parametrize("num_modules", [1, 2, 3, 5, 8])
def test_every_row_of_every_module_equals_the_oracle(folder: Path, monkeypatch: pytest.MonkeyPatch, num_modules: int):
    oracle = Oracle(folder)
    rng = random.Random(num_modules)
    # Each count 0 .. N follows each other: all pairs, shuffled.
    every = range(num_modules + 1)
    counts = [count for first in every for second in every for count in (first, second)]
    force_accepted(monkeypatch, counts + [rng.randint(0, num_modules) for _ in range(1000)], VOCAB)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 7, 13)]
    engine = make_engine(folder, num_modules, max_num_seqs=4)
    requests = [token_request(f"r{i}", prompt, 40) for i, prompt in enumerate(prompts)]
    assert run_and_check(engine, oracle, requests) > 1000


@pytest.mark.parametrize("budget_above", range(9))
def test_every_prompt_length_at_every_chunk_size(folder: Path, monkeypatch: pytest.MonkeyPatch, budget_above: int):
    num_modules = 8
    oracle = Oracle(folder)
    rng = random.Random(budget_above)
    force_accepted(monkeypatch, [rng.randint(0, num_modules) for _ in range(10_000)], VOCAB)
    engine = make_engine(folder, num_modules, max_num_seqs=3, max_num_batched_tokens=num_modules + budget_above)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in range(1, 21)]
    requests = [token_request(f"r{i}", prompt, 6) for i, prompt in enumerate(prompts)]
    run_and_check(engine, oracle, requests)


def test_rejecting_everything_after_a_one_token_prompt_reads_no_row_that_does_not_exist(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    force_accepted(monkeypatch, [0] * 1000, VOCAB)
    engine = make_engine(folder, 8, max_num_seqs=2)
    # The first occupant leaves its hiddens in the window of the row that the second takes over.
    requests = [token_request(f"r{i}", [3 + i], 12) for i in range(4)]
    run_and_check(engine, Oracle(folder), requests)


def test_fewer_drafts_than_modules_are_verified_exactly(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Near the context's end and the cap k shrinks: stale rows follow from what was accepted, not from rejections."""
    rng = random.Random(0)
    force_accepted(monkeypatch, [rng.randint(0, 8) for _ in range(1000)], VOCAB)
    engine = make_engine(folder, 8, max_model_len=40, trim_to_max_tokens=True)
    requests = [token_request(f"r{i}", [rng.randrange(VOCAB) for _ in range(20 + i)], 30 - 5 * i) for i in range(4)]
    run_and_check(engine, Oracle(folder), requests)


def test_a_budget_that_cuts_drafts_short_is_exact(folder: Path, monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(1)
    force_accepted(monkeypatch, [rng.randint(0, 8) for _ in range(1000)], VOCAB)
    engine = make_engine(folder, 8, max_num_seqs=4, max_num_batched_tokens=13)
    requests = [token_request(f"r{i}", [rng.randrange(VOCAB) for _ in range(9)], 20) for i in range(4)]
    run_and_check(engine, Oracle(folder), requests)


def test_a_budget_below_the_number_of_modules_is_refused(folder: Path):
    with pytest.raises(UserError, match=r"engine.max_num_batched_tokens=7 .* 8"):
        make_engine(folder, 8, max_num_batched_tokens=7)


@pytest.mark.parametrize(
    "fault",
    [
        "raw_embedding",
        "pre_norm_hidden",
        "post_norm_chain",
        "ignored_window",
        "skipped_reprefill",
        "module_0_everywhere",
        "hidden_off_by_one",
    ],
)
def test_the_oracle_notices_every_fault(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str):
    rng = random.Random(2)
    force_accepted(monkeypatch, [rng.randint(0, 4) for _ in range(1000)], VOCAB)
    engine = make_engine(folder, 4, faults=(fault,))
    requests = [token_request("r", [rng.randrange(VOCAB) for _ in range(20)], 20)]
    with pytest.raises((AssertionError, KeyError)):
        run_and_check(engine, Oracle(folder), requests)


def test_rejected_rows_and_other_requests_are_never_written(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Canaries in every block that no running request owns, and in the null block, survive a whole run."""
    rng = random.Random(3)
    force_accepted(monkeypatch, [rng.randint(0, 8) for _ in range(1000)], VOCAB)
    engine = make_engine(folder, 8, max_num_seqs=2)
    canary = 1234.5
    for pool in engine.caches.values():
        for layer in pool.layers:
            for stream in layer:
                stream[4:-1] = canary
    pools = engine.scheduler.kv_cache.pools
    owned: list[set[int]] = [set() for _ in pools]

    def recording_take(pool, taken):
        take = pool.take

        def wrapper(count):
            block_ids = take(count)
            taken.update(block_ids)
            return block_ids

        return wrapper

    for pool, taken in zip(pools, owned, strict=True):
        monkeypatch.setattr(pool, "take", recording_take(pool, taken))
    for index in range(2):
        engine.add_request(token_request(f"r{index}", [rng.randrange(VOCAB) for _ in range(9 + index)], 15), 0.0)
    while engine.has_requests:
        engine.step()
    for group, pool in enumerate(engine.caches.values()):
        never = [block for block in range(1, pools[group].num_blocks) if block not in owned[group]]
        assert never, "the test needs blocks that nobody owned"
        for layer in pool.layers:
            for stream in layer:
                assert (stream[:4] == 0).all(), "the null block stays zero"
                for block in never:
                    assert (stream[block * 4 : block * 4 + 4] == canary).all()
