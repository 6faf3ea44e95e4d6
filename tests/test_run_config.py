"""A configuration is right as a whole or refused in one line that names its key."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from specbench.errors import UserError
from specbench.resolved_config import PACKAGED_NUM_SAMPLES, CheckpointFacts, resolve
from specbench.run_config import RunConfig, known_keys

VALUES: dict[str, Any] = {
    "model": {
        "name": "inkling",
        "checkpoint": None,
        "revision": None,
        "dtype": "auto",
        "max_model_len": None,
        "tokenizer": None,
        "chat_template": None,
        "trust_remote_code": False,
    },
    "spec": {
        "name": "mtp4",
        "method": "mtp",
        "num_speculative_tokens": 4,
        "modules": "auto",
        "checkpoint": None,
        "ngram_min": 2,
        "ngram_max": 4,
        "drafts": None,
        "accepted_counts": None,
        "accepted_rates": None,
        "hidden_feedback": "auto",
        "trim_to_max_tokens": False,
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
        "synthetic_acceptance_rates": None,
        "synthetic_acceptance_length": None,
        "faults": [],
    },
    "parallel": {"name": "tp1", "tensor_parallel_size": 1},
    "engine": {
        "name": "embedded",
        "device": "auto",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "attention_backend": "auto",
        "cuda_graphs": "auto",
        "pipeline_depth": None,
    },
    "cache": {"name": "plain", "block_size": 16, "num_blocks": None, "prefix_caching": False, "memory_fraction": 0.5},
    "eval": {
        "name": "gsm8k",
        "data": None,
        "protocol": "chat",
        "num_samples": None,
        "num_fewshot": 0,
        "fewshot_data": None,
        "instruction": "auto",
        "max_output_tokens": 32,
        "scorer": "robust",
        "stop": None,
    },
    "sampling": {
        "name": "greedy",
        "temperature": 0,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "min_tokens": 0,
        "stop_token_ids": [],
        "bad_words": [],
        "seed": 0,
        "ignore_eos": False,
    },
    "load": {"name": "closed", "concurrency": 4, "warmup": None, "repeats": 1, "reset_cache": True},
    "report": {
        "name": "default",
        "output_check_requests": 8,
        "plain_baseline_requests": 0,
        "formats": [],
        "gates": [],
        "baseline": None,
    },
    "strict": None,
    "dry_run": False,
    "output_root": "outputs",
}
SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.1}
FACTS = CheckpointFacts(
    path="folder",
    packaged=False,
    num_modules=8,
    max_model_len=128,
    has_positions=True,
    dtype="bfloat16",
    hidden_feedback="chain",
    sampling=SAMPLING,
)
STUB = {"spec__method": "stub", "spec__drafts": "auto"}


def values(**changes: Any) -> dict[str, Any]:
    """VALUES with `group__key` (or a top-level key) changed."""
    changed = copy.deepcopy(VALUES)
    for path, value in changes.items():
        group, _, key = path.partition("__")
        if key:
            changed[group][key] = value
        else:
            changed[group] = value
    return changed


def resolved(
    facts: CheckpointFacts = FACTS, *, device: str = "cpu", is_sweep: bool = False, **changes: Any
) -> RunConfig:
    return resolve(RunConfig.from_dict(values(**changes)), facts, device=device, is_sweep=is_sweep).config


def test_round_trip() -> None:
    config = RunConfig.from_dict(VALUES)
    assert RunConfig.from_dict(config.to_dict()) == config
    assert resolved() == resolve(resolved(), FACTS, device="cpu", is_sweep=False).config


def test_random_weights_answer_nothing_and_need_a_shape() -> None:
    assert resolved(model__load="random", model__checkpoint="qwen3_8b").eval.scorer is None
    assert resolved(model__load="checkpoint").eval.scorer == "robust"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"model__load": "random"},
            "model.checkpoint: random weights need a shape; name a folder",
        ),
        ({"model__load": "randomly"}, "model.load: unknown value 'randomly'; did you mean 'random'?"),
        ({"engine__cuda_graphs": True}, "engine.cuda_graphs: unknown value True; known: auto, off, on"),
        ({"spec__metod": 1}, "spec.metod: unknown key; did you mean 'method'?"),
        ({"load__name": "poisson"}, "load.rate: load=poisson needs it; say load.rate=VALUE"),
        (
            {"load__rate": 2},
            "load.rate: load=closed has no use for it; leave it out, or say load=poisson or load=gamma",
        ),
        (
            {"load__concurrency": None},
            "load.concurrency: load=closed needs it; say load.concurrency=8, or load=offline",
        ),
        ({"load__name": "trace", "load__time_scale": 1}, "load.trace: load=trace needs it; say load.trace=VALUE"),
        ({"load__name": "poisson", "load__rate": 0}, "load.rate: must be above 0, not 0"),
        ({"report__slo_ttft_ms": 0}, "report.slo_ttft_ms: must be above 0, not 0"),
        ({"sped": 1}, "sped: unknown key; did you mean 'spec'?"),
        ({"spec__num_speculative_tokens": "four"}, "spec.num_speculative_tokens: must be a whole number, not 'four'"),
        ({"spec__num_speculative_tokens": True}, "spec.num_speculative_tokens: must be a whole number, not True"),
        ({"spec__num_speculative_tokens": 0}, "spec.num_speculative_tokens: must be at least 1, not 0"),
        ({"spec__num_speculative_tokens": 1000}, "spec.num_speculative_tokens: must be at most 256, not 1000"),
        ({"spec__method": "mpt"}, "spec.method: unknown value 'mpt'; did you mean 'mtp'?"),
        ({"spec__faults": "raw"}, "spec.faults: must be a list of texts such as [a,b], not 'raw'"),
        ({"cache__block_size": 0}, "cache.block_size: must be at least 1, not 0"),
        ({"cache__block_size": -16}, "cache.block_size: must be at least 1, not -16"),
        ({"cache__memory_fraction": 0}, "cache.memory_fraction: must be above 0 and at most 1, not 0.0"),
        ({"sampling__top_p": 1.5}, "sampling.top_p: must be above 0 and at most 1, not 1.5"),
        ({"sampling__temperature": -1}, "sampling.temperature: must be at least 0, not -1.0"),
        ({"load__name": "poisson", "load__rate": float("inf")}, "load.rate: must be a finite number, not inf"),
        ({"sampling__temperature": float("nan")}, "sampling.temperature: must be a finite number, not nan"),
        ({"sampling__presence_penalty": 10**400}, "sampling.presence_penalty: must be a finite number, not 1000"),
        (STUB | {"spec__accepted_rates": [float("nan"), 0, 0, 0]}, "spec.accepted_rates: must be a list of numbers"),
        ({"model__max_model_len": 10**30}, "model.max_model_len: must be at most 1,000,000,000, not 1000000000000"),
        ({"engine__max_num_seqs": 10**9}, "engine.max_num_seqs: must be at most 65,536, not 1000000000"),
        ({"load__repeats": 10**30}, "load.repeats: must be at most 10,000, not 1000000000000"),
        ({"load__warmup": 10**30}, "load.warmup: must be at most 100,000, not 1000000000000"),
        ({"eval__stop": ["\n", ""]}, "eval.stop: an empty text would end every answer at once; leave it out"),
        ({"eval__data": "???"}, "eval.data: has no default; say eval.data=VALUE"),
        ({"strict": "yes"}, "strict: must be true or false, not 'yes'"),
        ({"spec": "mtp8"}, "spec: a config group, not a value; say spec.KEY=VALUE"),
        ({"engine__device": "cuda:x"}, "engine.device: unknown device 'cuda:x'; say auto, cpu, cuda or cuda:N"),
        ({"spec__method": "none"}, "spec.num_speculative_tokens: drafts need a method"),
        (
            {"spec__method": "ngram", "spec__num_speculative_tokens": None},
            "spec.num_speculative_tokens: spec.method=ngram",
        ),
        ({"spec__ngram_min": 5}, "spec.ngram_min: 5 is above spec.ngram_max=4"),
        ({"spec__checkpoint": "D"}, "spec.checkpoint: has a meaning with spec.method=draft_model only, not with mtp"),
        ({"spec__drafts": "auto"}, "spec.drafts: has a meaning with spec.method=stub only, not with mtp"),
        ({"spec__method": "stub"}, "spec.drafts: unset; say auto"),
        (STUB | {"spec__accepted_counts": [0, 5]}, "spec.accepted_counts: must be numbers of 0 .. 4"),
        (STUB | {"spec__accepted_counts": [0, -1]}, "spec.accepted_counts: must be numbers of 0 .. 4"),
        (
            STUB | {"spec__accepted_counts": 3},
            "spec.accepted_counts: must be a list of whole numbers such as [1,2], not 3",
        ),
        (STUB | {"spec__accepted_rates": [1, 0.5]}, "spec.accepted_rates: must be 4 shares"),
        (STUB | {"spec__accepted_rates": [0.5, 0.6, 0, 0]}, "spec.accepted_rates: must be 4 shares"),
        (STUB | {"spec__accepted_rates": [1.1, 0, 0, 0]}, "spec.accepted_rates: must be 4 shares"),
        (
            STUB | {"spec__accepted_rates": [1, 1, 0, 0], "spec__accepted_counts": [1]},
            "spec.accepted_rates: spec.accepted_counts is there too",
        ),
        ({"parallel__start": "slurm"}, "parallel.start"),
        (
            {"spec__draft_sample_method": "probabilistic", "spec__method": "ngram"},
            "spec.draft_sample_method: the drafts of ngram come without probabilities; say greedy",
        ),
        (
            {"spec__rejection_sample_method": "block"},
            "spec.rejection_sample_method: block weighs the drafts' probabilities, and greedy drafts",
        ),
        (
            {"spec__rejection_sample_method": "block", "spec__method": "ngram"},
            "spec.rejection_sample_method: block weighs the drafts' probabilities, and those of ngram",
        ),
        (
            {"spec__rejection_sample_method": "synthetic"},
            "spec.synthetic_acceptance_length: synthetic acceptance needs",
        ),
        (
            {
                "spec__rejection_sample_method": "synthetic",
                "spec__synthetic_acceptance_length": 2,
                "eval__name": "losslessness",
            },
            "spec.rejection_sample_method: what coins accept is lossy on purpose; say standard",
        ),
        ({"spec__synthetic_acceptance_rates": [0.5]}, "spec.synthetic_acceptance_rates: unused with standard; say"),
        ({"spec__synthetic_acceptance_length": 2}, "spec.synthetic_acceptance_length: unused with standard; say"),
        ({"spec__synthetic_acceptance_rates": 0.5}, "spec.synthetic_acceptance_rates: must be a list of numbers"),
        (
            {"spec__rejection_sample_method": "synthetic", "spec__synthetic_acceptance_rates": [0.5, 0.6]},
            "spec.synthetic_acceptance_rates: chances that drafts 0 .. i are all accepted lie in 0 .. 1 and never rise",
        ),
        (
            {"spec__rejection_sample_method": "synthetic", "spec__synthetic_acceptance_rates": [1.5, 0.6]},
            "spec.synthetic_acceptance_rates: chances that drafts 0 .. i are all accepted lie in 0 .. 1 and never rise",
        ),
        ({"sampling__stop_token_ids": ["a"]}, "sampling.stop_token_ids: must be a list of whole numbers such as [1,2]"),
        ({"sampling__top_k": 5}, "sampling.temperature: top_k, top_p and min_p do nothing at temperature 0"),
        ({"model__name": "hf"}, "model.checkpoint: model=hf needs one"),
        ({"model__trust_remote_code": True}, "model.trust_remote_code: no checkpoint's code is ever run"),
    ],
)
def test_refused_without_a_checkpoint(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        RunConfig.from_dict(values(**changes))
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_a_missing_group_and_a_missing_key() -> None:
    lacking = values()
    del lacking["model"]
    with pytest.raises(UserError, match=r"model: none was chosen; say \+model=NAME"):
        RunConfig.from_dict(lacking)
    lacking = values()
    del lacking["load"]["repeats"]
    with pytest.raises(UserError, match=r"load\.repeats: missing"):
        RunConfig.from_dict(lacking)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"spec__num_speculative_tokens": 9}, "spec.num_speculative_tokens: 9 drafts need 9 MTP modules, folder has 8"),
        ({"model__max_model_len": 129}, "model.max_model_len: 129 is more than the 128 tokens"),
        ({"cache__block_size": 256}, "cache.block_size: 256 is more than the context of 128 tokens"),
        (
            {"eval__max_output_tokens": 128},
            "eval.max_output_tokens: 128 leaves no room for a prompt in a context of 128 tokens; lower it or",
        ),
        ({"engine__max_num_batched_tokens": 3}, "engine.max_num_batched_tokens: 3 is below 4"),
    ],
)
def test_refused_with_the_checkpoint(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        resolved(**changes)
    assert str(error.value).startswith(line)


def test_only_the_modules_in_use_set_the_least_budget() -> None:
    """8 modules in the checkpoint, 4 in use: a budget of 4 is enough."""
    assert resolved(engine__max_num_batched_tokens=4).engine.max_num_batched_tokens == 4


def test_a_model_that_reads_distances_alone_may_be_asked_for_more_than_it_was_made_for() -> None:
    assert (
        resolved(dataclasses.replace(FACTS, has_positions=False), model__max_model_len=129).model.max_model_len == 129
    )


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"spec\.faults: unknown fault 'skipped_refill'; did you mean 'skipped_reprefill'"
    ):
        RunConfig.from_dict(values(spec__faults=["skipped_refill"]))


@pytest.mark.parametrize(
    ("packaged", "is_sweep", "method", "expected"),
    [(True, False, "mtp", 16), (False, False, "mtp", 0), (True, True, "mtp", 0), (True, False, "none", 0)],
)
def test_a_plain_baseline_runs_beside_the_packaged_model(
    packaged: bool, is_sweep: bool, method: str, expected: int
) -> None:
    facts = dataclasses.replace(FACTS, packaged=packaged)
    drafts = 4 if method == "mtp" else None
    config = resolved(
        facts,
        is_sweep=is_sweep,
        spec__method=method,
        spec__num_speculative_tokens=drafts,
        report__plain_baseline_requests=None,
    )
    assert config.report.plain_baseline_requests == expected


def test_drafts_need_modules() -> None:
    plain = CheckpointFacts("folder", False, 0, 128, True, "float32", "chain", SAMPLING)
    with pytest.raises(UserError, match=r"spec\.method: folder has no MTP modules; say spec=ngram, "):
        resolved(plain)
    assert resolved(plain, spec__method="none", spec__num_speculative_tokens=None).spec.num_speculative_tokens is None


def test_the_checkpoint_decides_between_one_module_and_several() -> None:
    one = dataclasses.replace(FACTS, num_modules=1)
    spec = resolved(one).spec
    assert (spec.modules, spec.num_speculative_tokens) == ("single", 4)
    assert resolved(one, spec__num_speculative_tokens=None).spec.num_speculative_tokens == 1
    assert resolved().spec.modules == "multi"
    spec = resolved(spec__modules="single", spec__num_speculative_tokens=13).spec
    assert (spec.modules, spec.num_speculative_tokens) == ("single", 13)
    with pytest.raises(UserError, match=r"spec\.num_speculative_tokens: 4 drafts need 4 MTP modules, folder has 1"):
        resolved(one, spec__modules="multi")
    for changes, key in (
        ({"spec__hidden_feedback": "target"}, "hidden_feedback"),
        ({"spec__faults": ["raw_embedding"]}, "faults"),
    ):
        with pytest.raises(UserError, match=rf"spec\.{key}: .*say "):
            resolved(spec__modules="single", **changes)


def test_the_stub_accepts_every_count_in_turn_unless_told_otherwise() -> None:
    assert resolved(**STUB).spec.accepted_counts == (0, 1, 2, 3, 4)
    assert resolved(**STUB, spec__accepted_counts=[4]).spec.accepted_counts == (4,)
    rates = resolved(**STUB, spec__accepted_rates=[1, 0.5, 0.5, 0]).spec
    assert (rates.accepted_counts, rates.accepted_rates) == (None, (1.0, 0.5, 0.5, 0.0))


def test_what_resolving_puts_in() -> None:
    config = resolved(spec__num_speculative_tokens=None)
    assert config.spec.num_speculative_tokens == 8
    assert (config.spec.modules, config.spec.hidden_feedback) == ("multi", "chain")
    assert (config.engine.device, config.model.dtype, config.model.max_model_len) == ("cpu", "float32", 128)
    assert config.load.warmup == config.load.concurrency == 4
    assert config.eval.num_samples is None
    assert resolved(device="cuda").model.dtype == "bfloat16"
    assert (config.engine.pipeline_depth, resolved(device="cuda").engine.pipeline_depth) == (0, 1)


def test_packaged_problems_are_a_hundred_unless_said_otherwise() -> None:
    packaged = CheckpointFacts("folder", True, 8, 128, True, "bfloat16", "chain", SAMPLING)
    assert resolved(packaged).eval.num_samples == PACKAGED_NUM_SAMPLES
    assert resolved(packaged, eval__num_samples=7).eval.num_samples == 7
    assert resolved(packaged, eval__data="rows.jsonl").eval.num_samples is None


@pytest.mark.parametrize(
    ("name", "is_sweep", "strict"),
    [("inkling", False, False), ("inkling", True, True), ("inkling_nano", True, False)],
)
def test_sweeps_are_strict_unless_nano_is_named(name: str, is_sweep: bool, strict: bool) -> None:
    assert resolved(is_sweep=is_sweep, model__name=name).strict is strict
    assert resolved(is_sweep=is_sweep, model__name=name, strict=not strict).strict is not strict


def test_each_difference_is_one_line() -> None:
    differences = resolve(RunConfig.from_dict(VALUES), FACTS, device="cpu", is_sweep=False).differences
    assert "engine.device: auto -> cpu" in differences
    assert "load.warmup: None -> 4" in differences
    assert all(line.split(":")[0] in known_keys() for line in differences)


def synthetic(**changes: Any) -> tuple[float, ...] | None:
    return resolved(spec__rejection_sample_method="synthetic", **changes).spec.synthetic_acceptance_rates


def test_a_synthetic_length_becomes_rates() -> None:
    assert synthetic(spec__synthetic_acceptance_length=3.5) == (1.0, 1.0, 0.5, 0.0)
    assert synthetic(spec__synthetic_acceptance_length=1) == (0.0, 0.0, 0.0, 0.0)
    assert synthetic(spec__synthetic_acceptance_length=5) == (1.0, 1.0, 1.0, 1.0)
    assert synthetic(spec__synthetic_acceptance_rates=[0.9, 0.5, 0.5, 0]) == (0.9, 0.5, 0.5, 0.0)
    with pytest.raises(
        UserError, match=r"^spec.synthetic_acceptance_length: 4 drafts and the bonus token make at most"
    ):
        synthetic(spec__synthetic_acceptance_length=5.5)
    with pytest.raises(UserError, match=r"^spec.synthetic_acceptance_rates: 4 drafts need 4 rates, not 2"):
        synthetic(spec__synthetic_acceptance_rates=[0.9, 0.5])


def test_unset_sampling_is_the_checkpoints_own() -> None:
    asked = {f"sampling__{key}": None for key in SAMPLING if key != "top_k"}
    sampling = resolved(**asked, sampling__top_k=3).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 3, 0.95)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.0, 1.1)


LENGTHS = {"eval__name": "speed_bench", "eval__osl": 32, "eval__scorer": None}


def test_answers_of_a_given_length_ignore_the_end() -> None:
    exact = resolved(**LENGTHS, eval__source_config="throughput_8k", eval__isl=64, eval__truncate=True)
    assert exact.sampling.ignore_eos and exact.eval.isl == 64
    assert not resolved(**LENGTHS, eval__source_config="qualitative").sampling.ignore_eos
    assert not resolved().sampling.ignore_eos
    # Prompts of a file that are not cut have lengths of their own.
    whole = resolved(**LENGTHS, eval__source_config="throughput_8k", eval__isl=64, eval__data="folder")
    assert whole.sampling.ignore_eos and whole.eval.isl is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"eval__isl": 8},
            "eval.isl: has a meaning with eval=fixed_length or random_ids or speed_bench only; leave it out",
        ),
        ({"eval__audio": "folder"}, "eval.audio: has a meaning with eval=mmau only; leave it out"),
        ({**LENGTHS, "eval__osl": 31}, "eval.max_output_tokens: follows eval.osl here; say eval.osl alone"),
        ({**LENGTHS, "eval__truncate": True}, "eval.isl: eval.truncate=true needs the tokens to cut to"),
        (
            {**LENGTHS, "eval__truncate": True, "eval__source_config": "qualitative"},
            "eval.truncate: qualitative prompts are asked as they are; say eval.truncate=false",
        ),
        (
            {**LENGTHS, "eval__source_config": "throughput_4k"},
            "eval.source_config: unknown value 'throughput_4k'; did you mean 'throughput_8k'?",
        ),
        (
            {"eval__name": "mmau", "eval__num_fewshot": 1},
            "eval.num_fewshot: questions about clips come without shots; say eval.num_fewshot=0",
        ),
    ],
)
def test_keys_of_evals(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        RunConfig.from_dict(values(**changes))
    assert str(error.value) == line
