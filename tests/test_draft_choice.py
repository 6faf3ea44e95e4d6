"""A draft model is named, found, recorded and part of what a finished job is known by; or refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specbench import benchmark
from specbench.benchmark import Invocation
from specbench.errors import UserError
from specbench.model_choice import PACKAGED_CHECKPOINT
from specbench.plan import fingerprint, prepare
from specbench.run_config import RunConfig
from specbench.run_directory import RunDirectory
from tests.engine.tiny_inkling import build_tiny_inkling
from tests.fake_engine import Script
from tests.test_run_config import values

INVOCATION = Invocation("specbench", (), "", job_name=None)
#: The packaged model's vocabulary; without a tokenizer its names can't be compared.
FIELDS = {"num_hidden_layers": 2, "vocab_size": 2048, "unpadded_vocab_size": 2048}


def config(tmp_path: Path, **changes: object) -> RunConfig:
    spec = {"spec__method": "draft_model", "eval__num_samples": 3, "output_root": str(tmp_path / "outputs")}
    return RunConfig.from_dict(values(**(spec | changes)))


def test_a_named_draft_is_in_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = Script()
    monkeypatch.setattr(benchmark, "embedded_machinery", script.machinery)
    draft = build_tiny_inkling(tmp_path / "tiny_draft", num_modules=0, **FIELDS)
    outcome = benchmark.run(config(tmp_path, spec__checkpoint=str(draft)), INVOCATION)
    assert outcome.directory is not None
    (engine,) = script.started
    assert (engine.proposer, engine.draft_checkpoint) == ("draft_model", str(draft))
    record = RunDirectory.open(outcome.directory).read_run()
    assert record.draft_model is not None
    assert (record.draft_model.ran, record.draft_model.packaged) == ("tiny_draft", False)
    assert record.draft_model.sha256 != record.model.sha256
    assert "tiny_draft" in (outcome.directory / "report.md").read_text()


def test_the_draft_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    draft = build_tiny_inkling(tmp_path / "draft", num_modules=0, **FIELDS)
    plan = prepare(config(tmp_path, spec__checkpoint=str(draft)), is_sweep=False)
    before = fingerprint(plan, plan.model_identity())
    build_tiny_inkling(draft, num_modules=0, seed=9, **FIELDS)
    assert fingerprint(plan, plan.model_identity())["drafter"] != before["drafter"]


def test_the_packaged_model_drafts_for_itself_and_says_so(tmp_path: Path) -> None:
    plan = prepare(config(tmp_path), is_sweep=False)
    assert plan.engine_config.draft_checkpoint == str(PACKAGED_CHECKPOINT)
    assert any("drafts for itself" in notice for notice in plan.notices)
    memory = plan.plan_memory()
    assert memory.kv_bytes_per_token("draft") == memory.kv_bytes_per_token("target")
    assert memory.lines["draft_weights"] == memory.lines["target_weights"]


def test_what_is_refused(tmp_path: Path) -> None:
    real = Path(shutil.copytree(PACKAGED_CHECKPOINT, tmp_path / "real"))
    with pytest.raises(UserError, match=r"spec\.checkpoint: spec=draft_model needs a draft's"):
        prepare(config(tmp_path, model__checkpoint=str(real), eval__data=__file__), is_sweep=False)
    with pytest.raises(UserError, match=r"spec\.checkpoint: .*missing is not a folder with a checkpoint"):
        prepare(config(tmp_path, spec__checkpoint=str(tmp_path / "missing")), is_sweep=False)
    other = build_tiny_inkling(tmp_path / "other", num_modules=0, num_hidden_layers=2)
    with pytest.raises(UserError, match=r"spec\.checkpoint: .* has 250 token ids and the target has 2048"):
        prepare(config(tmp_path, spec__checkpoint=str(other)), is_sweep=False)
    renamed = Path(shutil.copytree(PACKAGED_CHECKPOINT, tmp_path / "renamed"))
    tokenizer = json.loads((renamed / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = [token for token in vocab if vocab[token] in (300, 301)]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (renamed / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"spec\.checkpoint: .*renamed has other tokens"):
        prepare(config(tmp_path, spec__checkpoint=str(renamed)), is_sweep=False)
