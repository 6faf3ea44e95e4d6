"""Measures inkling-nano: accuracy, acceptance by position, and how wiring faults show in acceptance.

    python -m tools.nano.evaluate specbench/assets/inkling_nano specbench/assets/nano_problems/test.jsonl
    python -m tools.nano.evaluate specbench/assets/inkling_nano --listening 240

Everything is fp32 and nothing is cached: the target's greedy text is found once, its hidden rows are computed once, and
each draft round runs every MTP module over all rows of the text. Since verification is exact, faults in the drafts can
only move acceptance. A round counts if all its drafts have a true token to meet, so the end of a text lowers nothing.

Index letters: S sequences, T slots, N drafts of a round. A round stands at the last computed slot `last`; the token at
`last + 1` is known, and draft j is a guess for the token at `last + 2 + j`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.nano import listening
from tools.nano import tokenizer as special
from tools.nano.data import clip_bins
from tools.nano.export import load_checkpoint
from tools.nano.listening import Item, held_out_items, is_matched
from tools.nano.model import Layout, NanoModel, make_layout
from tools.nano.problems import Problem, final_number

MAX_NEW_TOKENS = 320
FAULTS = {
    "raw_embedding": "raw embedding (backbone embed_norm skipped)",
    "pre_norm_hidden": "hidden row before the final norm",
    "post_norm_link": "final norm between the modules",
    "ignored_window": "window ignored in local modules",
    "no_reprefill": "stale rows not computed again",
    "module_0_everywhere": "module 0 at every depth",
    "hidden_off_by_one": "hidden row of the slot before",
}
# One that only texts with audio can show.
AUDIO_FAULTS = {"placeholder_lookahead": "placeholder's embedding in the lookahead, not the tower's row"}


@dataclass(frozen=True)
class Prompt:
    """Token ids, and at audio placeholders the dMel levels of their frames."""

    ids: list[int]
    # [placeholders, bands] uint8
    bins: np.ndarray | None = None


@dataclass
class Texts:
    """Prompts and the model's own greedy answers."""

    # [S, T] tokens, padded with zeros
    tokens: Tensor
    # [S] number of prompt tokens
    prompt_lengths: Tensor
    # [S] prompt and answer, with the end token
    lengths: Tensor
    # [S] whether the end token was reached
    finished: Tensor
    # [S, T, H] what stands at audio placeholders; None without audio
    heard: Tensor | None


@dataclass
class Rounds:
    """Draft rounds of one setting, counted by sequence."""

    # [S] rounds
    rounds: Tensor
    # [S, N] rounds whose draft at this position, and all before it, were right
    accepted: Tensor


def padded_length(length: int, window: int) -> int:
    """Next multiple of the window: chunks of the banded attention are whole."""
    return -(-length // window) * window


def whole_row_layout(tokens: Tensor, window: int) -> Layout:
    """Each row is one document. Padding lies after the text, where causality hides it."""
    return make_layout(torch.ones_like(tokens), window)


def residual_rows(model: NanoModel, tokens: Tensor, heard: Tensor | None = None) -> Tensor:
    """[S, T] -> [S, T, H], the residual stream before the final norm."""
    layout = whole_row_layout(tokens, model.config.window)
    return model.layers_forward(model.embed(tokens, heard), layout)[0]


def heard_rows(model: NanoModel, tokens: Tensor, prompts: Sequence[Prompt]) -> Tensor | None:
    """[S, T] -> [S, T, H], the audio tower's rows at placeholders; None where no prompt has audio."""
    if all(prompt.bins is None for prompt in prompts):
        return None
    bins = torch.zeros(*tokens.shape, model.config.audio_bands, dtype=torch.uint8)
    places = (tokens == model.config.audio_token).cpu()
    for row, prompt in enumerate(prompts):
        if prompt.bins is not None:
            bins[row, places[row]] = torch.from_numpy(prompt.bins)
    return torch.stack([model.hear(row.to(tokens.device)) for row in bins])


def greedy_texts(model: NanoModel, prompts: Sequence[Prompt], end_token: int, max_new: int) -> Texts:
    """Greedy answers, every step computed from the first token on."""
    device = next(model.parameters()).device
    prompt_lengths = torch.tensor([len(prompt.ids) for prompt in prompts], device=device)
    width = padded_length(int(prompt_lengths.max()) + max_new + 1, model.config.window)
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt.ids)] = torch.tensor(prompt.ids, device=device)
    heard = heard_rows(model, tokens, prompts)
    lengths = prompt_lengths.clone()
    limits = prompt_lengths + max_new
    active = torch.arange(len(prompts), device=device)
    while active.numel():
        used = padded_length(int(lengths[active].max()), model.config.window)
        residual = residual_rows(model, tokens[active, :used], None if heard is None else heard[active, :used])
        last = residual[torch.arange(active.numel(), device=device), lengths[active] - 1]
        chosen = model.logits(model.final_norm(last)).argmax(-1)
        tokens[active, lengths[active]] = chosen
        lengths[active] += 1
        active = active[(chosen != end_token) & (lengths[active] < limits[active])]
    finished = tokens[torch.arange(len(prompts), device=device), lengths - 1] == end_token
    width = padded_length(int(lengths.max()), model.config.window)
    return Texts(tokens[:, :width], prompt_lengths, lengths, finished, None if heard is None else heard[:, :width])


class StaleRows:
    """Keeps what each row of each module left behind when it was first computed, as an engine without re-prefill does.

    A row's keys, values and convolution states are functions of the four streams kept here.
    """

    def __init__(self) -> None:
        self.streams: dict[tuple[int, str], Tensor] = {}
        self.depth = 0
        # [S, T, 1] rows computed for the first time in this round
        self.fresh: Tensor | None = None

    def __call__(self, name: str, u: Tensor) -> Tensor:
        kept = self.streams.get((self.depth, name))
        mixed = u if kept is None else torch.where(self.fresh, u, kept)
        self.streams[self.depth, name] = mixed
        return mixed

    def select(self, rows: Tensor) -> None:
        """Keeps only the sequences `rows`."""
        self.streams = {key: value[rows] for key, value in self.streams.items()}


class Drafter:
    """Runs rounds of the MTP modules over whole texts, right or with one fault."""

    def __init__(self, model: NanoModel, texts: Texts, residual: Tensor, num_drafts: int, fault: str | None) -> None:
        self.model, self.fault, self.num_drafts = model, fault, num_drafts
        hidden = residual if fault == "pre_norm_hidden" else model.final_norm(residual)
        # [S, T, H] what module 0 receives
        self.hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0)) if fault == "hidden_off_by_one" else hidden
        self.tokens = texts.tokens
        self.heard = None if fault == "placeholder_lookahead" else texts.heard
        self.layout = whole_row_layout(texts.tokens[:1], model.config.window)
        self.stale = StaleRows() if fault == "no_reprefill" else None
        self.table = model.llm.embed.weight

    def embed(self, tokens: Tensor, rows: Tensor, ahead: int) -> Tensor:
        """Embeddings of `tokens` [R, T], which are those of the sequences `rows` moved `ahead` slots to the left."""
        heard = None if self.heard is None else F.pad(self.heard[rows, ahead:], (0, 0, 0, ahead))
        if self.fault != "raw_embedding":
            return self.model.embed(tokens, heard)
        raw, is_heard = self.table[tokens], (tokens == self.model.config.audio_token)[..., None]
        return raw if heard is None else torch.where(is_heard, heard, raw)

    def drafts(self, rows: Tensor, last: Tensor, fresh_from: Tensor) -> Tensor:
        """One round of the sequences `rows` [R]: `last`, `fresh_from` [R] slots -> drafts [R, N]."""
        model, reach = self.model, torch.arange(rows.numel(), device=rows.device)
        slots = torch.arange(self.tokens.shape[1], device=rows.device)
        hidden, work = self.hidden[rows], self.tokens[rows].clone()
        drafted = []
        for depth in range(self.num_drafts):
            module = model.mtp[0 if self.fault == "module_0_everywhere" else depth]
            later = F.pad(work[:, depth + 1 :], (0, depth + 1))
            keywords = {"ignore_window": self.fault == "ignored_window"}
            if self.stale is not None:
                self.stale.depth, self.stale.fresh = depth, (slots >= fresh_from[:, None])[..., None]
                keywords["stream"] = self.stale
            joined = module.join(hidden, self.embed(later, rows, depth + 1))
            hidden, _ = module.transformer_block(joined, self.layout, **keywords)
            token = model.logits(hidden[reach, last]).argmax(-1)
            drafted.append(token)
            work[reach, (last + 2 + depth).clamp(max=work.shape[1] - 1)] = token
            if self.fault == "post_norm_link":
                hidden = model.final_norm(hidden)
        return torch.stack(drafted, dim=1)


def run_rounds(model: NanoModel, texts: Texts, residual: Tensor, num_drafts: int, fault: str | None) -> Rounds:
    """Drafts and verifies along each text until fewer than N true tokens are left."""
    count, device = texts.tokens.shape[0], texts.tokens.device
    drafter = Drafter(model, texts, residual, num_drafts, fault)
    result = Rounds(torch.zeros(count, dtype=torch.int64), torch.zeros(count, num_drafts, dtype=torch.int64))
    rows = torch.arange(count, device=device)
    last, fresh_from = texts.prompt_lengths - 1, torch.zeros_like(texts.prompt_lengths)
    ahead = torch.arange(num_drafts, device=device)
    while True:
        goes_on = last + 1 + num_drafts < texts.lengths[rows]
        if drafter.stale is not None:
            drafter.stale.select(goes_on.nonzero().squeeze(-1))
        rows, last, fresh_from = rows[goes_on], last[goes_on], fresh_from[goes_on]
        if not rows.numel():
            return result
        drafts = drafter.drafts(rows, last, fresh_from)
        truth = texts.tokens[rows[:, None], last[:, None] + 2 + ahead]
        right = (drafts == truth).long().cumprod(dim=1)
        result.rounds[rows.cpu()] += 1
        result.accepted[rows.cpu()] += right.cpu()
        accepted = right.sum(dim=1)
        fresh_from, last = last + 1, last + 1 + accepted


def rates(rounds: Rounds) -> tuple[Tensor, Tensor]:
    """[1 + N] acceptance length and per-position rates; [S, 1 + N] each sequence's influence on them."""
    counts = rounds.rounds.double()
    ones = counts[:, None]
    totals = torch.cat([ones + rounds.accepted.sum(1, keepdim=True), rounds.accepted], dim=1).double()
    values = totals.sum(0) / counts.sum()
    return values, (totals - counts[:, None] * values) / counts.sum()


def clustered_error(influence: Tensor) -> Tensor:
    """Standard error of a ratio of sums, sequences as clusters: [S, K] -> [K]."""
    count = influence.shape[0]
    return (influence.square().sum(0) * count / max(1, count - 1)).sqrt()


def compare(right: Rounds, wrong: Rounds) -> dict[str, list[float]]:
    """Rates under a fault, the differences to the right wiring, and the differences' paired standard errors."""
    right_values, right_influence = rates(right)
    values, influence = rates(wrong)
    difference, error = values - right_values, clustered_error(influence - right_influence)
    scores = torch.where(error > 0, difference / error.clamp(min=1e-12), torch.zeros_like(error))
    return {"values": values.tolist(), "differences": difference.tolist(), "errors": error.tolist(),
            "z_scores": scores.tolist()}  # fmt: skip


def encode_prompts(tokenizer: Tokenizer, problems: list[Problem]) -> list[Prompt]:
    """Each question as the one user message of a conversation."""
    head, tail = special.USER + special.CONTENT_TEXT, special.END_MESSAGE + special.MODEL
    return [Prompt(tokenizer.encode(f"{head}{problem['question']}{tail}").ids) for problem in problems]


def encode_items(tokenizer: Tokenizer, items: Sequence[Item]) -> list[Prompt]:
    """Each clip, then its question in the first form."""
    prompts = []
    for item in items:
        bins = clip_bins(item.clip)
        heard = special.USER + special.AUDIO_MARK + special.AUDIO_PLACEHOLDER * len(bins) + special.AUDIO_END
        asked = special.USER + special.CONTENT_TEXT + listening.prompt(item.row, listening.PROMPTS[0])
        text = f"{heard}{special.END_MESSAGE}{asked}{special.END_MESSAGE}{special.MODEL}"
        prompts.append(Prompt(tokenizer.encode(text).ids, bins))
    return prompts


def answers(tokenizer: Tokenizer, texts: Texts) -> list[str]:
    """What the model wrote, without special tokens."""
    spans = zip(texts.prompt_lengths.tolist(), texts.lengths.tolist(), strict=True)
    return [tokenizer.decode(texts.tokens[row, start:end].tolist()) for row, (start, end) in enumerate(spans)]


def grade(tokenizer: Tokenizer, texts: Texts, problems: list[Problem]) -> list[bool]:
    """Whether each greedy answer's final number is exactly right."""
    written = zip(answers(tokenizer, texts), problems, strict=True)
    return [final_number(answer) == final_number(problem["answer"]) for answer, problem in written]


def grade_items(tokenizer: Tokenizer, texts: Texts, items: Sequence[Item]) -> list[bool]:
    """Whether MMAU's own rule takes each greedy answer."""
    written = zip(answers(tokenizer, texts), items, strict=True)
    return [is_matched(answer, item.row["answer"], item.row["choices"]) for answer, item in written]  # type: ignore[arg-type]


def by_group(items: Sequence[Item], marks: list[bool]) -> dict[str, dict[str, list[int]]]:
    """[right, all] by value of each of MMAU's groupings."""
    groups: dict[str, dict[str, list[int]]] = {}
    for item, mark in zip(items, marks, strict=True):
        for name in ("task", "difficulty", "category", "sub-category"):
            count = groups.setdefault(name, {}).setdefault(str(item.row[name]), [0, 0])
            count[0], count[1] = count[0] + mark, count[1] + 1
    return groups


@torch.no_grad()
def evaluate(model: NanoModel, tokenizer: Tokenizer, prompts: Sequence[Prompt], mark: Callable[[Texts], list[bool]],
             max_new: int, faults: Sequence[str]) -> dict:  # fmt: skip
    """All numbers as one dictionary of plain values; `mark` says which answers are right."""
    started = time.perf_counter()
    texts = greedy_texts(model, prompts, tokenizer.token_to_id(special.END_SAMPLING), max_new)
    marks = mark(texts)
    residual = residual_rows(model, texts.tokens, texts.heard)
    right = run_rounds(model, texts, residual, model.config.num_mtp_layers, None)
    values, influence = rates(right)
    single = rates(run_rounds(model, texts, residual, 1, None))
    accuracy = sum(marks) / len(marks)
    return {
        "num_problems": len(prompts),
        "accuracy": accuracy,
        "accuracy_error": math.sqrt(accuracy * (1 - accuracy) / len(marks)),
        "finished": texts.finished.double().mean().item(),
        "mean_prompt_tokens": texts.prompt_lengths.double().mean().item(),
        "mean_answer_tokens": (texts.lengths - texts.prompt_lengths).double().mean().item(),
        "num_rounds": int(right.rounds.sum()),
        "right": {"values": values.tolist(), "errors": clustered_error(influence).tolist()},
        "mtp1": {"values": single[0].tolist(), "errors": clustered_error(single[1]).tolist()},
        "faults": {
            fault: compare(right, run_rounds(model, texts, residual, model.config.num_mtp_layers, fault))
            for fault in faults
        },
        "marks": marks,
        "texts": answers(tokenizer, texts)[:8],
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def percent(values: list[float]) -> str:
    return " ".join(f"{100 * value:5.1f}" for value in values)


def print_table(result: dict) -> None:
    """The short table, and each fault's largest shift in standard errors."""
    print(f"{result['num_problems']} problems, accuracy {100 * result['accuracy']:.1f} % "
          f"(se {100 * result['accuracy_error']:.1f}), finished {100 * result['finished']:.1f} %, "
          f"{result['mean_prompt_tokens']:.0f} + {result['mean_answer_tokens']:.0f} tokens, "
          f"{result['num_rounds']} rounds, {result['seconds']:.0f} s")  # fmt: skip
    for name, groups in result.get("by", {}).items():
        print(f"{name}: " + ", ".join(f"{value} {right}/{count}" for value, (right, count) in groups.items()))
    print(f"MTP1 length {result['mtp1']['values'][0]:.3f}, {percent(result['mtp1']['values'][1:])}")
    print(f"{'right':22s} {result['right']['values'][0]:.3f} |{percent(result['right']['values'][1:])}")
    for fault, row in result["faults"].items():
        scores = row["z_scores"]
        print(f"{fault:22s} {row['values'][0]:.3f} |{percent(row['values'][1:])} | z length {scores[0]:+.1f}, "
              f"largest {max(scores, key=abs):+.1f}")  # fmt: skip


def read_problems(path: Path, limit: int) -> list[Problem]:
    lines = path.read_text(encoding="utf-8").splitlines()[:limit]
    return [json.loads(line) for line in lines]


def evaluate_problems(model: NanoModel, tokenizer: Tokenizer, args: argparse.Namespace) -> dict:
    """Word problems from a file."""
    problems = read_problems(args.problems, args.limit)
    prompts, faults = encode_prompts(tokenizer, problems), list(FAULTS) if args.faults is None else args.faults
    return evaluate(model, tokenizer, prompts, lambda texts: grade(tokenizer, texts, problems),
                    args.max_new_tokens, faults)  # fmt: skip


def evaluate_listening(model: NanoModel, tokenizer: Tokenizer, args: argparse.Namespace) -> dict:
    """Held-out listening questions, made anew: the same as the packaged ones."""
    items = held_out_items(args.listening)
    prompts = encode_items(tokenizer, items)
    faults = [*FAULTS, *AUDIO_FAULTS] if args.faults is None else args.faults
    result = evaluate(model, tokenizer, prompts, lambda texts: grade_items(tokenizer, texts, items),
                      args.max_new_tokens, faults)  # fmt: skip
    first = [item.row["choices"][0] == item.row["answer"] for item in items]  # type: ignore[index]
    frames = sum(len(prompt.bins) for prompt in prompts if prompt.bins is not None)
    return {
        **result,
        "mean_frames": frames / len(items),
        "always_first": sum(first) / len(items),
        "by": by_group(items, result["marks"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluates inkling-nano in fp32.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("problems", type=Path, nargs="?")
    parser.add_argument("--listening", type=int, help="so many held-out listening questions instead of problems")
    parser.add_argument("--out", type=Path, help="JSON file for all numbers")
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--faults", nargs="*", choices=[*FAULTS, *AUDIO_FAULTS], help="all of them by default")
    args = parser.parse_args()
    if (args.problems is None) == (args.listening is None):
        parser.error("give either a file of problems or --listening COUNT")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = load_checkpoint(args.checkpoint).to(args.device)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    result = (evaluate_problems if args.listening is None else evaluate_listening)(model, tokenizer, args)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_table(result)


if __name__ == "__main__":
    main()
