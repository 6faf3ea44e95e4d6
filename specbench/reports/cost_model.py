"""Where the time of a run goes, and what another k would have made of it.

Belongs here: times by kind of step and by batch, predicted speed for every k, the `cost_model` block of metrics.json,
and the same over the runs of a sweep. Does not belong here: the law (cost_law.py), tokens a step with fewer drafts
(shorter_drafts.py), text (cost_section.py).

Speed is that of steps in decode: tokens kept a step of one request, over the seconds of the step. Prompts, idle time
and tails come on top in a whole run. A speed-up is against k = 0 by the same law, so unless a run without speculation
is among those fitted, it is extrapolated to fewer rows than any step had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.records import EngineStep
from specbench.reports.acceptance import ratio
from specbench.reports.conditions import BUCKETS
from specbench.reports.cost_law import MIN_STEPS, CostLaw, PartLaw, fit_laws
from specbench.reports.shorter_drafts import KeptTokens, kept_tokens
from specbench.reports.step_columns import StepColumns
from specbench.reports.step_costs import StepCosts, step_costs

#: k within this share of the best speed are as good as the best.
FLAT_SHARE = 0.02
_COEFFICIENTS = ("step_ms", "request_ms", "row_ms", "root_row_ms", "prompt_row_ms", "prompt_chunk_ms")
#: Steps further from the median than this many robust standard deviations are pauses of the machine.
_PAUSE_DEVIATIONS = 5.0
#: A step in decode that takes over so many times the median of those with about as many rows has been held up.
HELD_UP_RATIO = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class CostedRun:
    """One run of a sweep."""

    label: str
    costs: StepCosts
    #: Tokens a step for 0..k drafts, as its own text tells.
    kept: list[KeptTokens]


def costed_run(label: str, columns: StepColumns, engine_steps: Sequence[EngineStep], k: int) -> CostedRun | None:
    """None for a run that recorded no engine steps."""
    costs = step_costs(columns, engine_steps, k)
    return None if costs is None else CostedRun(label, costs, kept_tokens(columns, k))


# ---- One run


def cost_metrics(columns: StepColumns, engine_steps: Sequence[EngineStep], k: int) -> dict:
    """The `cost_model` block. `reason` says why there is no law; without engine steps nothing else is measured."""
    run = costed_run("", columns, engine_steps, k)
    if run is None:
        return _nothing("no engine steps were recorded")
    fitted = fit_laws([run.costs])
    laws = fitted.laws
    return {
        "reason": fitted.reason,
        "steps": len(run.costs.step_s),
        "time": _time(run.costs),
        "held_up": _held_up(run.costs),
        "by_batch": [_batch_row(run.costs, batch) for batch in frequent_batches(run.costs)],
        "laws": [_law_metrics(law) for law in laws],
        "tokens_per_step": [{"k": one.k, "tokens": one.tokens, "low": one.low, "high": one.high} for one in run.kept],
        "predictions": [_prediction(laws, run, batch) for batch in frequent_batches(run.costs)] if laws else [],
    }


def _nothing(reason: str) -> dict:
    lists = ("by_batch", "laws", "tokens_per_step", "predictions")
    return {"reason": reason, "steps": 0, "time": None, "held_up": _held_up(None), **{name: [] for name in lists}}


def frequent_batches(costs: StepCosts) -> list[int]:
    """Of each bucket of batch sizes the commonest, where enough steps in decode had it."""
    batches, count = np.unique(costs.num_requests[costs.is_decode_only], return_counts=True)
    bucket = BUCKETS["by_batch_size"].index(batches)
    best = [int(np.flatnonzero(bucket == one)[np.argmax(count[bucket == one])]) for one in np.unique(bucket)]
    return [int(batches[index]) for index in best if count[index] >= MIN_STEPS]


def _time(costs: StepCosts) -> dict[str, float | None]:
    """Seconds from the first arrival to the last step: by kind of step, and by part."""
    has_prompt, decodes = costs.num_prompt_tokens > 0, costs.num_requests > 0
    in_steps = float(costs.step_s.sum())
    return {
        "duration_s": costs.duration_s,
        "decode_s": float(costs.step_s[costs.is_decode_only].sum()),
        "decode_with_prompt_s": float(costs.step_s[has_prompt & decodes].sum()),
        "prompt_s": float(costs.step_s[~decodes].sum()),
        "between_s": max(costs.duration_s - in_steps, 0.0),
        "target_s": _sum(costs.target_s),
        "verify_s": _sum(costs.verify_s),
        "draft_s": _sum(costs.draft_s),
        "host_s": _sum(costs.host_s),
    }


def _held_up(costs: StepCosts | None) -> dict[str, float | None]:
    """Steps in decode that took HELD_UP_RATIO times what steps with about as many rows do, and their share of the time.

    Alike are rows within a power of two; kinds of fewer than MIN_STEPS steps are not judged, and None where all are.
    """
    judged_s, held_up_s, num_judged, num_held_up = 0.0, np.zeros(1), 0, 0
    for step_s in [] if costs is None else _alike(costs):
        is_held_up = step_s > HELD_UP_RATIO * np.median(step_s)
        judged_s, num_judged = judged_s + float(step_s.sum()), num_judged + len(step_s)
        held_up_s, num_held_up = np.append(held_up_s, step_s[is_held_up]), num_held_up + int(is_held_up.sum())
    if not judged_s:
        return {"judged": 0, "steps": None, "share": None, "longest_ms": None}
    share, longest_ms = float(held_up_s.sum()) / judged_s, 1000 * float(held_up_s.max())
    return {"judged": num_judged, "steps": num_held_up, "share": share, "longest_ms": longest_ms or None}


def _alike(costs: StepCosts) -> list[np.ndarray]:
    """Seconds of steps in decode, by powers of two of their rows; kinds of at least MIN_STEPS."""
    octave = np.log2(np.maximum(costs.num_rows[costs.is_decode_only], 1)).astype(np.int64)
    step_s = costs.step_s[costs.is_decode_only]
    kinds = (step_s[octave == one] for one in np.unique(octave))
    return [kind for kind in kinds if len(kind) >= MIN_STEPS]


def _sum(seconds: np.ndarray) -> float | None:
    """None where any of them was not measured."""
    total = float(seconds.sum())
    return total if np.isfinite(total) else None


def _batch_row(costs: StepCosts, batch: int) -> dict:
    chosen = costs.at_batch(batch)
    parts = ("step", "target", "verify", "draft", "host")
    seconds = (costs.step_s, costs.target_s, costs.verify_s, costs.draft_s, costs.host_s)
    return {
        "batch": batch,
        "steps": int(chosen.sum()),
        "rows": float(costs.num_rows[chosen].mean()),
        **{f"{part}_ms": _mean_ms(one[chosen]) for part, one in zip(parts, seconds, strict=True)},
        "tokens_per_request_step": _tokens_per_request(costs, chosen),
    }


def _mean_ms(seconds: np.ndarray) -> float | None:
    mean = 1000 * float(seconds.mean())
    return mean if np.isfinite(mean) else None


def _tokens_per_request(costs: StepCosts, chosen: np.ndarray) -> float | None:
    kept = float(costs.num_kept_tokens[chosen].sum())
    return ratio(kept, float(costs.num_requests[chosen].sum())) if np.isfinite(kept) else None


def _law_metrics(law: CostLaw) -> dict:
    parts = {"target": law.target, "draft_pass": law.draft_pass, "host": law.host}
    return {"name": law.name, **{name: None if part is None else _part_metrics(part) for name, part in parts.items()}}


def _part_metrics(part: PartLaw) -> dict:
    milliseconds = (1000 * float(value) for value in part.coefficients)
    return {
        **dict(zip(_COEFFICIENTS, milliseconds, strict=True)),
        "residual": part.residual,
        "left_out_steps": part.num_left_out,
        "left_out_share": part.left_out_share,
    }


def _prediction(laws: Sequence[CostLaw], run: CostedRun, batch: int) -> dict:
    """Speed-ups at one batch size, from the lowest to the highest that the laws give."""
    speeds = [law_speeds(law, run.kept, batch) for law in laws]
    k = run.costs.k
    return {
        "batch": batch,
        "by_k": [
            {
                "k": one.k,
                **_range("step_ms", [_milliseconds(law.step_s(batch, one.k)) for law in laws]),
                **_range("speedup", [_over(speed, one.k, 0) for speed in speeds]),
                **_range("against_this_run", [_over(speed, one.k, k) for speed in speeds]),
            }
            for one in run.kept
        ],
        "best_k": [best_and_flat(speed) for speed in speeds],
        **_range("break_even_tokens", [_steps_over(law, batch, k, 0) for law in laws]),
        **_range("perfect_speedup", [_scaled(_steps_over(law, batch, 0, k), k + 1) for law in laws]),
    }


def law_speeds(law: CostLaw, kept: Sequence[KeptTokens], batch: int) -> dict[int, float | None]:
    """k -> tokens a second of each of `batch` requests."""
    seconds = {one.k: law.step_s(batch, one.k) for one in kept}
    return {one.k: _quotient(one.tokens, seconds[one.k]) for one in kept}


def best_and_flat(speeds: dict[int, float | None]) -> dict[str, int] | None:
    """The fastest k, and the lowest and highest of those as good; None where any speed is unknown."""
    known = {k: speed for k, speed in speeds.items() if speed is not None}
    if not known or len(known) < len(speeds):
        return None
    best = max(known, key=lambda k: known[k])
    flat = [k for k, speed in known.items() if speed >= (1 - FLAT_SHARE) * known[best]]
    return {"best": best, "flat_from": min(flat), "flat_to": max(flat)}


def _range(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    is_known = len(known) == len(values) > 0
    return {f"{name}_low": min(known) if is_known else None, f"{name}_high": max(known) if is_known else None}


def _quotient(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def _over(speeds: dict[int, float | None], k: int, base: int) -> float | None:
    return _quotient(speeds[k], speeds[base])


def _steps_over(law: CostLaw, batch: int, k: int, base: int) -> float | None:
    return _quotient(law.step_s(batch, k), law.step_s(batch, base))


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _milliseconds(seconds: float | None) -> float | None:
    return _scaled(seconds, 1000)


# ---- Several runs


def sweep_cost_model(runs: Sequence[CostedRun]) -> dict:
    """One law over runs of one model, workload and machine; what it says of each, against what was measured.

    Beside it stands what the run with the most drafts would have predicted by itself. Whether the runs may be put
    together is for the caller to know.
    """
    fitted = fit_laws([run.costs for run in runs])
    if not fitted.laws:
        return {"reason": fitted.reason, "laws": [], "batches": []}
    longest = max(runs, key=lambda run: run.costs.k)
    laws, alone = fitted.laws, fit_laws([longest.costs]).laws
    batches = sorted({batch for run in runs for batch in frequent_batches(run.costs)})
    compared = [_sweep_batch(runs, laws, alone, longest, batch) for batch in batches]
    return {
        "reason": None,
        "laws": [_law_metrics(law) for law in laws],
        "batches": [entry for entry in compared if len(entry["runs"]) > 1],
    }


def _sweep_batch(
    runs: Sequence[CostedRun], laws: Sequence[CostLaw], alone: Sequence[CostLaw], longest: CostedRun, batch: int
) -> dict:
    measured = [(run, speed) for run in runs if (speed := measured_speed(run.costs, batch)) is not None]
    plain = [speed for run, speed in measured if run.costs.k == 0]
    base = plain[0] if plain else None
    together = [law_speeds(law, longest.kept, batch) for law in laws]
    by_itself = [law_speeds(law, longest.kept, batch) for law in alone]
    return {
        "batch": batch,
        "longest": longest.label,
        "runs": [_sweep_run(run, speed, base, laws, together, by_itself, batch) for run, speed in measured],
        "best_measured": _best_measured(measured),
        "best_k": [best_and_flat(speed) for speed in together],
    }


def _sweep_run(
    run: CostedRun,
    speed: float,
    base: float | None,
    laws: Sequence[CostLaw],
    together: Sequence[dict[int, float | None]],
    by_itself: Sequence[dict[int, float | None]],
    batch: int,
) -> dict:
    k, chosen = run.costs.k, run.costs.at_batch(batch)
    step_ms = 1000 * float(without_pauses(run.costs.step_s[chosen]).mean())
    law_ms = _range("law_step_ms", [_milliseconds(law.step_s(batch, k)) for law in laws])
    speedup = _quotient(speed, base)
    return {
        "label": run.label,
        "k": k,
        "steps": int(chosen.sum()),
        "step_ms": step_ms,
        **law_ms,
        "tokens_per_request_step": _tokens_per_request(run.costs, chosen),
        "speed": speed,
        "speedup": speedup,
        **_range("law_speedup", [_over(one, k, 0) if k in one else None for one in together]),
        **_range("alone_speedup", [_over(one, k, 0) if k in one else None for one in by_itself]),
    }


def measured_speed(costs: StepCosts, batch: int) -> float | None:
    """Tokens a second of each of `batch` requests in decode; None under MIN_STEPS steps."""
    chosen = costs.at_batch(batch)
    if chosen.sum() < MIN_STEPS:
        return None
    return _quotient(_tokens_per_request(costs, chosen), float(without_pauses(costs.step_s[chosen]).mean()))


def without_pauses(seconds: np.ndarray) -> np.ndarray:
    """Those that lie near the median: another process on the machine is no cost of a step."""
    distance = np.abs(seconds - np.median(seconds))
    return seconds[distance <= max(_PAUSE_DEVIATIONS * 1.4826 * float(np.median(distance)), 1e-12)]


def _best_measured(measured: Sequence[tuple[CostedRun, float]]) -> str | None:
    return max(measured, key=lambda pair: pair[1])[0].label if measured else None
