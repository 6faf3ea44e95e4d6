"""The three rules that keep cached blocks exact, each a function of counts and of what a group declares.

Belongs here: which tokens' entries are final (write), which are never read again (free), which tokens an entry was
computed from (read). Does not belong here: blocks, requests.

Row p of a target reads tokens up to p. Row p of module m of a multi-module drafter reads tokens up to p + m + 1, the
last of which may be drafts: its newest N - 1 rows are provisional, and a later pass runs them again. A single module
reads one token ahead and rewrites nothing; a draft model reads none ahead, and after a step in which all its drafts
were accepted its newest row is yet to be written.
"""

from __future__ import annotations

from specbench.engine.cache_group import CacheGroupSpec


def num_publishable_tokens(num_computed: int, num_kept: int, spec: CacheGroupSpec) -> int:
    """Write: the leading tokens whose entries no pass of this request writes again.

    num_computed: confirmed computed tokens. num_kept: prompt and output tokens that survive the stop conditions; what
    was computed for tokens behind a stop belongs to no request's text.
    """
    return min(num_computed, num_kept - 1) - spec.num_provisional_rows


def num_unread_tokens(num_computed: int, spec: CacheGroupSpec) -> int:
    """Free: the leading tokens that no later row of this request reads or writes.

    The next row is at position num_computed; a drafter may first run its provisional rows again, and each of them reads
    a window of its own.
    """
    assert spec.window is not None
    return num_computed - spec.num_provisional_rows - (spec.window - 1)


def num_key_lookahead_tokens(spec: CacheGroupSpec) -> int:
    """Read: the tokens behind a block's end that its entries were computed from, and its key must cover.

    A request that matches therefore knows this many tokens behind the hit: the chunk that follows fills the drafter's
    window anew, and its stale rows, at most N - 1, never reach back into a shared block.
    """
    return spec.num_prompt_lookahead
