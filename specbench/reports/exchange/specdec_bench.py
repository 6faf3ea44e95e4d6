"""The folder that Model-Optimizer's specdec_bench leaves (`--save_dir`), in.

Belongs here: its files and keys. Does not belong here: what becomes of what was read (imported_run.py, imports.py).

    acceptance_rate.json   a list, one entry appended by each run: a histogram of chunk lengths, means of requests
    timing.json            a list likewise: throughput, and statistics of latencies as texts
    configuration.json     how it was run; older versions have none

A chunk of its stream is taken for a step, the prefill's with its one token among them.
"""

from __future__ import annotations

from specbench.errors import UserError
from specbench.reports.exchange.imported_run import (
    ImportedRun,
    Setup,
    acceptance_from_counts,
    distribution_of,
)
from specbench.reports.exchange.result_fields import Fields

TOOL = "specdec_bench"
ACCEPTANCE_FILE, TIMING_FILE, CONFIGURATION_FILE = "acceptance_rate.json", "timing.json", "configuration.json"


def import_specdec(acceptance: Fields, timing: Fields, configuration: Fields) -> ImportedRun:
    """One run of a folder; each of the three may be empty."""
    k = configuration.count("draft_length") or configuration.count("block_size")
    method = (configuration.text("speculative_algorithm") or "").lower() or None
    lengths = _histogram(acceptance)
    is_off = method == "none"
    reported: dict = {"latency": _latency(timing), "throughput": _throughput(timing)}
    num_requests = _num_requests(acceptance)
    if num_requests is not None:
        reported["requests"] = {"completed": num_requests}
    if lengths and not is_off:
        reported["acceptance"] = _acceptance(lengths, k, acceptance)
    temperature = configuration.inner("runtime_params").inner("sampling_kwargs").number("temperature")
    setup = Setup(
        tool=TOOL,
        model=configuration.text("huggingface_model_id") or configuration.text("model_dir"),
        data=configuration.text("dataset"),
        num_samples=num_requests or 0,
        method=method,
        num_speculative_tokens=None if is_off else k,
        tensor_parallel_size=configuration.count("tp_size"),
        concurrency=configuration.count("concurrency"),
        temperature=temperature,
        hardware=_hardware(configuration),
        packages=_packages(configuration),
        started_at=configuration.text("timestamp"),
        notices=_notices(lengths, k, is_off),
    )
    return ImportedRun(setup, reported)


def _histogram(acceptance: Fields) -> dict[int, int]:
    """Chunk length -> how many."""
    inner = acceptance.inner("Acceptance_Length_Histogram")
    try:
        lengths = {int(length): inner.count(length) or 0 for length in inner.values}
    except ValueError:
        raise UserError(f"{inner.source}: its keys must be lengths of chunks") from None
    return {length: count for length, count in sorted(lengths.items()) if count}


def _acceptance(lengths: dict[int, int], k: int | None, acceptance: Fields) -> dict:
    """From lengths: a chunk of n tokens accepted n - 1 drafts. Merged chunks are longer than k + 1."""
    longest = max(max(lengths) - 1, k or 0)
    chunks = {length: count for length, count in lengths.items() if length > 0}
    drafts = sum(chunks.values())
    mean = acceptance.number("Average_AL")
    return acceptance_from_counts(
        num_speculative_tokens=longest,
        drafts=drafts,
        draft_tokens=None if k is None else drafts * k,
        accepted_tokens=sum((length - 1) * count for length, count in chunks.items()),
        accepted_at_position=[
            sum(count for length, count in chunks.items() if length >= position + 2) for position in range(longest)
        ],
        per_request_mean_length=acceptance.number("Average_AR") if mean is None else mean,
    )


def _num_requests(acceptance: Fields) -> int | None:
    for key in ("Request_AL", "Request_AR"):
        if acceptance.has(key):
            return len(acceptance.inner(key).values)
    return None


def _throughput(timing: Fields) -> dict:
    return {
        "output_token_per_s": timing.number("Output TPS"),
        "output_token_per_s_per_device": timing.number("Output TPS/gpu"),
    }


def _latency(timing: Fields) -> dict:
    """TTFT and E2EL only: its step times have the time to the first token among them."""
    latency = {}
    for theirs, ours in (("TTFT Time", "ttft_ms"), ("E2E Request Time", "e2el_ms")):
        entry = timing.inner(theirs)
        mean, median = entry.number("mean"), entry.inner("quantiles").number("0.5")
        if mean is not None:
            latency[ours] = distribution_of(None, 1000 * mean, None if median is None else 1000 * median, None, None)
    return latency


def _hardware(configuration: Fields) -> dict:
    gpu = configuration.text("gpu")
    return {} if gpu is None else {"gpus": [{"name": gpu}]}


def _packages(configuration: Fields) -> dict[str, str]:
    engine, version = configuration.text("engine"), configuration.text("engine_version")
    return {} if engine is None or version is None else {engine.lower(): version}


def _notices(lengths: dict[int, int], k: int | None, is_off: bool) -> list[str]:
    if is_off:
        return []
    if not lengths:
        return ["It has no histogram of acceptance lengths"]
    notices = [
        "Its steps are chunks of a stream: the chunk of the prefill is taken for a step that accepted nothing, and the "
        "last chunk for all that was verified"
    ]
    merged = 0 if k is None else sum(count for length, count in lengths.items() if length > k + 1)
    if merged:
        notices.append(f"{merged:,} chunks have more than {k} + 1 tokens: steps that a slow client saw as one")
    return notices
