"""lm-eval through the Generate protocol: its prompts go out as they are, its filters judge what came back, and what it
counts is joined to the records."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from specbench.engine.llm_engine import LLMEngine
from specbench.errors import UserError
from specbench.evals.gsm8k import PACKAGED_NOTICE, PACKAGED_PROBLEMS
from specbench.evals.registry import load_task
from specbench.evals.task import EvalModel, Judged, Task, measured_requests, rescore, score_result
from specbench.generate import GenerateRequest, GenerateResult, TokenLogprob
from specbench.model_choice import PACKAGED_CHECKPOINT
from specbench.records import RequestRecord
from specbench.reports.accuracy import accuracy_metrics
from specbench.run_config import EvalConfig, SamplingConfig
from tests.engine.harness import engine_config
from tests.engine.harness import run as run_engine
from tests.evals.letter_tokenizer import BOS, END, USER, LetterTokenizer

pytest.importorskip("lm_eval")

Build = Callable[..., EvalConfig]
Answer = Callable[[GenerateRequest], GenerateResult]
MODEL = EvalModel(is_packaged=False, max_model_len=64, load_tokenizer=LetterTokenizer, eos_token_ids=(0,))
STRICT, FLEXIBLE = "exact_match/strict-match", "exact_match/flexible-extract"


@pytest.fixture(autouse=True)
def nothing_is_fetched(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def build(eval_config: Build) -> Build:
    defaults = {"name": "lm_eval", "protocol": "completion", "num_fewshot": None, "instruction": None, "scorer": None}
    return lambda **changes: eval_config(**(defaults | changes))


@pytest.fixture
def gsm8k(build: Build, gsm8k_folder: Path) -> Callable[..., Task]:
    """lm-eval's own task over the real files."""

    def load(**changes: object) -> Task:
        files = {
            "data": str(gsm8k_folder / "test.jsonl"),
            "fewshot_data": str(gsm8k_folder / "train_first1500.jsonl"),
        }
        return load_task(build(**({"tasks": ("gsm8k",)} | files | changes)), MODEL)

    return load


# ---- A scripted model


def text_result(request: GenerateRequest, text: str, error: str | None = None) -> GenerateResult:
    record = RequestRecord(
        request.request_id, request.sample_id, request.turn, request.repeat, False, request.category, 3, 0, 1,
        "error" if error else "stop", 0.0, 0.0, 0.1, 0.2, 0, error,
    )  # fmt: skip
    return GenerateResult(record, [], list(request.prompt_token_ids or (1,)), [2], text)


def likelihood_result(request: GenerateRequest) -> GenerateResult:
    """Each token costs 1, an "a" nothing; what costs is not greedy."""
    assert request.sampling.prompt_logprobs == 0 and request.sampling.max_output_tokens == 1
    free = LetterTokenizer().encode("a", add_special_tokens=False)[0]
    logprobs: list[TokenLogprob | None] = [None]
    logprobs += [
        TokenLogprob(token, -float(token != free), 1, token == free, ())
        for token in (request.prompt_token_ids or ())[1:]
    ]
    result = text_result(request, "")
    return GenerateResult(result.record, [], result.prompt_token_ids, [2], "", prompt_logprobs=logprobs)


def text_answer(texts: dict[str, str]) -> Answer:
    """sample_id -> text."""
    return lambda request: text_result(request, texts[request.sample_id])


def judge(task: Task, sampling: SamplingConfig, answer: Answer, repeats: int = 1) -> Judged:
    assert task.judge is not None
    results = [answer(request) for request in measured_requests(task, sampling, repeats)]
    return task.judge([score_result(task, result) for result in results])


def metrics(judged: Judged, scorer: str) -> dict:
    return accuracy_metrics("lm_eval", scorer, [], judged.samples)


def write_task(folder: Path, name: str, rows: Sequence[dict], **config: object) -> str:
    rows_file = folder / f"{name}.jsonl"
    rows_file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    own = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows_file)}},
        "test_split": "test",
        "num_fewshot": 0,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(own | config), encoding="utf-8")  # JSON is YAML
    return str(path)


# ---- GSM8K

#: How a right answer N is written -> of how many rows it is right by (strict-match, flexible-extract).
WAYS: dict[str, tuple[Callable[[str], str], str, str]] = {
    "#### N": (lambda n: f"So it is.\n#### {n}", "all", "all"),
    "N": (lambda n: n, "none", "all"),
    "The answer is N.": (lambda n: f"The answer is {n}.", "none", "all"),
    "#### $N": (lambda n: f"#### ${n}", "none", "all"),
    "#### N.": (lambda n: f"#### {n}.", "all", "all"),
    "$N.00": (lambda n: f"${n}.00", "none", "none"),
    "a number behind it": (lambda n: f"#### {n}\nThis took 1 step.", "all", "ones"),
    "an ellipsis": (lambda n: f"It is {n}...", "none", "none"),
    "nothing": (lambda n: "", "none", "none"),
}


def check_ways(task: Task, sampling: SamplingConfig, ways: Sequence[str]) -> None:
    labels = {sample.sample_id: (sample.reference or "").split("#### ")[1] for sample in task.samples}
    counts = {"all": len(labels), "none": 0, "ones": sum(label == "1" for label in labels.values())}
    for way in ways:
        write, strict, flexible = WAYS[way]
        judged = judge(task, sampling, text_answer({name: write(label) for name, label in labels.items()}))
        found = {name: entry["correct"] for name, entry in metrics(judged, STRICT)["scorers"].items()}
        assert found == {STRICT: counts[strict], FLEXIBLE: counts[flexible]}, way
        values = {result.filter: result.value for result in judged.results}
        assert values == {
            "strict-match": pytest.approx(counts[strict] / len(labels)),
            "flexible-extract": pytest.approx(counts[flexible] / len(labels)),
        }


def test_published_filters_over_some_rows(gsm8k: Callable[..., Task], sampling: SamplingConfig) -> None:
    check_ways(gsm8k(num_samples=40, num_fewshot=1), sampling, ["#### N", "#### $N", "a number behind it"])


@pytest.mark.slow
def test_published_filters_over_all_rows(gsm8k: Callable[..., Task], sampling: SamplingConfig) -> None:
    task = gsm8k()
    assert len(task.samples) == 1319
    assert sum((sample.reference or "").endswith("#### 1") for sample in task.samples) == 15
    check_ways(task, sampling, list(WAYS))


def test_prompts_stops_and_caps_are_lm_evals(gsm8k: Callable[..., Task], sampling: SamplingConfig) -> None:
    task = gsm8k(num_samples=2)
    request = measured_requests(task, sampling)[0]
    assert request.prompt is not None and request.prompt.count("Question: ") == 6
    assert request.prompt.endswith("\nAnswer:")
    assert request.sampling.stop == ("Question:", "</s>", "<|im_end|>")
    assert request.sampling.max_output_tokens == 64  # eval.max_output_tokens: the task has no cap of its own
    assert [sample.sample_id for sample in task.samples] == ["gsm8k-00000", "gsm8k-00001"]
    assert task.notices[0].endswith(", gsm8k: 5 shots, completion protocol")
    assert (task.scorers, task.headline) == ((STRICT, FLEXIBLE), STRICT)


def test_equals_our_own_gsm8k_sample_by_sample(
    build: Build, eval_config: Build, gsm8k_folder: Path, tmp_path: Path, sampling: SamplingConfig
) -> None:
    """On the same rows and protocol: the same prompts, and strict-match is our official scorer."""
    test, train = gsm8k_folder / "test.jsonl", gsm8k_folder / "train_first1500.jsonl"
    from lm_eval.tasks import __file__ as of_lm_eval

    own = {"include": str(Path(of_lm_eval).parent / "gsm8k" / "gsm8k.yaml"), "task": "gsm8k_first"}
    first_rows = {"fewshot_config": {"sampler": "first_n"}, "num_fewshot": 5}
    file = tmp_path / "first.yaml"
    file.write_text(json.dumps(own | first_rows), encoding="utf-8")
    theirs = load_task(build(tasks=(str(file),), data=str(test), fewshot_data=str(train), num_samples=60), MODEL)
    ours = load_task(
        eval_config(data=str(test), fewshot_data=str(train), num_fewshot=5, protocol="completion", num_samples=60),
        MODEL,
    )
    assert [sample.prompt for sample in theirs.samples] == [sample.prompt for sample in ours.samples]
    forms = ("#### {0}", "{0}", "#### {0} and #### 7", "#### -{0}", "none", "#### 1,{0}")
    answers = {
        sample.prompt: forms[index % len(forms)].format(sample.reference) for index, sample in enumerate(ours.samples)
    }
    judged = judge(theirs, sampling, lambda request: text_result(request, answers[request.prompt]))
    for record, sample, request in zip(judged.samples, ours.samples, measured_requests(ours, sampling), strict=True):
        own_record = score_result(ours, text_result(request, answers[sample.prompt]))
        assert record.score[STRICT] == own_record.score["official"]
        assert (record.extracted[STRICT] is None) == (own_record.extracted["official"] is None)


def test_failed_requests_are_wrong_and_repeats_are_judged_apart(
    gsm8k: Callable[..., Task], sampling: SamplingConfig
) -> None:
    task = gsm8k(num_samples=4, num_fewshot=1)

    def answer(request: GenerateRequest) -> GenerateResult:
        if request.sample_id.endswith("0"):
            return text_result(request, "", error="out of memory")
        right = (task.sample_by_key[request.sample_id, 0].reference or "")[-12:]
        return text_result(request, right if request.repeat == 0 else "no")

    judged = judge(task, sampling, answer, repeats=2)
    assert [(result.repeat, result.filter, result.value) for result in judged.results] == [
        (0, "strict-match", 0.75),
        (0, "flexible-extract", 0.75),
        (1, "strict-match", 0.0),
        (1, "flexible-extract", 0.0),
    ]
    assert judged.results[0].stderr == pytest.approx(0.25)
    assert [record.score[STRICT] for record in judged.samples] == [0, 1, 1, 1, 0, 0, 0, 0]
    # Another headline needs nothing worked out again; another kind of scorer has nothing to judge by.
    assert rescore(judged.samples, FLEXIBLE) == judged.samples
    with pytest.raises(UserError, match="unknown scorer 'official' of this run: known: exact_match/flexible-extract"):
        rescore(judged.samples, "official")


def test_packaged_problems_keep_their_name(gsm8k: Callable[..., Task]) -> None:
    data = str(PACKAGED_PROBLEMS / "test.jsonl")
    task = gsm8k(data=data, fewshot_data=None, num_fewshot=0, num_samples=1)
    assert (task.data.name, task.data.packaged, task.notices[0]) == ("nano_problems", True, PACKAGED_NOTICE)


def test_chats_go_out_as_messages(gsm8k: Callable[..., Task], sampling: SamplingConfig) -> None:
    task = gsm8k(num_samples=1, num_fewshot=2, protocol="chat", instruction="Be brief.")
    (request,) = measured_requests(task, sampling)
    assert request.messages is not None and request.prompt is None
    assert [message["role"] for message in request.messages] == [
        *("system", "user", "assistant", "user", "assistant", "user"),
    ]
    assert request.messages[0]["content"] == "Be brief."
    assert judge(task, sampling, lambda one: text_result(one, "#### 18")).results[0].value == 1.0


# ---- Likelihoods

CHOICES = [
    {"question": "x", "choices": ["bb", "aa"], "gold": 1},
    {"question": "y", "choices": ["b", "aab"], "gold": 0},
    {"question": "z", "choices": ["aaab", "bb"], "gold": 1},
]
MULTIPLE_CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "gold",
    "target_delimiter": "",
    "metric_list": [{"metric": name, "aggregation": "mean"} for name in ("acc", "acc_norm")],
}


def test_choices_by_likelihood(build: Build, tmp_path: Path, sampling: SamplingConfig) -> None:
    task = load_task(build(tasks=(write_task(tmp_path, "letters", CHOICES, **MULTIPLE_CHOICE),)), MODEL)
    first = task.samples[0]
    letters = LetterTokenizer()
    assert first.prompt_token_ids == tuple(letters.encode("xbb")) and first.scored_from == 2
    assert [sample.sample_id for sample in task.samples[:3]] == [
        "letters-00000-0",
        "letters-00000-1",
        "letters-00001-0",
    ]
    judged = judge(task, sampling, likelihood_result)
    assert [record.loglikelihood for record in judged.samples] == [-2, 0, -1, -1, -1, -2]
    assert [record.is_greedy for record in judged.samples] == [False, True, False, False, False, False]
    # 0: the second is likelier. 1: as likely, the first is taken; a letter it costs more. 2: the first is likelier.
    by_scorer = metrics(judged, "acc/none")["scorers"]
    assert {name: (entry["correct"], entry["total"]) for name, entry in by_scorer.items()} == {
        "acc/none": (2, 3),
        "acc_norm/none": (1, 3),
    }
    assert [record.reference for record in judged.samples] == ["aa", None, "b", None, "bb", None]
    assert [bool(record.score) for record in judged.samples] == [True, False] * 3
    assert not any(record.is_truncated for record in judged.samples)


def test_groups_are_aggregated(build: Build, tmp_path: Path, sampling: SamplingConfig) -> None:
    for name in "abcde":
        write_task(tmp_path, f"task_{name}", CHOICES[: 1 + (name == "a")], **MULTIPLE_CHOICE)
    group = {
        "group": "all_of_them",
        "task": [f"task_{name}" for name in "abcde"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    (tmp_path / "group.yaml").write_text(json.dumps(group), encoding="utf-8")
    task = load_task(build(tasks=("all_of_them",), include=str(tmp_path)), MODEL)
    assert task.data.name == "lm_eval_all_of_them"
    protocol, likelihoods = task.notices
    assert protocol.endswith(", task_a, task_b, task_c, task_d and 1 more: 0 shots, completion protocol")
    num_requests = len(task.samples)
    assert likelihoods.startswith(f"{num_requests} of {num_requests} requests ask for the likelihood of given text")
    results = judge(task, sampling, likelihood_result).results
    assert {result.task: result.value for result in results if result.metric == "acc"}["all_of_them"] == 1.0


def test_spaces_at_the_end_of_a_context_count_to_the_continuation(build: Build, tmp_path: Path) -> None:
    config = MULTIPLE_CHOICE | {"doc_to_text": "{{question}}", "target_delimiter": " "}
    spaced = load_task(build(tasks=(write_task(tmp_path, "spaced", CHOICES, **config),)), MODEL).samples[0]
    letters = LetterTokenizer()
    assert spaced.prompt_token_ids == tuple(letters.encode("x bb")) and spaced.scored_from == 2
    behind = MULTIPLE_CHOICE | {"doc_to_text": "Is it\n", "target_delimiter": ""}
    task = load_task(build(tasks=(write_task(tmp_path, "behind", CHOICES, **behind),)), MODEL)
    assert task.samples[0].prompt_token_ids == tuple(letters.encode("Is it\nbb"))
    assert task.samples[0].scored_from == len(letters.encode("Is it"))
    blank = MULTIPLE_CHOICE | {"doc_to_text": "", "target_delimiter": " "}
    first = load_task(build(tasks=(write_task(tmp_path, "blank", CHOICES, **blank),)), MODEL).samples[0]
    assert first.prompt_token_ids == tuple(letters.encode(" bb")) and first.scored_from == 1  # behind bos


def test_choices_in_a_chat(build: Build, tmp_path: Path) -> None:
    config = build(tasks=(write_task(tmp_path, "letters", CHOICES, **MULTIPLE_CHOICE),), protocol="chat")
    first = load_task(config, MODEL).samples[0]
    text = LetterTokenizer().encode("x", add_special_tokens=False)
    choice = LetterTokenizer().encode("bb", add_special_tokens=False)
    assert first.prompt_token_ids == (BOS, USER, *text, END, *choice) and first.scored_from == 4


def test_windows_of_long_texts_cover_each_token_once(build: Build, tmp_path: Path, sampling: SamplingConfig) -> None:
    texts = ["b" * 150, "ab" * 5]
    config = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    file = write_task(tmp_path, "rolling", [{"text": text} for text in texts], **config)
    task = load_task(build(tasks=(file,)), MODEL)
    assert len(task.samples) == 4 and max(len(sample.prompt_token_ids or ()) for sample in task.samples) < 64
    judged = judge(task, sampling, likelihood_result)
    sums = [
        sum(
            record.loglikelihood or 0
            for record in judged.samples
            if record.sample_id.startswith(f"rolling-0000{number}")
        )
        for number in range(2)
    ]
    assert sums == [-150, -5]
    (result,) = judged.results
    assert result.metric == "bits_per_byte" and result.value == pytest.approx(155 / 160 / 0.6931471805599453)
    assert metrics(judged, "bits_per_byte/none")["total"] is None  # no score in 0..1


def test_several_tasks_are_categories_and_copies_run_apart(
    build: Build, tmp_path: Path, sampling: SamplingConfig
) -> None:
    letters = write_task(tmp_path, "letters", CHOICES, **MULTIPLE_CHOICE)
    thrice = write_task(
        tmp_path,
        "thrice",
        [{"q": "What?", "a": "yes"}],
        output_type="generate_until",
        doc_to_text="{{q}}",
        doc_to_target="{{a}}",
        repeats=3,
        generation_kwargs={"until": ["\n"], "max_gen_toks": 7, "do_sample": True, "temperature": 0.7},
        metric_list=[{"metric": "exact_match"}],
        filter_list=[{"name": "vote", "filter": [{"function": "majority_vote"}, {"function": "take_first"}]}],
    )
    task = load_task(build(tasks=(letters, thrice)), MODEL)
    copies = [sample for sample in task.samples if sample.category == "thrice"]
    assert [sample.sample_id for sample in copies] == ["thrice-00000", "thrice-00000-copy1", "thrice-00000-copy2"]
    assert copies[0].max_output_tokens == 7 and copies[0].stop == ("\n",)
    assert any("asks for sampling" in notice for notice in task.notices)

    def answer(request: GenerateRequest) -> GenerateResult:
        if request.category != "thrice":
            return likelihood_result(request)
        return text_result(request, "no" if request.sample_id == "thrice-00000" else "yes")

    judged = judge(task, sampling, answer)
    values = {(result.task, f"{result.metric}/{result.filter}"): result.value for result in judged.results}
    assert values["thrice", "exact_match/vote"] == 1.0
    assert values["letters", "acc/none"] == pytest.approx(2 / 3)
    assert metrics(judged, "exact_match/vote")["by"]["category"]["thrice"]["correct"] == 1


# ---- What cannot be


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tasks": None}, "eval.tasks: say which"),
        ({"tasks": ("gone.yaml",)}, "eval.tasks: gone.yaml does not exist"),
        ({"tasks": ("gsm8k",), "data": "gone.jsonl"}, "eval.data: gone.jsonl does not exist"),
        ({"tasks": ("gsm8k",), "include": "gone"}, "eval.include: gone is not a folder"),
        ({"tasks": ("gsm8k",)}, "eval.tasks: gsm8k cannot be loaded (ConnectionError"),
    ],
)
def test_one_line_each(build: Build, changes: dict, complaint: str) -> None:
    with pytest.raises(UserError) as error:
        load_task(build(**changes), MODEL)
    assert str(error.value).startswith(complaint) and "\n" not in str(error.value)


def test_unknown_task_and_missing_column(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import tasks

    letters = write_task(tmp_path, "letters", CHOICES, **MULTIPLE_CHOICE)
    # Its index of some fifteen thousand tasks takes seconds: a folder of one stands for it.
    whole = tasks.TaskManager
    monkeypatch.setattr(tasks, "TaskManager", lambda **kwargs: whole(include_path=tmp_path, include_defaults=False))
    with pytest.raises(UserError, match="unknown task 'leters': did you mean 'letters'"):
        load_task(build(tasks=("leters",)), MODEL)
    with pytest.raises(UserError, match=r"eval\.scorer: official does not judge such answers; say one of acc/none"):
        load_task(build(tasks=(letters,), scorer="official"), MODEL)
    broken = write_task(tmp_path, "broken", [{"q": "a"}], **(MULTIPLE_CHOICE | {"doc_to_choice": "{{options}}"}))
    with pytest.raises(UserError, match=r"eval\.tasks: (broken|.*broken.yaml) cann"):
        load_task(build(tasks=(broken,)), MODEL)


def test_shots_of_a_local_file_need_their_own(gsm8k: Callable[..., Task]) -> None:
    with pytest.raises(UserError, match=r"eval\.fewshot_data: gsm8k takes 5 shots"):
        gsm8k(fewshot_data=None)
    assert len(gsm8k(fewshot_data=None, num_fewshot=0, num_samples=1).samples) == 1


def test_without_lm_eval(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"eval=lm_eval: lm-eval is not installed; say pip install -e '\.\[lm-eval\]'"):
        load_task(build(tasks=("gsm8k",)), MODEL)


def test_a_file_is_named_by_the_task_in_it(build: Build, tmp_path: Path) -> None:
    file = Path(write_task(tmp_path, "letters", CHOICES, **MULTIPLE_CHOICE)).rename(tmp_path / "my_copy.yaml")
    assert load_task(build(tasks=(str(file),)), MODEL).data.name == "lm_eval_letters"


def test_local_rows_go_with_one_task(build: Build, tmp_path: Path) -> None:
    letters = write_task(tmp_path, "letters", CHOICES, **MULTIPLE_CHOICE)
    rows = str(tmp_path / "letters.jsonl")
    task = load_task(build(tasks=("letters",), include=str(tmp_path), data=rows, num_samples=1), MODEL)
    assert [sample.sample_id for sample in task.samples] == ["letters-00000-0", "letters-00000-1"]
    assert task.data.num_samples == 1, "documents, not requests"
    assert (task.data.name, task.data.path) == ("lm_eval_letters", rows)
    with pytest.raises(UserError, match=r"eval\.data: goes with one task"):
        load_task(build(tasks=(letters, "gsm8k"), data=rows), MODEL)


def test_code_is_not_run(build: Build, tmp_path: Path) -> None:
    unsafe = write_task(tmp_path, "unsafe", CHOICES, **MULTIPLE_CHOICE, unsafe_code=True)
    with pytest.raises(UserError, match="unsafe runs code that the model wrote"):
        load_task(build(tasks=(unsafe,)), MODEL)


def test_a_task_that_begins_the_answer_needs_completions(build: Build, tmp_path: Path) -> None:
    begun = {
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "gen_prefix": "The answer is",
        "generation_kwargs": {"until": ["\n"]},
        "metric_list": [{"metric": "exact_match"}],
    }
    file = write_task(tmp_path, "begun", [{"q": "What?", "a": "yes"}], **begun)
    with pytest.raises(UserError, match=r"say eval\.protocol=completion"):
        load_task(build(tasks=(file,), protocol="chat"), MODEL)
    assert load_task(build(tasks=(file,)), MODEL).samples[0].prompt == "What? The answer is"


# ---- With the engine


def test_likelihoods_and_stops_of_the_engine(build: Build, tmp_path: Path, sampling: SamplingConfig) -> None:
    """Prompt log-probabilities are the same whole and in chunks; a stop inside a verified block ends the text."""
    engines = [
        LLMEngine(engine_config(PACKAGED_CHECKPOINT, k, max_model_len=256, max_num_batched_tokens=budget))
        for k, budget in ((8, 256), (0, 24))
    ]
    tokenizer = engines[0].tokenizer
    assert tokenizer is not None
    model = EvalModel(is_packaged=True, max_model_len=256, load_tokenizer=lambda: tokenizer, eos_token_ids=(13,))
    letters = write_task(
        tmp_path, "letters", [CHOICES[0] | {"question": "Nora sells tickets for a show."}], **MULTIPLE_CHOICE
    )
    greedy = {
        "output_type": "generate_until",
        "doc_to_text": "Nora sells 3 tickets. Adults pay $2.",
        "doc_to_target": "x",
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": [], "max_gen_toks": 40},
    }
    plain_sampling = SamplingConfig(
        "greedy",
        0.0,
        0,
        1.0,
        0.0,
        1.0,
        0.0,
        0.0,
        min_tokens=0,
        stop_token_ids=(),
        bad_words=(),
        seed=0,
        ignore_eos=False,
    )
    task = load_task(build(tasks=(letters, write_task(tmp_path, "said", [{"row": 1}], **greedy))), model)
    requests = measured_requests(task, plain_sampling)
    whole, chunked = (
        {name: score_result(task, result) for name, result in run_engine(engine, requests).items()}
        for engine in engines
    )
    for name, record in whole.items():
        assert record.output_text == chunked[name].output_text
        if record.loglikelihood is not None:
            assert record.loglikelihood == pytest.approx(chunked[name].loglikelihood, abs=1e-3)
            assert record.loglikelihood < 0
    text = whole["said-00000-t0-r0"].output_text
    stop = text[len(text) // 2 :][:4]
    stopped = load_task(build(tasks=(str(tmp_path / "said.yaml"),), stop=(stop,)), model)
    (result,) = run_engine(engines[0], measured_requests(stopped, plain_sampling)).values()
    assert result.output_text == text[: text.index(stop)]
    assert result.record.finish_reason == "stop"
