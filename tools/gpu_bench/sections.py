"""The sections of the benchmark: each measures its cases, prints a table and returns verdicts.

Belongs here: which cases, which floor, which goal. Does not belong here: how a case is timed (cases.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.llm_engine import LLMEngine
from specbench.model_choice import PACKAGED_CHECKPOINT

from . import goals, published
from .attention import attention_time, cache_bytes, timed_backends
from .cases import ACCEPTANCE_RATES, BatchRun, Drafting, EngineShelf, Settings, StepTime, measure_step, run_batch
from .ceilings import Ceilings
from .floors import ShapeBytes, kv_read, shape_bytes
from .goals import Verdict, quotient
from .loading import disk_bytes_per_s, load_bytes_per_s, write_checkpoint
from .peers import is_installed, peer_step_s
from .prefill import KIND_HEADER, closed_run, prompt_token_per_s, step_kinds
from .recording import host_seconds, recording_cost, request_line_seconds
from .shapes import expert_counts, open_shape, shape_folder

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Measured:
    """A step and its floors."""

    time: StepTime
    floor_s: float
    #: Of the drafts alone; 0 where they cost nothing.
    draft_floor_s: float

    @property
    def ratio(self) -> float | None:
        return quotient(self.time.step_s, self.floor_s)


@dataclass(frozen=True, slots=True)
class Bench:
    """What every section works with."""

    settings: Settings
    ceilings: Ceilings
    shelf: EngineShelf
    #: What was measured already: sections look at the same step from several sides.
    known: dict[tuple, Measured] = field(default_factory=dict)

    def folder(self, shape: str) -> Path:
        return shape_folder(shape, self.settings.scratch if self.settings.is_small else None)

    def published(self, table: Mapping[Key, dict[int, float]], key: Key) -> dict[int, float]:
        """Batch -> another engine's figure; nothing where the shapes are tiny."""
        return {} if self.settings.is_small else table.get(key, {})

    def measure(self, shape: str, drafting: Drafting, batch: int, **changes: object) -> Measured:
        """A step by the rules, once a run of the benchmark."""
        key = (shape, drafting, batch, *changes.items())
        if key not in self.known:
            engine = self.shelf.engine(self.settings, self.folder(shape), drafting, **changes)
            time = measure_step(engine, self.settings, batch)
            draft_floor_s = self.draft_floor_s(shape, engine.memory.specs, batch, drafting.num_drafts)
            target_floor_s = self.target_floor_s(shape, engine.memory.specs, batch, drafting.num_drafts + 1)
            self.known[key] = Measured(time, target_floor_s + draft_floor_s, draft_floor_s)
        return self.known[key]

    def target_floor_s(self, shape: str, specs: Sequence[CacheGroupSpec], batch: int, num_rows: int) -> float:
        """A forward of `num_rows` rows a request, head included."""
        weights = self._bytes_of(shape)
        return self.ceilings.floor_s(
            weights.target_read(batch * num_rows) + batch * kv_read(specs, "target", self.settings.mean_context),
            weights.target_operations(batch * num_rows),
        )

    def draft_floor_s(self, shape: str, specs: Sequence[CacheGroupSpec], batch: int, num_drafts: int) -> float:
        """Drafts of MTP modules; other drafts are taken to cost nothing."""
        weights = self._bytes_of(shape)
        if not num_drafts or not weights.modules:
            return 0.0
        passes = num_drafts if len(weights.modules) == 1 else 1  # several modules are one pass over their caches
        kv_bytes = batch * passes * kv_read(specs, "draft", self.settings.mean_context)
        return self.ceilings.floor_s(weights.draft_read(num_drafts) + kv_bytes, 0)

    def prompt_floor_s(self, shape: str) -> float:
        """The products of a prompt's rows, of which the last alone needs the head; attention is not counted."""
        weights = self._bytes_of(shape)
        num_rows = self.settings.num_prompt
        head_operations = weights.head * (num_rows - 1)  # two for each number of two bytes
        return (weights.target_operations(num_rows) - head_operations) / self.ceilings.operations_per_s

    def _bytes_of(self, shape: str) -> ShapeBytes:
        folder = self.folder(shape)
        checkpoint = open_shape(folder, self.settings.quantised_weights(folder))
        return shape_bytes(checkpoint, *expert_counts(checkpoint))


HEADER = (
    f"{'case':<30}{'batch':>6}{'step ms':>9}{'spread':>8}{'floor':>8}{'ratio':>7}{'target':>8}{'verify':>8}{'draft':>8}"
    f"{'gap':>7}{'tok/s':>9}{'drafts':>7}  published"
)


def print_step(case: str, measured: Measured, peer: str = "") -> None:
    def ms(value: float | None) -> str:
        return "n/a" if value is None else f"{1e3 * value:.3f}"

    def share(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.1%}"

    time = measured.time
    ratio = "n/a" if measured.ratio is None else f"{measured.ratio:.2f}"
    print(
        f"{case:<30}{time.batch:>6}{ms(time.step_s):>9}{share(time.spread):>8}{ms(measured.floor_s):>8}{ratio:>7}"
        f"{ms(time.target_s):>8}{ms(time.verify_s):>8}{ms(time.draft_s):>8}{share(time.gap_share):>7}"
        f"{time.token_per_s:>9.0f}{time.drafts_a_step:>7.2f}  {peer}",
        flush=True,
    )


def _peer(table: dict[int, float], batch: int, name: str = "vLLM") -> str:
    return f"{name} {table[batch]:.2f} ms" if batch in table else ""


def decode(bench: Bench) -> list[Verdict]:
    """Plain decoding of dense, mixture and Inkling shapes."""
    verdicts = []
    for shape in bench.settings.shapes:
        peer = bench.published(published.VLLM_STEP_MS, (shape, 0))
        other = bench.published(published.TRANSFORMERS_STEP_MS, shape)
        for batch in bench.settings.batch_sizes:
            measured = bench.measure(shape, Drafting(), batch)
            print_step(
                shape, measured, ", ".join(filter(None, (_peer(peer, batch), _peer(other, batch, "transformers"))))
            )
            if shape == "qwen3_8b" and batch in goals.DECODE_RATIO:
                name = f"decode {shape} batch {batch}: step over floor"
                verdicts.append(Verdict(name, measured.ratio, goals.DECODE_RATIO[batch]))
                verdicts += _gap_verdict(f"decode {shape} batch {batch}", measured)
            verdicts += _against_peer(f"decode {shape} batch {batch}", measured, peer)
    return verdicts


def _against_peer(case: str, measured: Measured, peer: dict[int, float]) -> list[Verdict]:
    batch = measured.time.batch
    if batch not in peer:
        return []
    return [Verdict(f"{case}: ms against vLLM's", quotient(measured.time.step_s, 1e-3), peer[batch])]


def prefill(bench: Bench) -> list[Verdict]:
    """Prompt tokens a second against the floor, and steps of prompts beside decoding, 16 requests at a time."""
    shape, settings, verdicts = "qwen3_8b", bench.settings, []
    engine = bench.shelf.engine(settings, bench.folder(shape), Drafting())
    peer = bench.published(published.VLLM_PREFILL_TOKEN_PER_S, shape)
    for batch in settings.batch_sizes:
        rate = prompt_token_per_s(engine, settings, batch)
        floor_rate = settings.num_prompt / bench.prompt_floor_s(shape)
        print(
            f"{shape} batch {batch}: {rate:,.0f} prompt tokens a second, floor {floor_rate:,.0f}, "
            f"{floor_rate / rate:.2f} times it" + (f"; vLLM {peer[batch]:,.0f}" if batch in peer else ""),
            flush=True,
        )
        if batch in peer:
            name = f"prefill {shape} batch {batch}: prompt tokens a second against vLLM's"
            verdicts.append(Verdict(name, rate, peer[batch], is_least=True))
    batch = 2 if settings.is_small else goals.PREFILL_BATCH
    for name, folder, drafting, changes in (
        (shape, bench.folder(shape), Drafting(), {}),
        ("the packaged model", PACKAGED_CHECKPOINT, Drafting("mtp_multi", 8, ACCEPTANCE_RATES), {"load": "checkpoint"}),
    ):
        engine = bench.shelf.engine(settings, folder, drafting, **changes)
        closed_run(engine, settings, batch, num_requests=batch)
        print(f"{name}, {drafting.num_drafts} drafts, {batch} requests at a time\n{KIND_HEADER}")
        for kind in step_kinds(closed_run(engine, settings, batch, num_requests=4 * batch)):
            print(kind.line(), flush=True)
    return verdicts


def verify(bench: Bench) -> list[Verdict]:
    """Verification of k + 1 rows whose drafts cost nothing, against plain decoding of the same run."""
    shape, verdicts = "qwen3_8b", []
    for num_drafts in (0, goals.VERIFY_DRAFTS, 4):
        for batch in bench.settings.batch_sizes:
            measured = bench.measure(shape, Drafting("stub", num_drafts) if num_drafts else Drafting(), batch)
            print_step(f"{shape} {num_drafts + 1} rows", measured)
            if num_drafts == goals.VERIFY_DRAFTS and batch in goals.VERIFY_RATIO:
                single = bench.measure(shape, Drafting(), batch)
                name = f"verify {shape} k = {num_drafts} batch {batch}: step over the step of one row"
                ratio = quotient(measured.time.step_s, single.time.step_s)
                verdicts.append(Verdict(name, ratio, goals.VERIFY_RATIO[batch]))
    return verdicts


def attention(bench: Bench) -> list[Verdict]:
    """One layer's attention of 9 rows against that of one, at long context, in microseconds; by what auto takes."""
    verdicts, num_rows = [], goals.VERIFY_DRAFTS + 1
    for batch, single_s, several_s in _attention_times(bench, timed_backends(bench.settings.device)[:1]):
        if batch in goals.ATTENTION_BATCHES or bench.settings.is_small:
            goal = f"attention of {num_rows} rows batch {batch}: over that of one"
            verdicts.append(Verdict(goal, several_s / single_s, goals.ATTENTION_RATIO))
    return verdicts


def backends(bench: Bench) -> list[Verdict]:
    """The same by every backend that is installed; one that compiles its kernels does so first."""
    list(_attention_times(bench, timed_backends(bench.settings.device)))
    return []


def _attention_times(bench: Bench, names: Sequence[str]) -> Iterator[tuple[int, float, float]]:
    """(batch, seconds of one row a request, of several), printed beside the floor and the host's time."""
    settings, num_rows = bench.settings, goals.VERIFY_DRAFTS + 1
    context = 64 if settings.is_small else goals.ATTENTION_CONTEXT
    print(f"{'batch':>6}{'backend':>12}{'1 row':>10}{f'{num_rows} rows':>10}{'floor':>10}{'host':>8}")
    for batch in settings.batch_sizes:
        floor_s = bench.ceilings.floor_s(cache_bytes(batch, context), 0)
        for name in names:
            single, several = (attention_time(name, settings.device, batch, rows, context) for rows in (1, num_rows))
            times = (single.layer_s, several.layer_s, floor_s)
            texts = [*(f"{1e6 * one:>9.1f}" for one in times), f"{1e6 * several.host_s:>7.0f}"]
            print(f"{batch:>6}{name:>12}", *texts, flush=True)
            yield batch, single.layer_s, several.layer_s


def draft_single(bench: Bench) -> list[Verdict]:
    """One MTP module that runs again, on the shape of MiMo-7B."""
    shape, verdicts = "mimo_7b", []
    for num_drafts in (1, 4):
        peer = bench.published(published.VLLM_STEP_MS, (shape, num_drafts))
        for batch in bench.settings.batch_sizes:
            measured = bench.measure(shape, Drafting("mtp_single", num_drafts), batch)
            print_step(f"{shape} k={num_drafts} again", measured, _peer(peer, batch))
            if num_drafts == 4:
                case = f"draft {shape} k = 4 batch {batch}"
                verdicts += _against_peer(case, measured, peer)
                verdicts += _gap_verdict(case, measured)
                if batch == 1:  # with more requests the rows that are verified cost more, too
                    verdicts.append(_further_draft(measured, bench.measure(shape, Drafting("mtp_single", 1), batch)))
    return verdicts


def _further_draft(four: Measured, one: Measured) -> Verdict:
    steps = four.time.step_s, one.time.step_s
    further_s = None if steps[0] is None or steps[1] is None or steps[0] <= steps[1] else steps[0] - steps[1]
    name = f"draft mimo_7b batch {four.time.batch}: each further draft over its floor"
    floor_s = four.draft_floor_s - one.draft_floor_s  # of three drafts, as the steps' difference
    return Verdict(name, quotient(further_s, floor_s), goals.FURTHER_DRAFT_RATIO)


def draft_multi(bench: Bench) -> list[Verdict]:
    """Eight modules in one pass, on an Inkling shape."""
    shape, num_drafts, verdicts = "inkling_8b", 8, []
    for batch in bench.settings.batch_sizes:
        measured = bench.measure(shape, Drafting("mtp_multi", num_drafts), batch)
        print_step(f"{shape} {num_drafts} modules", measured)
        print(f"    draft alone: floor {1e3 * measured.draft_floor_s:.3f} ms")
        if batch in goals.DRAFT_BATCHES:
            case = f"draft {shape} {num_drafts} modules batch {batch}"
            ratio = quotient(measured.time.draft_s, measured.draft_floor_s)
            verdicts.append(Verdict(f"{case}: over its floor", ratio, goals.DRAFT_RATIO))
            verdicts += _gap_verdict(case, measured)
    return verdicts


def _gap_verdict(case: str, measured: Measured) -> list[Verdict]:
    return [Verdict(f"{case}: share of a step with nothing running", measured.time.gap_share, goals.GAP_SHARE)]


def ngram(bench: Bench) -> list[Verdict]:
    """Look-up in the text so far, against drafts that cost nothing; how many drafts it found is printed."""
    shape, num_drafts, verdicts = "qwen3_8b", 4, []
    peer = bench.published(published.VLLM_NGRAM_STEP_MS, num_drafts)
    for batch in bench.settings.batch_sizes:
        free = bench.measure(shape, Drafting("stub", num_drafts), batch)
        print_step(f"{shape} k={num_drafts} free", free)
    for batch in bench.settings.batch_sizes:
        measured = bench.measure(shape, Drafting("ngram", num_drafts), batch, ngram_min=1)
        print_step(f"{shape} k={num_drafts} ngram", measured, _peer(peer, batch))
        free = bench.measure(shape, Drafting("stub", num_drafts), batch)
        name = f"ngram {shape} k = {num_drafts} batch {batch}: step over one with free drafts"
        verdicts.append(Verdict(name, quotient(measured.time.step_s, free.time.step_s), goals.NGRAM_RATIO))
    return verdicts


def end_to_end_single(bench: Bench) -> list[Verdict]:
    """Output tokens a second at the synthetic rates, against what the measured parts allow: one module again."""
    return _end_to_end(bench, "mimo_7b", "mtp_single", 4)


def end_to_end_multi(bench: Bench) -> list[Verdict]:
    """The same of eight modules."""
    return _end_to_end(bench, "inkling_8b", "mtp_multi", 8)


def _end_to_end(bench: Bench, shape: str, proposer: str, num_drafts: int) -> list[Verdict]:
    print(f"{'case':<30}{'batch':>6}{'length':>8}{'tok/s':>9}{'decode':>9}{'allowed':>9}{'share':>7}  published")
    peer = bench.published(published.VLLM_TOKEN_PER_S, (shape, num_drafts))
    engine = bench.shelf.engine(
        bench.settings, bench.folder(shape), Drafting(proposer, num_drafts, ACCEPTANCE_RATES[:num_drafts])
    )
    case = f"{shape} k={num_drafts}"
    return [_tokens_a_second(bench, engine, case, batch, peer) for batch in bench.settings.batch_sizes]


def check_acceptance(run: BatchRun, rates: Sequence[float]) -> None:
    """ValueError where the coins did not fall by the rates: 6 standard errors from the length that they mean."""
    num_steps = sum(row.num_drafted > 0 for result in run.results for row in result.verify_steps)
    mean = sum(rates)
    # Of a count whose chance to be above i is rates[i].
    variance = sum((2 * index + 1) * rate for index, rate in enumerate(rates)) - mean**2
    if abs(run.acceptance_length - 1 - mean) > 6 * (variance / max(num_steps, 1)) ** 0.5 + 1e-9:
        raise ValueError(f"acceptance length {run.acceptance_length:.2f}, where the rates mean {1 + mean:.2f}")


def _tokens_a_second(bench: Bench, engine: LLMEngine, case: str, batch: int, peer: dict[int, float]) -> Verdict:
    """Of the steps in which the whole batch decodes: what they emitted over what they took."""
    run = run_batch(engine, bench.settings, batch, bench.settings.num_outputs[1], seed=0)
    check_acceptance(run, ACCEPTANCE_RATES[: engine.config.num_speculative_tokens])
    steps = run.decode_steps[1:]
    if not steps:
        raise ValueError(f"{case}, batch {batch}: no two steps had the whole batch; ask for more output tokens")
    duration_s = steps[-1].end_s - run.decode_steps[0].end_s
    emitted: dict[int, int] = {}
    for result in run.results:
        for row in result.verify_steps:
            emitted[row.engine_step] = emitted.get(row.engine_step, 0) + row.num_accepted + 1
    reached = sum(emitted.get(step.engine_step, 0) for step in steps) / duration_s
    parts = [(step.target_s, step.verify_s, step.draft_s) for step in steps]
    is_timed = all(part is not None for step in parts for part in step)
    allowed = share = None
    if is_timed:
        work_s = sum(sum(part) for part in parts) / len(parts)  # type: ignore[arg-type]
        allowed = batch * run.acceptance_length / work_s
        share = reached / allowed
    texts = ("n/a", "n/a") if allowed is None or share is None else (f"{allowed:.0f}", f"{share:.3f}")
    published_text = f"vLLM {peer[batch]:.0f} tok/s" if batch in peer else ""
    print(
        f"{case:<30}{batch:>6}{run.acceptance_length:>8.2f}{run.num_output_tokens / run.seconds:>9.0f}{reached:>9.0f}"
        f"{texts[0]:>9}{texts[1]:>7}  {published_text}",
        flush=True,
    )
    return Verdict(f"end to end {case} batch {batch}: tok/s over allowed", share, goals.END_TO_END_SHARE, is_least=True)


def recording(bench: Bench) -> list[Verdict]:
    """Steps with records against steps without, in blocks: their share of a step of 64 requests."""
    shape, settings = "qwen3_8b", bench.settings
    batch = max(settings.batch_sizes)
    alone_s = host_seconds(batch, settings.scratch / "recording_alone", 50 if settings.is_small else 2000)
    line_s = request_line_seconds(settings.scratch / "recording_lines", settings.num_outputs[1])
    print(
        f"records of a step of {batch} requests by themselves: {1e6 * alone_s:.1f} us of host time; the journal's line "
        f"of a finished request: {1e6 * line_s:.0f} us, once in {settings.num_outputs[1]} steps"
    )
    engine = bench.shelf.engine(bench.settings, bench.folder(shape), Drafting())
    num_output = settings.max_model_len - settings.num_prompt - 1
    cost = recording_cost(engine, settings, batch, num_output, settings.num_runs)
    print(
        f"{shape} batch {batch}: steps with records over steps without {cost.share.text()}; alike over alike "
        f"{cost.null.text()}; step {1e3 * cost.step_s:.3f} ms\nhost time behind the end of a step: "
        f"{1e6 * cost.host_with_s:.0f} us with, {1e6 * cost.host_without_s:.0f} us without; steps that overlap hide it"
    )
    name = f"recording at {batch} requests: share of a step"
    own_s = cost.host_with_s - cost.host_without_s
    by_itself = Verdict(f"{name}, its own host time", own_s / cost.step_s, goals.RECORDING_SHARE)
    return [Verdict(name, cost.share.median, goals.RECORDING_SHARE), by_itself]


def loading(bench: Bench) -> list[Verdict]:
    """Weights from safetensors to the device, against reading the same files alone."""
    shape, settings = "qwen3_8b", bench.settings
    num_layers = 1 if settings.is_small else 2
    folder = write_checkpoint(bench.folder(shape), settings.scratch / "checkpoint", num_layers)
    checkpoint = Checkpoint.open(folder)
    disk, load = disk_bytes_per_s(checkpoint), load_bytes_per_s(checkpoint, settings.device)
    print(f"{checkpoint.num_bytes / 1e9:.2f} GB: files alone {disk / 1e9:.2f} GB/s, loading {load / 1e9:.2f} GB/s")
    return [Verdict("loading: bytes a second over the disk's", load / disk, goals.LOADING_SHARE, is_least=True)]


#: Name -> section, in the order in which they run: neighbours share an engine where they can.
SECTIONS: dict[str, Callable[[Bench], list[Verdict]]] = {
    "loading": loading,
    "attention": attention,
    "decode": decode,
    "recording": recording,
    "prefill": prefill,
    "verify": verify,
    "ngram": ngram,
    "draft_multi": draft_multi,
    "end_to_end_multi": end_to_end_multi,
    "draft_single": draft_single,
    "end_to_end_single": end_to_end_single,
    "backends": backends,
}


def run_peers(bench: Bench, names: Sequence[str]) -> None:
    """Plain decoding by others, beside ours. They have no goals."""
    shape = "qwen3_8b"
    for name in names:
        if not is_installed(name):
            print(f"{name}: not installed", flush=True)
            continue
        try:
            steps = peer_step_s(name, bench.settings, bench.folder(shape))
        except Exception as error:  # another's failure is no reason to lose our figures
            print(f"{name}: failed, {type(error).__name__}: {error}", flush=True)
            continue
        for batch, step_s in steps.items():
            text = "a step could not be told from noise" if step_s is None else f"{1e3 * step_s:.3f} ms a step"
            print(f"{name} {shape}: batch {batch}, {text}, measured in this run", flush=True)


#: Sections whose lines are those of print_step.
_OF_STEPS = ("decode", "verify", "draft_single", "draft_multi", "ngram")


def run_sections(bench: Bench, names: Sequence[str], changes: Mapping[str, dict[str, Any]]) -> list[Verdict]:
    """Those of SECTIONS, each with its time; what fails is said, and the others run. `changes`: section -> fields of
    Settings that are its own. Ctrl-C ends them all, and leaves what there is."""
    verdicts: list[Verdict] = []
    for name in names:
        start_s = time.perf_counter()
        title = (SECTIONS[name].__doc__ or "").partition("\n")[0]
        print(f"\n== {name}: {title}", *([HEADER] if name in _OF_STEPS else []), sep="\n", flush=True)
        try:
            verdicts += SECTIONS[name](replace(bench, settings=replace(bench.settings, **changes.get(name, {}))))
        except KeyboardInterrupt:
            print("stopped: what was measured so far", flush=True)
            return [*verdicts, Verdict(f"{name}: the section ends", None, 1.0, is_failure=True)]
        except Exception as error:  # a section must not take the others' figures with it
            print(f"section {name} failed: {type(error).__name__}: {error}", flush=True)
            verdicts.append(Verdict(f"{name}: the section runs", None, 1.0, is_failure=True))
        print(f"   ({time.perf_counter() - start_s:.0f} s)", flush=True)
    return verdicts
