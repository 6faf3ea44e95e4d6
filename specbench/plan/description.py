"""A plan in words, for `dry_run=true`."""

from __future__ import annotations

from specbench.engine.execution.memory import memory_text
from specbench.plan.run_plan import Plan
from specbench.run_config import LOAD_KEYS, RunConfig


def describe(plan: Plan) -> str:
    """What would run, for `dry_run=true`."""
    config, data = plan.config, plan.task.data
    engine = plan.engine_config
    from specbench.reports.layout_check import layout_text

    lines = [
        f"model       {plan.choice.requested} -> {plan.choice.ran} ({plan.num_parameters / 1e6:.1f} M parameters, "
        f"{plan.num_modules} MTP modules)",
        f"checkpoint  {plan.choice.path}",
        f"data        {data.name}: {data.num_samples} samples from {data.path or 'the hub'}",
        f"load        {len(plan.requests)} requests, {_load_text(config)}; {config.load.warmup} warm up",
        f"spec        {config.spec.name}: {engine.num_speculative_tokens} drafts a step",
        f"engine      {engine.device}, {engine.dtype}, {engine.max_num_seqs} requests of {engine.max_model_len} "
        f"tokens, cache blocks of {engine.block_size} tokens",
        f"parallel    {layout_text(config.to_dict())}",
        f"memory      {_memory_line(plan)}",
        f"fallback    {'; '.join(_fallbacks(plan)) or 'none'}",
    ]
    if plan.baseline is not None:
        lines.append("baseline    a run without speculation, in turns with this one")
    if config.report.gates:
        against = f", against {config.report.baseline}" if config.report.baseline else ""
        lines.append(f"gates       {len(config.report.gates)}{against}")
    lines += [f"resolved    {line}" for line in plan.differences]
    lines += [f"note        {line}" for line in plan.notices]
    return "\n".join(lines)


def _load_text(config: RunConfig) -> str:
    load = config.load
    if load.name == "closed":
        return f"{load.concurrency} at once"
    keys = ", ".join(f"{key}={getattr(load, key)}" for key in LOAD_KEYS[load.name])
    limit = "" if load.concurrency is None else f", {load.concurrency} out at once at most"
    return " ".join(part for part in (load.name, keys) if part) + limit


def _memory_line(plan: Plan) -> str:
    limit = plan.memory_limit
    bound = "" if limit is None else f"; at most {limit / 2**20:,.1f} MiB by cache.memory_fraction"
    num_ranks = plan.config.parallel.tensor_parallel_size
    of_rank = f", on each of {num_ranks} ranks" if num_ranks > 1 else ""
    return f"{memory_text(plan.plan_memory())}{bound}{of_rank}"


def _fallbacks(plan: Plan) -> list[str]:
    found = []
    if plan.choice.is_fallback:
        found.append(f"{plan.choice.ran} runs in place of {plan.choice.requested}")
    if plan.task.data.packaged:
        found.append(f"{plan.task.data.name} runs in place of {plan.config.eval.name}")
    return found
