"""Every preset composes, names the real checkpoint and sizes, and can run here as its first line says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from specbench.cli import Composer
from specbench.conf_folder import conf_dir
from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.model_choice import PACKAGED_CHECKPOINT, choose_model
from specbench.plan import prepare
from specbench.run_config import RunConfig

PRESETS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))
#: Preset -> checkpoint, samples, requests at once, output tokens, temperature, drafts.
REAL = {
    "gsm8k_mtp": ("thinkingmachines/Inkling-NVFP4", 1319, 64, 1024, 0, 8),
    "gsm8k_cache": ("thinkingmachines/Inkling-NVFP4", 1319, 64, 1024, 0, 8),
    "mmau_full": ("thinkingmachines/Inkling-NVFP4", 1000, 16, 1024, 0, 8),
    "mmau_mtp": ("thinkingmachines/Inkling-NVFP4", 200, 16, 1024, 0, 8),
    "speed_bench_8k": ("thinkingmachines/Inkling-NVFP4", 128, 16, 2048, 0, 8),
    "speed_bench_2k": ("thinkingmachines/Inkling-NVFP4", 256, 16, 2048, 1, 8),
    "aime25_off": ("Qwen/Qwen3-30B-A3B", 1, 1, 16384, 0, None),
    "verify_contract": ("Qwen/Qwen3-30B-A3B", 64, 16, 128, 0, 4),
}
#: Tokens of the reference's tables: prompts of 8K and 2K, answers of 2K.
LENGTHS = {"speed_bench_8k": (8192, 2048), "speed_bench_2k": (2048, 2048)}


def compose(*overrides: str) -> RunConfig:
    composer = Composer(list(overrides))
    return composer.compose(composer.overrides)[0]


def reduced(preset: str) -> list[str]:
    """The overrides behind "here:" in the preset's first line."""
    text = (conf_dir() / "experiment" / f"{preset}.yaml").read_text(encoding="utf-8")
    found = re.search(r"; here: (.*)\)$", text.splitlines()[1])
    return [] if found is None else shlex.split(found[1])


def test_every_preset_is_looked_at() -> None:
    assert set(PRESETS) == {*REAL, "quickstart"}


@pytest.mark.parametrize("preset", REAL)
def test_a_preset_names_the_real_checkpoint_and_sizes(preset: str) -> None:
    config = compose(f"+experiment={preset}")
    assert REAL[preset] == (
        config.model.checkpoint,
        config.eval.num_samples,
        config.load.concurrency,
        config.eval.max_output_tokens,
        config.sampling.temperature,
        config.spec.num_speculative_tokens,
    )
    assert config.side_concurrency <= config.engine.max_num_seqs
    assert LENGTHS.get(preset, (None, None)) == (config.eval.isl, config.eval.osl)


def test_the_columns_of_the_tables_are_overrides() -> None:
    assert compose("+experiment=gsm8k_mtp", "spec=mtp1").spec.num_speculative_tokens == 1
    assert not compose("+experiment=gsm8k_cache", "cache=plain").cache.prefix_caching
    block = compose("+experiment=speed_bench_2k", "spec.rejection_sample_method=block").spec
    assert (block.draft_sample_method, block.rejection_sample_method) == ("probabilistic", "block")
    assert compose("+experiment=speed_bench_2k", "spec=mtp1").spec.draft_sample_method == "probabilistic"


def packaged_model_hears() -> bool:
    return any(name.startswith("model.audio.") for name in Checkpoint.open(PACKAGED_CHECKPOINT).tensors)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_ready_to_run_here(preset: str, tmp_path: Path) -> None:
    """As far as it goes without running a model: data, prompts, lengths, memory."""
    overrides = reduced(preset)
    assert overrides or preset == "quickstart"
    config = compose(f"+experiment={preset}", *overrides, "engine.device=cpu", f"output_root={tmp_path}")
    if config.eval.name == "mmau" and not packaged_model_hears():
        pytest.skip("the packaged checkpoint has no audio tower")
    plan = prepare(config, is_sweep=False)
    assert plan.choice.packaged and plan.choice == choose_model(config.model)
    assert 0 < len(plan.requests) <= 64
