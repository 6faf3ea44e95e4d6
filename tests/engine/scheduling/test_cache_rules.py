"""Each of the three rules, switched off alone, lets a row read an entry that is not what it should be."""

import random
from collections.abc import Callable

import pytest

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.prefix_keys import PrefixKeys
from specbench.engine.scheduling import cache_rules
from specbench.engine.scheduling.kv_cache import KVCacheManager, PrefixHit
from tests.engine.scheduling.symbolic_device import SymbolicDevice, group, make_request, make_scheduler, run_to_end
from tests.engine.scheduling.test_scheduler import random_prompts


def run_many() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        scheduler = make_scheduler(4, window=6, budget=rng.randint(8, 24), max_num_seqs=4, num_blocks=80)
        requests = [make_request(i, p, rng.randint(4, 20)) for i, p in enumerate(random_prompts(rng, 14))]
        run_to_end(SymbolicDevice(scheduler, seed), requests)


def publish_all_that_is_computed(num_computed: int, num_kept: int, spec: CacheGroupSpec) -> int:
    return num_computed


def free_at_the_window(num_computed: int, spec: CacheGroupSpec) -> int:
    return num_computed - (spec.window - 1)


def key_by_the_block_alone(spec: CacheGroupSpec) -> int:
    return 0


def test_all_rules_on_is_exact():
    run_many()


@pytest.mark.parametrize(
    ("rule", "off", "symptom"),
    [
        ("num_publishable_tokens", publish_all_that_is_computed, "published before the tokens"),
        ("num_unread_tokens", free_at_the_window, "given back|never written"),
        ("num_key_lookahead_tokens", key_by_the_block_alone, "reads a wrong entry"),
    ],
)
def test_without_one_rule_the_oracle_speaks(monkeypatch: pytest.MonkeyPatch, rule: str, off: Callable, symptom: str):
    monkeypatch.setattr(cache_rules, rule, off)
    with pytest.raises(AssertionError, match=symptom):
        run_many()


def test_the_rules_in_numbers():
    multi = group("multi_window", 6, num_prompt_lookahead=8, num_provisional_rows=7)
    target = group("target_window", 6)
    assert cache_rules.num_publishable_tokens(100, 101, target) == 100
    assert cache_rules.num_publishable_tokens(100, 101, multi) == 93
    # A stop inside the accepted drafts: 95 tokens are kept, the last of which nobody has to find.
    assert cache_rules.num_publishable_tokens(100, 95, target) == 94
    assert cache_rules.num_publishable_tokens(100, 95, multi) == 87
    assert cache_rules.num_unread_tokens(100, target) == 95
    assert cache_rules.num_unread_tokens(100, multi) == 88
    assert cache_rules.num_key_lookahead_tokens(multi) == 8


def three_requests() -> None:
    """A = P + a, B = P + b, then C = P + b + c, the prefix P ending on a block's edge."""
    prefix, a, b, c = [0, 1, 2, 0] * 4, [1, 1, 1, 2, 1], [2, 2, 0, 2, 2, 1, 2, 0], [0, 0, 1, 0, 2, 0]
    scheduler = make_scheduler(4, window=6, budget=64, max_num_seqs=1)
    device = SymbolicDevice(scheduler)
    for index, prompt in enumerate((prefix + a, prefix + b, prefix + b + c)):
        request = make_request(index, prompt, 8)
        run_to_end(device, [request])
        assert bool(request.num_cached_prompt_tokens) == (index > 0)


def test_a_block_in_mid_prefix_is_never_one_of_another_continuation():
    three_requests()


def test_dropping_the_last_matched_block_instead_is_not_exact(monkeypatch: pytest.MonkeyPatch):
    """B takes A's blocks but the last, which it computes itself; the key of that one stays with A's block. C matches it
    in mid-prefix, and drops another."""
    find_hit = KVCacheManager.find_hit

    def find_all_but_the_last(self: KVCacheManager, keys: PrefixKeys, num_tokens: int) -> PrefixHit:
        hit = find_hit(self, keys, num_tokens)
        return find_hit(self, keys, (hit.num_blocks - 1) * self.block_size + 1) if hit.num_blocks else hit

    monkeypatch.setattr(cache_rules, "num_key_lookahead_tokens", key_by_the_block_alone)
    monkeypatch.setattr(KVCacheManager, "find_hit", find_all_but_the_last)
    with pytest.raises(AssertionError, match="reads a wrong entry"):
        three_requests()
