"""What acceptance is known of a checkpoint on given data: published by others, or measured of the packaged one.

Belongs here: those counts, where they come from, and whether a run is one that they speak of. Does not belong here: the
judgement (drafting_checks.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from specbench.records import RunRecord

#: The released name of Inkling's quantised checkpoint.
_INKLING = "inkling-nvfp4"
_PULL_REQUEST = "vLLM pull request 48892"
#: Hashes of the packaged checkpoint and its problems: other weights or problems are not what was measured.
NANO_CHECKPOINT = "9a54dbc7addd5721a9a76cbca7c60b1eb3fe4b7d3bb0b7286dacceb55930ff7c"
NANO_PROBLEMS = "e6b424afe9e5fe40e2fccc25aa05c1246ba2403c6475b6ba47dcf10d4c83cd8c"
#: Only the packaged listening questions have this name.
NANO_AUDIO = "nano_audio"


@dataclass(frozen=True, slots=True)
class KnownAcceptance:
    """Counts of greedy decoding with k drafts."""

    source: str
    #: The checkpoint's name in lower case, or its hash.
    model: str
    #: The data's name, or their hash.
    data: str
    drafts: int
    #: [k]
    accepted_at_position: tuple[int, ...]
    #: The prompts are the same too, so that nothing but chance may differ.
    is_same_text: bool

    @property
    def k(self) -> int:
        return len(self.accepted_at_position)

    @property
    def accepted_per_draft(self) -> float:
        return sum(self.accepted_at_position) / self.drafts

    def given_the_previous(self, position: int) -> float:
        """Conditional rate of a position; every draft had k tokens."""
        reached = self.accepted_at_position[position - 1] if position else self.drafts
        return self.accepted_at_position[position] / reached


def _published(data: str, drafts: int, percentages: tuple[float, ...]) -> KnownAcceptance:
    accepted = tuple(round(drafts * percentage / 100) for percentage in percentages)
    return KnownAcceptance(_PULL_REQUEST, _INKLING, data, drafts, accepted, is_same_text=False)


def _reading(drafts: int, *accepted_at_position: int) -> KnownAcceptance:
    """specbench +model=inkling_nano spec=mtpK eval.num_samples=320"""
    source = "measured of the packaged checkpoint over its 320 problems"
    return KnownAcceptance(source, NANO_CHECKPOINT, NANO_PROBLEMS, drafts, accepted_at_position, is_same_text=True)


def _hearing(drafts: int, *accepted_at_position: int) -> KnownAcceptance:
    """specbench +model=inkling_nano spec=mtpK eval=mmau eval.num_samples=240"""
    source = "measured of the packaged checkpoint over its 240 listening questions"
    return KnownAcceptance(source, NANO_CHECKPOINT, NANO_AUDIO, drafts, accepted_at_position, is_same_text=True)


_KNOWN = (
    _reading(16_360, 14_999),
    _reading(11_442, 10_543, 9_536),
    _reading(9_013, 8_253, 7_505, 6_885),
    _reading(7_617, 7_016, 6_348, 5_645, 5_227),
    _reading(6_728, 6_154, 5_414, 4_926, 4_588, 4_287),
    _reading(6_058, 5_384, 4_816, 4_376, 4_051, 3_790, 3_547),
    _reading(5_444, 4_905, 4_348, 3_950, 3_686, 3_460, 3_240, 3_030),
    _reading(4_980, 4_521, 4_060, 3_695, 3_432, 3_234, 3_021, 2_792, 2_386),
    _hearing(4_413, 4_036),
    _hearing(3_089, 2_780, 2_665),
    _hearing(2_473, 2_159, 2_039, 1_883),
    _hearing(2_023, 1_826, 1_764, 1_598, 1_403),
    _hearing(1_805, 1_614, 1_551, 1_334, 1_201, 1_125),
    _hearing(1_686, 1_475, 1_317, 1_148, 1_084, 1_004, 972),
    _hearing(1_526, 1_252, 1_154, 1_051, 986, 928, 885, 847),
    _hearing(1_338, 1_096, 1_072, 1_002, 941, 875, 838, 794, 717),
    _published("gsm8k", 246_348, (83.59,)),
    _published("gsm8k", 104_880, (75.68, 60.11, 49.76, 41.13, 35.38, 29.80, 26.08, 22.29)),
    _published("mmau", 24_982, (78.66,)),
    _published("mmau", 12_182, (73.83, 52.86, 39.44, 29.67, 23.81, 19.64, 16.83, 14.22)),
)


def known_acceptance(run: RunRecord, k: int) -> KnownAcceptance | None:
    """What is known of such a run; None where nothing is, or where it was not greedy."""
    is_greedy = run.config.get("sampling", {}).get("temperature") == 0
    if not is_greedy or run.config["spec"]["method"] != "mtp" or is_one_module(run, k):
        return None
    models, data = {run.model.ran.lower(), run.model.sha256}, {run.data.name, run.data.sha256}
    found = (one for one in _KNOWN if one.k == k and one.model in models and one.data in data)
    return next((one for one in found if not one.is_same_text or _is_bare(run)), None)


def is_one_module(run: RunRecord, k: int) -> bool:
    """Whether one module drafts at every depth, by the run's own setting."""
    return k > 1 and run.config["spec"].get("modules") == "single"


def _is_bare(run: RunRecord) -> bool:
    """Whether questions were put as they were when the counts were taken."""
    asked = run.config["eval"]
    if run.data.name == NANO_AUDIO:
        return asked.get("prompt") == "official"
    return asked.get("num_fewshot") == 0 and asked.get("protocol") == "chat" and asked.get("instruction") == "auto"
