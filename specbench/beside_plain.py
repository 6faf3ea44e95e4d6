"""The same requests with and without speculation, after the measured run: is it lossless, and is it faster here.

Belongs here: starting the plain engine, and what is run on both. Does not belong here: the tests and their cells
(evals/losslessness.py), the order of a run (benchmark.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbench import terminal
from specbench.arrivals import ClosedLoad
from specbench.engine.config import EngineConfig
from specbench.evals.losslessness import Sides, Speculation, check_losslessness, judge_texts
from specbench.generate import GenerateListener, GenerateRequest, GenerateResult, Target
from specbench.machinery import Machinery
from specbench.plan import Plan
from specbench.records import BASELINE_FOLDER, LosslessnessCheck

Clock = Callable[[], float]
#: One run each way varies by about as much on its own: a smaller effect is called neither gain nor loss.
_LEAST_ONE_OFF_EFFECT = 0.05
INTERLEAVED_NOTICE = (
    f"A run without speculation took turns with this one, repeat by repeat; it is in the folder {BASELINE_FOLDER}/."
)


@dataclass(frozen=True, slots=True)
class BesidePlain:
    """What the plain engine showed."""

    notices: list[str]
    losslessness: LosslessnessCheck | None


@dataclass(frozen=True, slots=True)
class PlainSide:
    """A run without speculation that took turns with the measured one."""

    engine: Target
    #: Of every request.
    results: list[GenerateResult]


def without_speculation(config: EngineConfig) -> EngineConfig:
    """The same engine, decoding plainly."""
    return dataclasses.replace(config, num_speculative_tokens=0, proposer="none", faults=(), drafts=None)


def run_beside_plain(
    plan: Plan,
    machinery: Machinery,
    engine: Target,
    measured: list[GenerateResult],
    clock: Clock,
    interleaved: PlainSide | None,
) -> BesidePlain:
    """Nothing without speculation; else the plain baseline, where it is asked for, and the eval's own comparison.

    A plain side that was interleaved is a baseline already, and texts are compared with its own.
    """
    spec, num_timed, num_law_draws = plan.config.spec, _num_timed(plan), plan.task.num_law_draws
    if spec.method == "none":
        return BesidePlain([], None if num_law_draws is None else _not_applicable("nothing is drafted"))
    no_baseline = ["No plain baseline was measured: this run does not show whether speculation is faster here."]
    if num_timed == 0 and num_law_draws is None and interleaved is None:
        return BesidePlain(no_baseline, None)
    if interleaved is None:
        plain = machinery.start_engine(without_speculation(plan.engine_config), clock, terminal.status)
    else:
        plain = interleaved.engine
    sides = Sides(
        speculation=Speculation(
            proposer=plan.engine_config.proposer,
            num_speculative_tokens=plan.engine_config.num_speculative_tokens,
            rejection_sample_method=spec.rejection_sample_method,
            is_one_hot=spec.draft_sample_method == "greedy",
            is_fp32=plan.config.model.dtype == "float32",
        ),
        speculative=engine,
        plain=plain,
        load=ClosedLoad(plan.config.side_concurrency),
        replay=lambda result: machinery.check_output(engine, [result], 1),
    )
    if num_timed:
        baseline = _time_both(plan, sides, num_timed, clock)
    elif interleaved is not None:
        baseline = BesidePlain([INTERLEAVED_NOTICE], _judged(plan, sides, measured, interleaved.results))
    else:
        baseline = BesidePlain(no_baseline, None)
    if num_law_draws is None:
        return baseline
    requests = [request for request in plan.requests if request.repeat == 0]
    first = [result for result in measured if result.record.repeat == 0]
    return BesidePlain(baseline.notices, check_losslessness(sides, requests, first, num_law_draws, terminal.status))


def _not_applicable(reason: str) -> LosslessnessCheck:
    return LosslessnessCheck("not_applicable", reason=reason)


def _num_timed(plan: Plan) -> int:
    count = plan.config.report.plain_baseline_requests
    assert count is not None
    return count


def _time_both(plan: Plan, sides: Sides, count: int, clock: Clock) -> BesidePlain:
    """The first requests once on either side, one after the other: how fast, and where texts are to be equal, whether
    they are."""
    terminal.status("measuring plain decoding beside it")
    requests = [request for request in plan.requests if request.repeat == 0][:count]
    speculative, speculative_results = _timed(sides.speculative, requests, sides, clock)
    plain, plain_results = _timed(sides.plain, requests, sides, clock)
    if not (speculative and plain):
        return BesidePlain(["No plain baseline was measured: none of its requests gave a token."], None)
    notice = (
        f"Plain baseline: speculation is {speculative / plain:.3f} times plain decoding ({speculative:,.1f} against "
        f"{plain:,.1f} output tokens/s; the first {len(requests)} requests once each way after the measured run, "
        f"concurrency {plan.config.side_concurrency}; one run each, no interval): "
        f"{one_off_verdict(speculative / plain)}."
    )
    return BesidePlain([notice], _judged(plan, sides, speculative_results, plain_results))


def one_off_verdict(speedup: float) -> str:
    """In words, of one run each way."""
    if abs(speedup - 1) <= _LEAST_ONE_OFF_EFFECT:
        return f"no clear difference (within {_LEAST_ONE_OFF_EFFECT:.0%})"
    return "speculation gains here" if speedup > 1 else "speculation loses here"


def _judged(
    plan: Plan, sides: Sides, speculative: Sequence[GenerateResult], plain: Sequence[GenerateResult]
) -> LosslessnessCheck | None:
    """Texts of the same requests, token for token; None where they need not be equal."""
    params, is_synthetic = plan.requests[0].sampling, plan.config.spec.rejection_sample_method == "synthetic"
    if is_synthetic or (params.temperature > 0 and not sides.speculation.is_one_hot):
        return None
    cell, differences = judge_texts(sides, params, speculative, plain)
    return LosslessnessCheck(cell.status, [cell], differences)


def _timed(
    target: Target, requests: Sequence[GenerateRequest], sides: Sides, clock: Clock
) -> tuple[float, list[GenerateResult]]:
    """Output tokens a second over the requests, after one of them as warm-up, with an empty prefix cache, and their
    results."""
    target.generate(requests[:1], sides.load, GenerateListener(lambda result: None))
    target.reset_prefix_cache()
    results: list[GenerateResult] = []
    start_s = clock()
    target.generate(requests, sides.load, GenerateListener(results.append))
    return sum(result.record.num_output_tokens for result in results) / (clock() - start_s), results
