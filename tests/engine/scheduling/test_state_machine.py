"""Any order of arrivals, steps, aborts, preemptions, evictions and resets: no entry read that is not right, no block in
two states, no write where others can see it, and after draining nothing is held.

The symbolic device checks every read and write of every step. SPECBENCH_STATE_MACHINE_EXAMPLES sets the number of
examples of the long form.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from specbench.engine.request import Request
from tests.engine.scheduling.symbolic_device import VOCAB, SymbolicDevice, make_request, make_scheduler, plain_text

#: Prompts go on from one of these, so that many share blocks.
PREFIXES = ([0, 1, 2] * 8, [0, 1, 2] * 4 + [1] * 12, [2] * 24)
MAX_MODEL_LEN = 48


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler, one symbolic device."""

    @initialize(
        k=st.sampled_from([0, 1, 2, 4, 8]),
        drafter=st.sampled_from(["multi", "single", "draft_model"]),
        window=st.sampled_from([1, 3, 6, 12]),
        block_size=st.sampled_from([3, 4, 8]),
        spare_blocks=st.integers(0, 30),
        budget=st.integers(1, 40),
        max_num_seqs=st.integers(1, 4),
        depth=st.integers(0, 1),
        prefix_caching=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def start(
        self, k: int, drafter: str, window: int, block_size: int, spare_blocks: int, budget: int, max_num_seqs: int,
        depth: int, prefix_caching: bool, seed: int,
    ) -> None:  # fmt: skip
        settings = {"drafter": drafter, "window": window, "block_size": block_size, "budget": budget, "depth": depth}
        settings |= {"max_num_seqs": max_num_seqs, "prefix_caching": prefix_caching, "max_model_len": MAX_MODEL_LEN}
        longest = make_request(0, [0] * (MAX_MODEL_LEN - 1), 1)
        probe = make_scheduler(k, num_blocks=10_000, **settings)
        needed = max(probe.kv_cache.blocks_needed(spec, probe.longest_extent(longest)) for spec in probe.kv_cache.specs)
        self.scheduler = make_scheduler(k, num_blocks=1 + needed + spare_blocks, **settings)
        self.device = SymbolicDevice(self.scheduler, seed)
        self.requests: list[Request] = []
        self.released: Counter[int] = Counter()
        self.aborted: set[int] = set()

    def live(self) -> list[Request]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def count_gone(self, gone: list[Request]) -> None:
        self.released.update(request.generation for request in gone)

    @rule(data=st.data(), prefix=st.sampled_from(PREFIXES), max_output=st.integers(1, 20))
    def add(self, data: st.DataObject, prefix: list[int], max_output: int) -> None:
        shared = data.draw(st.integers(0, len(prefix)))
        own = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if shared else 1, max_size=12))
        prompt = (prefix[:shared] + own)[: MAX_MODEL_LEN - 1]
        request = make_request(len(self.requests), prompt, min(max_output, MAX_MODEL_LEN - len(prompt)))
        self.requests.append(request)
        self.scheduler.add(request)

    @precondition(lambda self: self.live())
    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.count_gone(self.device.step())

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([one for one in self.live() if not one.is_finished] or [None]))
        if request is not None:
            self.aborted.add(request.generation)
            if self.scheduler.abort(request):
                self.count_gone([request])

    @precondition(lambda self: any(not one.in_flight and not one.is_finished for one in self.scheduler.running))
    @rule()
    def preempt(self) -> None:
        idle = [one for one in self.scheduler.running if not one.in_flight and not one.is_finished]
        self.scheduler._requeue(idle[-1])

    @rule(count=st.integers(1, 20))
    def evict(self, count: int) -> None:
        """Somebody else needs blocks for a moment."""
        for pool in self.scheduler.kv_cache.pools:
            pool.give_back(pool.take(min(count, pool.num_free)))

    @rule()
    def reset(self) -> None:
        self.scheduler.kv_cache.forget_all()

    @invariant()
    def blocks_are_in_one_state(self) -> None:
        if hasattr(self, "device"):
            self.device.check_blocks()

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        num_steps = 0
        while self.scheduler.has_requests:
            self.count_gone(self.device.step())
            num_steps += 1
            assert num_steps < 5000, "no end"
        assert self.scheduler.kv_cache.num_blocks_used == 0
        assert self.released == Counter(request.generation for request in self.requests)
        for request in self.requests:
            assert request.output_token_ids == plain_text(request.prompt_token_ids, request.num_output_tokens)
            assert request.num_output_tokens >= 1 or request.generation in self.aborted


def run_machine(max_examples: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_events():
    run_machine(500)


@pytest.mark.slow
def test_any_order_of_events_at_length():
    run_machine(int(os.environ.get("SPECBENCH_STATE_MACHINE_EXAMPLES", "20000")))
