"""Measures the engine on one GPU: real shapes, random weights, floors from the same run.

Rules, the same for everyone who is measured: prompts of 1,024 random ids, no end of text, greedy. A batch runs to 128
and to 256 output tokens, and a step takes (T256 - T128) / 128, so that prefill drops out; three runs, the median. Steps
that draft are timed at a synthetic acceptance of 0 (one token a step, so again 128 steps), and tokens a second at the
rates 0.8, 0.62, 0.48, 0.37. The floor of a step is what it must read over the bandwidth of a device copy, or its
operations over the rate of a large matrix product, whichever is longer; both are measured first.
"""
