"""Tasks of lm-eval: found, loaded, asked, and judged by lm-eval itself.

Belongs here: which tasks run on which data. Does not belong here: lm-eval's model interface (lm_eval_adapter.py), what
it makes of the records (lm_eval_judge.py); few-shot, prompts, filters, metrics, aggregation (lm-eval).

eval.tasks names tasks, groups or tags of lm-eval, or files of tasks (.yaml); eval.include=DIR adds a folder of them.
With eval.data=FILE.jsonl (and eval.fewshot_data for its shots) one task reads its rows from there, and nothing is
fetched.

Every filter's result is a scorer "metric/filter"; eval.scorer picks the headline, by default the first of the first
task. A document with several requests (choices, windows of a long text) is one answer, kept with its first request.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import UserError
from specbench.evals.gsm8k import PACKAGED_NAME, PACKAGED_NOTICE, PACKAGED_PROBLEMS
from specbench.evals.lm_eval_judge import FEWSHOT_SEED, Judge, quiet
from specbench.evals.task import EvalModel, Sample, Task
from specbench.records import DataIdentity
from specbench.run_config import EvalConfig

if TYPE_CHECKING:
    from specbench.evals.lm_eval_adapter import Asked

_NUM_NEAR, _NUM_NAMED = 3, 4


def load_lm_eval(config: EvalConfig, model: EvalModel) -> Task:
    """The tasks' requests as samples. UserError for an unknown task, for data that cannot be had, for unsafe tasks."""
    if not config.tasks:
        raise UserError("eval.tasks: say which, such as eval.tasks=[gsm8k], or a file such as eval.tasks=[task.yaml]")
    _require_lm_eval()
    with quiet():
        loaded = _load_tasks(config)
        for name, task in loaded["tasks"].items():
            _prepare(name, task, config)
        _build_requests(loaded, config)
    asked = _asked(loaded, config, model)
    judge = Judge(config, loaded, asked)
    samples = judge.samples
    scorers = _scorers(loaded)
    is_packaged = config.data is not None and Path(config.data).resolve().parent == PACKAGED_PROBLEMS.resolve()
    data = DataIdentity(
        name=PACKAGED_NAME if is_packaged else "lm_eval_" + "+".join(map(_name_of, config.tasks))[:80],
        path=config.data or ", ".join(config.tasks),
        revision=f"lm-eval {_version()}",
        sha256=_sha256(samples),
        packaged=is_packaged,
        num_samples=sum(one.is_first_of_document for one in asked),
    )
    return Task(
        "lm_eval",
        data,
        samples,
        scorers,
        config.scorer or next(iter(scorers), None),
        (),
        (*((PACKAGED_NOTICE,) if is_packaged else ()), *_notices(loaded, config), *_likelihood_notices(samples)),
        judge=judge,
    )


# ---- Finding and loading


def _require_lm_eval() -> None:
    # A metric that lm-eval lacks would be a program from the hub, downloaded and run.
    os.environ["HF_EVALUATE_OFFLINE"] = "1"
    try:
        import lm_eval  # noqa: F401  (seconds to import, and an extra)
    except ImportError as error:
        raise UserError(
            "eval=lm_eval: lm-eval is not installed; say pip install -e '.[lm-eval]' in specbench's repository"
        ) from error


def _version() -> str:
    from importlib.metadata import version

    return version("lm_eval")


def _load_tasks(config: EvalConfig) -> dict[str, Any]:
    """lm-eval's dictionary of tasks and groups."""
    assert config.tasks is not None
    if config.include is not None and not Path(config.include).is_dir():
        raise UserError(f"eval.include: {config.include} is not a folder; give one with files of tasks (.yaml)")
    manager, specs = _manager(config)
    if config.data is not None:
        specs = [_on_local_files(manager, specs, config)]
    try:
        return dict(manager.load(specs))
    except UserError:
        raise
    except Exception as error:  # each data set and each task file fails in its own way
        reason = " ".join(str(error).split())[:200]
        is_out_of_reach = isinstance(error, ConnectionError) or "Dataset" in type(error).__name__
        advice = "; give its rows with eval.data=FILE.jsonl" if is_out_of_reach and config.data is None else ""
        raise UserError(
            f"eval.tasks: {', '.join(config.tasks)} cannot be loaded ({type(error).__name__}: {reason}){advice}"
        ) from error


def _manager(config: EvalConfig) -> tuple[Any, list[Any]]:
    """A task manager, and what to ask it for. Indexing all of lm-eval's tasks takes long: only if a name needs it."""
    from lm_eval.tasks import TaskManager

    assert config.tasks is not None
    manager = TaskManager(include_path=config.include, include_defaults=False)
    specs = [_file_of(name) or name for name in config.tasks]
    unknown = [spec for spec in specs if not _is_file(spec) and spec not in manager.task_index]
    if unknown:
        manager = TaskManager(include_path=config.include)
    for name in unknown:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, n=_NUM_NEAR, cutoff=0.6)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "lm-eval has none like it"
            raise UserError(f"eval.tasks: unknown task {name!r}: {hint}")
    return manager, specs


def _is_file(spec: str) -> bool:
    return spec.endswith((".yaml", ".yml"))


def _file_of(name: str) -> str | None:
    """The file that a name means: the user's own, or lm-eval's where it lies where its name says."""
    if _is_file(name):
        if not Path(name).is_file():
            raise UserError(f"eval.tasks: {name} does not exist; give a file of a task, or a task's name")
        return name
    import lm_eval.tasks

    file = Path(lm_eval.tasks.__file__).parent / name / f"{name}.yaml"
    is_task = file.is_file() and f"\ntask: {name}\n" in "\n" + file.read_text(encoding="utf-8")
    return str(file) if is_task else None


def _name_of(spec: str) -> str:
    """A task's name; a file's is the one in it."""
    from lm_eval.tasks._yaml_loader import load_yaml

    if not _is_file(spec):
        return spec
    content = load_yaml(Path(spec), resolve_func=False, recursive=True)
    names = [content.get(key) for key in ("group", "task") if isinstance(content.get(key), str)]
    return names[0] if names else Path(spec).stem


def _on_local_files(manager: Any, specs: Sequence[str], config: EvalConfig) -> dict[str, Any]:
    """The one task with its rows, and its shots, from files."""
    from lm_eval.tasks._yaml_loader import load_yaml

    files_of_tasks = [spec if _is_file(spec) else manager.task_index[spec].yaml_path for spec in specs]
    task = load_yaml(Path(files_of_tasks[0]), resolve_func=True, recursive=True) if files_of_tasks[0] else {}
    if len(specs) != 1 or not isinstance(task.get("task"), str) or "class" in task:
        raise UserError("eval.data: goes with one task that a file of lm-eval describes, not with a group or several")
    for key, path in (("eval.data", config.data), ("eval.fewshot_data", config.fewshot_data)):
        if path is not None and not Path(path).is_file():
            raise UserError(f"{key}: {path} does not exist; give a file of JSON lines")
    test = task.get("test_split") or task.get("validation_split") or "test"
    files = {test: str(Path(config.data or "").resolve())}
    if config.fewshot_data is not None:
        shots = task.get("fewshot_split") or task.get("training_split") or "train"
        files[shots] = str(Path(config.fewshot_data).resolve())
    own = {key: value for key, value in task.items() if key not in ("dataset_name", "tag", "group")}
    for split in ("training_split", "validation_split", "test_split", "fewshot_split"):
        if own.get(split) not in files:
            own.pop(split, None)
    return own | {"dataset_path": "json", "dataset_kwargs": {"data_files": files}}


def _prepare(name: str, task: Any, config: EvalConfig) -> None:
    """What lm-eval's own command line sets before it builds requests."""
    if task.get_config("unsafe_code"):
        raise UserError(f"eval.tasks: {name} runs code that the model wrote, which is never done here")
    own = task.get_config("num_fewshot")
    if config.num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=config.num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    if task.get_config("num_fewshot") and config.data is not None and config.fewshot_data is None:
        raise UserError(
            f"eval.fewshot_data: {name} takes {task.get_config('num_fewshot')} shots; give a file of rows for them, or "
            "say eval.num_fewshot=0"
        )


def _build_requests(loaded: dict[str, Any], config: EvalConfig) -> None:
    from lm_eval.evaluator_utils import get_sample_size

    from specbench.evals.lm_eval_adapter import chat_context

    is_chat = config.protocol == "chat"
    for name, task in loaded["tasks"].items():
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        try:
            task.build_all_requests(
                limit=get_sample_size(task, config.num_samples),
                system_instruction=config.instruction,
                apply_chat_template=is_chat,
                fewshot_as_multiturn=is_chat,
                chat_template=chat_context if is_chat else None,
            )
        except UserError:
            raise
        except Exception as error:  # a template that misses a column, shots that are not there
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"eval.tasks: {name} cannot be asked ({type(error).__name__}: {reason})") from error


def _asked(loaded: dict[str, Any], config: EvalConfig, model: EvalModel) -> list[Asked]:
    """Every request of every document, in lm-eval's order."""
    from lm_eval.api.instance import Instance

    from specbench.evals.lm_eval_adapter import SampleMaker

    has_categories = len(loaded["tasks"]) > 1
    maker = SampleMaker(model, config.max_output_tokens, config.stop, has_categories=has_categories)
    asked = []
    for task in loaded["tasks"].values():
        by_document: dict[int, list[Instance]] = {}
        for instance in task.instances:
            by_document.setdefault(instance.doc_id, []).append(instance)
        for instances in by_document.values():
            reference = _reference(task, instances[0].doc)
            asked += [
                maker.asked(instance, copy, is_only=len(instances) == 1, reference=reference)
                for instance in instances
                for copy in range(instance.repeats or 1)
            ]
    return asked


def _reference(task: Any, document: dict) -> str:
    """The target as text: the choice where targets are numbers of choices."""
    target = task.doc_to_target(document)
    choices = task.doc_to_choice(document) if task.get_config("doc_to_choice") is not None else None
    if choices is not None and isinstance(target, int) and 0 <= target < len(choices):
        return str(choices[target])
    return str(target)


def _scorers(loaded: dict[str, Any]) -> tuple[str, ...]:
    """Every "metric/filter" that there will be."""
    return tuple(
        dict.fromkeys(
            f"{metric}/{ensemble.name}"
            for task in loaded["tasks"].values()
            for metric in task.aggregation()
            for ensemble in task._filters
        )
    )


def _likelihood_notices(samples: Sequence[Sample]) -> Iterator[str]:
    num_scored = sum(sample.scored_from is not None for sample in samples)
    if num_scored:
        yield (
            f"{num_scored} of {len(samples)} requests ask for the likelihood of given text: each emits one token, and "
            "latency and throughput are over them, too."
        )


def _notices(loaded: dict[str, Any], config: EvalConfig) -> Iterator[str]:
    by_shots: dict[int, list[str]] = {}
    for name, task in loaded["tasks"].items():
        by_shots.setdefault(task.get_config("num_fewshot"), []).append(name)
    for num_shots, names in by_shots.items():
        yield f"lm-eval {_version()}, {_listed(names)}: {num_shots} shots, {config.protocol} protocol"
    for name, task in loaded["tasks"].items():
        kwargs = task.get_config("generation_kwargs") or {}
        if kwargs.get("do_sample") or float(kwargs.get("temperature") or 0) > 0:
            yield f"task {name} asks for sampling ({kwargs}); the run's sampling group decides instead"


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _sha256(samples: Iterable[Sample]) -> str:
    content = [[one.sample_id, one.prompt, one.messages, one.prompt_token_ids, one.reference] for one in samples]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
