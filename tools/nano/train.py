"""Makes inkling-nano: problems, sounds, tokenizer, training, checkpoint. One GPU, under ten minutes a stage.

    python -m tools.nano.train --out text --gsm8k gsm8k_train.jsonl --items 0             # reads, from nothing
    python -m tools.nano.train --out nano --gsm8k gsm8k_train.jsonl --init text           # reads and hears
    python -m tools.nano.train --device cpu --steps 3 --out /tmp/nano                     # smoke test

The loss is the backbone's next-token loss plus a share of the mean loss of the MTP depths, from the first step on. At
audio placeholders every module's lookahead is the audio tower's row, as in the engine. With `--init` the weights and
the tokenizer of that checkpoint are taken; a tower that it has not got starts new.
On a GPU the layers are compiled one kind at a time and the whole step is captured in one graph.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.nano import data
from tools.nano.export import export_checkpoint, read_tensors
from tools.nano.listening import held_out_items
from tools.nano.model import NanoConfig, NanoModel, initialize, make_layout
from tools.nano.optimizer import Optimizer
from tools.nano.problems import NUM_TRAINING_PROBLEMS
from tools.nano.tokenizer import train_tokenizer

NUM_TRAINING_ITEMS = 300_000
MTP_LOSS_SHARE = 0.3
ROUTER_BIAS_STEP = 1e-3
WARMUP_STEPS = 200
DECAY_START = 0.4
LAST_FACTOR = 0.02


@dataclass
class TrainingRecord:
    """What the model card tells about a run."""

    hardware: str
    parameters: int
    num_problems: int
    num_gsm8k_rows: int
    num_items: int
    # Name of the checkpoint that training started from; None for a new one.
    started_from: str | None
    muon_rate: float
    adam_rate: float
    epoch_tokens: int
    # Share of the rows' slots that hold a token.
    row_fill: float
    rows_per_step: int
    steps: int = 0
    data_seconds: float = 0.0
    setup_seconds: float = 0.0
    training_seconds: float = 0.0
    export_bytes: int = 0
    # [step, backbone loss, MTP losses by depth]
    curve: list[list[float]] = field(default_factory=list)
    # Last load of each mixture layer's experts; 0.25 each is even.
    expert_load: list[list[float]] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """Token slots trained on."""
        return self.steps * self.rows_per_step * data.ROW_LENGTH


def rate_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, flat, then linear decay to `LAST_FACTOR`."""
    warm = min(1.0, (step + 1) / max(1, min(WARMUP_STEPS, num_steps // 4)))
    begin = DECAY_START * num_steps
    decayed = max(0.0, (step - begin) / max(1.0, num_steps - begin))
    return warm * (1.0 - (1.0 - LAST_FACTOR) * decayed)


def weighted_loss(hidden: Tensor, unembed: Tensor, divisor: float, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy of `hidden` [B, T, H] against `targets` [B, T], weighted by `weights` [B, T]."""
    dtype = torch.bfloat16 if hidden.is_cuda else torch.float32
    logits = F.linear((hidden / divisor).to(dtype), unembed.to(dtype)).float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def shifted(rows: Tensor, by: int) -> Tensor:
    """[B, T, ...] moved `by` slots to the left, zeros at the end."""
    return F.pad(rows[:, by:], (*[0, 0] * (rows.ndim - 2), 0, by))


class Trainer:
    """Model, optimizer and the static input buffers of one step."""

    def __init__(self, config: NanoConfig, rows_per_step: int, device: torch.device, args: argparse.Namespace) -> None:
        self.config, self.device = config, device
        self.model = NanoModel(config)
        initialize(self.model, torch.Generator().manual_seed(args.seed))
        # Fixed as drawn: what they multiply adapts to them, and they stay far from uniform.
        self.model.llm.embed_norm.weight.requires_grad_(False)
        self.model.llm.norm.weight.requires_grad_(False)
        self.model.to(device)
        self.optimizer = Optimizer(self.model, args.muon_rate, args.adam_rate, weight_decay=0.05)
        self.mtp_share = args.mtp_share
        shape = (rows_per_step, data.ROW_LENGTH)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.documents = torch.zeros(shape, dtype=torch.int32, device=device)
        self.bins = torch.zeros(*shape, config.audio_bands, dtype=torch.uint8, device=device)
        self.weights = torch.zeros(shape, device=device)
        # [1 + depths] backbone loss, then MTP losses
        self.losses = torch.zeros(1 + config.num_mtp_layers, device=device)
        self.loads: list[Tensor] = []
        self.loss_function = weighted_loss
        self.graph: torch.cuda.CUDAGraph | None = None

    def compile(self) -> None:
        """Compiles each kind of layer once, and the loss; mixed precision from here on."""
        self.model.set_compute_dtype(torch.bfloat16)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch._dynamo.config.recompile_limit = 64
        for layer in self.model.llm.layers:
            layer.compile(dynamic=False)
        for module in self.model.mtp:
            module.transformer_block.compile(dynamic=False)
            module.join = torch.compile(module.join, dynamic=False)
        self.loss_function = torch.compile(weighted_loss, dynamic=False)

    def targets(self, ahead: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] `ahead` slots later, and their weights: zero where the document has ended by then."""
        same = shifted(self.documents, ahead) == self.documents
        return shifted(self.tokens, ahead), shifted(self.weights, ahead) * same

    def forward(self) -> Tensor:
        """The training loss of the batch in the buffers."""
        model, divisor = self.model, self.config.logits_divisor
        unembed = model.llm.unembed.weight
        layout = make_layout(self.documents, self.config.window)
        embedded = model.embed(self.tokens, model.hear(self.bins))
        residual, self.loads = model.layers_forward(embedded, layout)
        hidden = model.final_norm(residual)
        losses = [self.loss_function(hidden, unembed, divisor, *self.targets(1))]
        for depth, module in enumerate(model.mtp):
            joined = module.join(hidden, shifted(embedded, depth + 1))
            hidden, _ = module.transformer_block(joined, layout)
            losses.append(self.loss_function(hidden, unembed, divisor, *self.targets(depth + 2)))
        stacked = torch.stack(losses)
        self.losses.copy_(stacked.detach())
        return stacked[0] + self.mtp_share * stacked[1:].mean()

    def step(self) -> None:
        """One forward, backward and update on the buffers."""
        self.optimizer.clear()
        self.forward().backward()
        self.optimizer.step()
        self.balance_experts()

    @torch.no_grad()
    def balance_experts(self) -> None:
        """Raises the choice bias of underused experts and lowers that of overused ones."""
        for gate, load in zip(self.gates, self.loads, strict=True):
            gate.bias.add_(ROUTER_BIAS_STEP * torch.sign(load.mean() - load))

    @property
    def gates(self) -> list[torch.nn.Module]:
        return [layer.mlp.gate for layer in self.model.llm.layers if not layer.is_dense]

    def capture(self) -> None:
        """Captures the whole step; the caller has filled the buffers."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.clear()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def run_step(self) -> None:
        """One step, by replay where captured."""
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()


class RowLoader:
    """All rows on the device, drawn in a new order each epoch."""

    def __init__(self, rows: data.Rows, device: torch.device, seed: int) -> None:
        self.tokens = torch.from_numpy(rows.tokens).to(device)
        self.documents = torch.from_numpy(rows.documents).to(device)
        self.codes = torch.from_numpy(rows.codes).to(device)
        self.frames = torch.from_numpy(rows.frames).to(device)
        self.bins = torch.from_numpy(rows.bins).to(device)
        self.weights = torch.tensor(data.LOSS_WEIGHTS, device=device)
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.empty(0, dtype=torch.int64)
        self.device = device

    def fill(self, trainer: Trainer) -> None:
        """Copies the next rows into the trainer's buffers."""
        count = trainer.tokens.shape[0]
        if self.order.numel() < count:
            self.order = torch.randperm(self.tokens.shape[0], generator=self.generator).to(self.device)
        chosen, self.order = self.order[:count], self.order[count:]
        if chosen.numel() < count:
            chosen = chosen.repeat(-(-count // chosen.numel()))[:count]
        trainer.tokens.copy_(self.tokens[chosen])
        trainer.documents.copy_(self.documents[chosen])
        trainer.bins.copy_(self.bins[self.frames[chosen]])
        trainer.weights.copy_(self.weights[self.codes[chosen].long()])


def synchronize(device: torch.device) -> None:
    """Waits for the device, so that a host clock may be read."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed_steps(trainer: Trainer, loader: RowLoader, seconds: float) -> int:
    """How many steps fit into `seconds`, measured on steps at learning rate zero."""
    trainer.optimizer.set_factor(0.0)
    loader.fill(trainer)
    trainer.run_step()
    synchronize(trainer.device)
    start = time.perf_counter()
    for _ in range(10):
        loader.fill(trainer)
        trainer.run_step()
    synchronize(trainer.device)
    step_seconds = (time.perf_counter() - start) / 10
    print(f"{1000 * step_seconds:.1f} ms a step", flush=True)
    return max(1, int(seconds / step_seconds))


def train(trainer: Trainer, loader: RowLoader, num_steps: int, record: TrainingRecord) -> None:
    """Runs all steps and keeps the curve."""
    log_every = max(1, num_steps // 40)
    start = time.perf_counter()
    for step in range(num_steps):
        trainer.optimizer.set_factor(rate_factor(step, num_steps))
        loader.fill(trainer)
        trainer.run_step()
        if step % log_every == 0 or step == num_steps - 1:
            losses = [round(value, 4) for value in trainer.losses.tolist()]
            record.curve.append([step, *losses])
            seconds = time.perf_counter() - start
            print(f"step {step:6d} {seconds:6.1f} s  backbone {losses[0]:.4f}  depth 0 {losses[1]:.4f}  "
                  f"depth {len(losses) - 2} {losses[-1]:.4f}", flush=True)  # fmt: skip
            assert losses[0] == losses[0], "the loss is not a number"
    synchronize(trainer.device)
    record.steps = num_steps
    record.training_seconds = time.perf_counter() - start
    record.expert_load = [[round(x, 3) for x in load.tolist()] for load in trainer.loads]


def prepare(trainer: Trainer, rows: data.Rows, use_graph: bool) -> None:
    """Compiles and captures on a GPU, on any rows; leaves the weights as initialized."""
    initial = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    loader = RowLoader(rows, trainer.device, seed=0)
    loader.fill(trainer)
    trainer.optimizer.set_factor(0.0)
    trainer.compile()
    trainer.step()
    if use_graph:
        trainer.capture()
    trainer.model.load_state_dict(initial)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains inkling-nano.")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--record", type=Path, help="JSON file that tells about the run, for the model card")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=150.0, help="length of the training loop")
    parser.add_argument("--end-by", type=float, help="shortens the loop to end so many seconds after the start")
    parser.add_argument("--steps", type=int, help="number of steps instead of a length")
    parser.add_argument("--init", type=Path, help="checkpoint folder to go on from")
    parser.add_argument("--problems", type=int, default=NUM_TRAINING_PROBLEMS)
    parser.add_argument("--items", type=int, default=NUM_TRAINING_ITEMS, help="listening questions")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K training rows (JSON lines) to mix in")
    parser.add_argument("--rows", type=int, help="rows a step; 64 on a GPU, 2 on a CPU")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--muon-rate", type=float, default=3e-3)
    parser.add_argument("--adam-rate", type=float, default=2e-3)
    parser.add_argument("--mtp-share", type=float, default=MTP_LOSS_SHARE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--eager", action="store_true", help="neither compiles nor captures: for short trials")
    args = parser.parse_args()
    if args.device == "cpu":
        args.rows, args.workers, args.problems = args.rows or 2, 1, min(args.problems, 64)
        args.items = min(args.items, 64)
    args.rows = args.rows or 64
    return args


def make_tokenizer(args: argparse.Namespace, gsm8k: list[data.Problem]) -> Tokenizer:
    """That of the checkpoint to go on from, or a new one."""
    if args.init is not None:
        return Tokenizer.from_file(str(args.init / "tokenizer.json"))
    return train_tokenizer(data.tokenizer_texts(gsm8k))


def make_trainer(args: argparse.Namespace, tokenizer: Tokenizer, gsm8k: list[data.Problem]) -> Trainer:
    """The trainer, ready to step; on a GPU its layers compile on a few rows while the pool makes the rest."""
    device = torch.device(args.device)
    trainer = Trainer(NanoConfig(), args.rows, device, args)
    if args.init is not None:
        started = read_tensors(args.init)
        new = trainer.model.load_state_dict(started, strict=False).missing_keys
        assert all(name.startswith("model.audio.") for name in new), new
    if device.type == "cuda" and not args.eager:
        prepare(trainer, data.make_rows(tokenizer, gsm8k, 512), use_graph=not args.no_graph)
    return trainer


def check_held_out(rows: data.Rows) -> None:
    """No packaged clip is trained on."""
    held_out = np.array([item.digest for item in held_out_items()], np.uint64)
    assert not np.isin(held_out, rows.digests).any(), "a held-out clip is among the training clips"


def loop_seconds(args: argparse.Namespace, gone: float) -> float:
    """Length of the training loop, `gone` seconds after the start."""
    return args.seconds if args.end_by is None else max(1.0, min(args.seconds, args.end_by - gone))


def main() -> None:
    args = parse_arguments()
    begin = time.perf_counter()
    gsm8k = data.read_gsm8k(args.gsm8k) if args.gsm8k else []
    tokenizer = make_tokenizer(args, gsm8k)
    factory = data.RowFactory(tokenizer, gsm8k, args.problems, args.items, args.workers)
    trainer = make_trainer(args, tokenizer, gsm8k)
    setup_seconds = time.perf_counter() - begin
    print(f"ready to step after {setup_seconds:.1f} s", flush=True)
    rows = factory.collect()
    check_held_out(rows)
    data_seconds = time.perf_counter() - begin
    row_fill = rows.num_tokens / rows.tokens.size
    print(f"{rows.num_rows} rows, {row_fill:.1%} filled, {rows.digests.size} clips of {len(rows.bins)} frames, "
          f"after {data_seconds:.1f} s", flush=True)  # fmt: skip
    loader = RowLoader(rows, trainer.device, args.seed)
    num_steps = args.steps or timed_steps(trainer, loader, loop_seconds(args, time.perf_counter() - begin))
    record = TrainingRecord(
        hardware=torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        num_problems=args.problems, num_gsm8k_rows=len(gsm8k), num_items=rows.digests.size,
        started_from=None if args.init is None else args.init.name,
        muon_rate=args.muon_rate, adam_rate=args.adam_rate, epoch_tokens=rows.num_tokens, row_fill=row_fill,
        rows_per_step=args.rows, data_seconds=data_seconds, setup_seconds=setup_seconds,
    )  # fmt: skip
    train(trainer, loader, num_steps, record)
    record.export_bytes = export_checkpoint(trainer.model, tokenizer, args.out)
    summary = {**record.__dict__, "slots": record.slots}
    if args.record is not None:
        args.record.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print({name: value for name, value in summary.items() if name != "curve"}, flush=True)


if __name__ == "__main__":
    main()
