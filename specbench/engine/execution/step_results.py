"""What a step finds out on the device, in one tensor, and its way to the host.

Belongs here: the layout of that tensor, the one copy, waiting for it. Does not belong here: how it is computed
(stages.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specbench.engine.execution.step_clock import StepTimes
from specbench.engine.execution.to_host import copy_to_host
from specbench.engine.execution.token_logprobs import PromptLogprobs, TokenLogprobs
from specbench.engine.sampling.verification import Verdict
from specbench.engine.scheduling.step import StepOutput

#: Rows behind the tokens': sampled, drafted, proposed, accepted, committed tokens, computed tokens.
_NUM_COUNTS = 6


@dataclass(frozen=True, slots=True)
class StepResults:
    """One column a request."""

    # [k + 1 + 6, num_requests] int64
    packed: torch.Tensor

    @classmethod
    def empty(cls, k: int, num_requests: int, device: torch.device) -> StepResults:
        return cls(torch.zeros(k + 1 + _NUM_COUNTS, num_requests, dtype=torch.int64, device=device))

    def first(self, num_requests: int) -> StepResults:
        return StepResults(self.packed[:, :num_requests])

    @property
    def token_ids(self) -> torch.Tensor:
        """[num_requests, k + 1]: the first num_sampled are emitted."""
        return self.packed[:-_NUM_COUNTS].T

    @property
    def num_proposed(self) -> torch.Tensor:
        """[num_requests]: drafts that the proposer left; the one row that verification does not fill."""
        return self.packed[-4]

    @property
    def num_accepted(self) -> torch.Tensor:
        """[num_requests]."""
        return self.packed[-3]

    @property
    def counts(self) -> torch.Tensor:
        """[2, num_requests]: committed and computed tokens behind this step."""
        return self.packed[-2:]

    def fill(self, verdict: Verdict, counts: torch.Tensor) -> None:
        """What verification says; nothing is proposed yet. counts: [2, num_requests]."""
        accepted = verdict.num_accepted
        rows = torch.stack([verdict.num_sampled, verdict.num_drafted, torch.zeros_like(accepted), accepted])
        torch.cat([verdict.token_ids.T, rows, counts], out=self.packed)


class PendingStep:
    """A step whose work is on its way. `wait` is the one place where the host waits for the device.

    Columns of `results` behind the first num_requests are padding.
    """

    def __init__(
        self,
        results: StepResults,
        num_requests: int,
        times: StepTimes,
        token_logprobs: Sequence[TokenLogprobs],
        prompt_logprobs: Mapping[int, PromptLogprobs],
    ):
        self._num_requests = num_requests
        # [k + 1 + 6, num_requests or more] on the host once the event has come
        self._packed = copy_to_host(results.packed)
        self._times = times
        self._token_logprobs = token_logprobs
        self._prompt_logprobs = prompt_logprobs
        self._is_copied: torch.cuda.Event | None = None
        if times.stream is not None:
            self._is_copied = torch.cuda.Event()
            self._is_copied.record(times.stream)

    def wait(self) -> StepOutput:
        """The step's results, as soon as they are there."""
        if self._is_copied is not None:
            self._is_copied.synchronize()
        packed = self._packed.numpy()[:, : self._num_requests]
        seconds = self._times.seconds()
        return StepOutput(
            token_ids=packed[:-_NUM_COUNTS].T,
            num_sampled=packed[-6],
            num_drafted=packed[-5],
            num_proposed=packed[-4],
            logprobs={index: found for rows in self._token_logprobs for index, found in rows.read().items()},
            prompt_logprobs={index: found.read() for index, found in self._prompt_logprobs.items()},
            target_s=seconds.target_s,
            verify_s=seconds.verify_s,
            draft_s=seconds.draft_s,
            idle_s=seconds.idle_s,
        )
