"""Which backend runs, and that the Triton one serves whole models as plain torch does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from specbench.engine.layers.attention_backends.choose import BACKENDS, choose_backend, choose_graphs, make_backend
from specbench.errors import UserError
from tests.engine.models.test_inkling import random_ids
from tests.engine.paged_sequences import PagedSequences, load_target
from tests.engine.tiny_decoders import build_tiny_decoder

# Before any test changes what Triton reads when it is imported.
pytest.importorskip("triton")

IS_INTERPRETED = not torch.cuda.is_available()


@pytest.fixture
def on_a_real_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("on_a_real_device")
def test_auto_takes_the_first_that_can_and_says_why() -> None:
    choice = choose_backend("auto", "cpu", "float32", {"window"})
    assert (choice.name, choice.reason) == ("torch", "triton does not run on cpu")
    choice = choose_backend("auto", "cuda:1", "bfloat16", {"relative_bias"})
    assert choice.name == "triton" and "on an H200 it took" in choice.reason


def test_another_machine_has_the_packages_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose_backend("auto", "cuda", "bfloat16", ()).name == "torch"
    assert choose_backend("auto", "cuda", "bfloat16", (), is_here=False).name == "triton"


@pytest.mark.usefixtures("on_a_real_device")
def test_a_named_one_that_cannot_is_refused_with_one_that_can() -> None:
    with pytest.raises(UserError, match=r"engine.attention_backend: triton does not run on cpu; say torch, or auto"):
        choose_backend("triton", "cpu", "float32", ())


def test_the_interpreter_runs_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("auto", "cpu", "float32", ()).name == "torch"
    assert choose_backend("triton", "cpu", "float32", ()).name == "triton"


def test_graphs_are_recorded_where_they_can_be() -> None:
    assert choose_graphs("auto", "triton", "cuda:1").name == "on"
    assert choose_graphs("off", "triton", "cuda").name == "off"
    assert choose_graphs("auto", "torch", "cpu").name == choose_graphs("auto", "torch", "cuda").name == "off"
    with pytest.raises(UserError, match=r"engine.cuda_graphs=on: there are none on cpu; say auto or off"):
        choose_graphs("on", "torch", "cpu")
    with pytest.raises(
        UserError, match=r"by torch cannot be recorded; engine.attention_backend=triton or flashinfer can"
    ):
        choose_graphs("on", "torch", "cuda")
    for name, line in BACKENDS.items():
        assert make_backend(name).is_capturable == line.is_capturable


def test_every_backend_can_be_made() -> None:
    for name in BACKENDS:
        make_backend(name)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a millisecond in the interpreter."""
    monkeypatch.setattr("specbench.engine.kernels.attention_plan._FULL_GRID", 4)


@torch.inference_mode()
def hiddens(
    folder: Path,
    attention: str,
    steps: list[tuple[list[int], list[int], list[int] | None]],
    device: str = "cpu" if IS_INTERPRETED else "cuda",
) -> torch.Tensor:
    """Hiddens of the live rows of two sequences, step by step: (first positions, rows, live rows)."""
    target = load_target(folder, attention=attention, device=device)
    sequences = PagedSequences(target, 2, 128, 16, device=device)
    ids = torch.tensor(random_ids(256), device=device).view(2, 128)
    outputs = []
    for first, rows, live in steps:
        metadata = sequences.metadata([0, 1], first, rows, live)
        request = torch.repeat_interleave(torch.arange(2), torch.tensor(rows)).to(device)
        hidden = target.forward(
            target.embed(ids[request, metadata.positions]), metadata, sequences.caches
        ).hidden_states
        ends = [sum(rows[: index + 1]) for index in range(2)]
        for index, count in enumerate(live or rows):
            outputs.append(hidden[ends[index] - rows[index] :][:count])
    return torch.cat(outputs)


STEPS: list[tuple[list[int], list[int], list[int] | None]] = [
    ([0, 0], [37, 3], None),
    ([37, 3], [3, 3], [3, 1]),
]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("name", ["llama yarn in full", "qwen3 windows"])
def test_triton_serves_decoders(name: str, tmp_path: Path) -> None:
    folder = build_tiny_decoder(tmp_path, name)
    torch.testing.assert_close(hiddens(folder, "triton", STEPS), hiddens(folder, "torch", STEPS), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("few_programs")
def test_triton_serves_inkling(tiny_folder: Path) -> None:
    expected = hiddens(tiny_folder, "torch", STEPS)
    torch.testing.assert_close(hiddens(tiny_folder, "triton", STEPS), expected, rtol=1e-4, atol=1e-5)
