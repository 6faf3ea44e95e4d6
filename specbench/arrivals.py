"""When each request arrives.

Belongs here: implementations of generate.Load. Does not belong here: what a request asks (evals/), how it is run.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbench.generate import Load
from specbench.run_config import LoadConfig


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """So many clients, each sending its next request as soon as its last one finished."""

    concurrency: int

    def num_due(self, now_s: float, num_submitted: int, num_in_flight: int) -> int:
        """Whatever the clock says: one for each idle client."""
        return max(0, self.concurrency - num_in_flight)

    def next_due_s(self, now_s: float, num_submitted: int) -> float | None:
        """Only a finished request frees a client."""
        return None


def make_load(config: LoadConfig) -> Load:
    """The load that the configuration names."""
    assert config.name == "closed"
    return ClosedLoad(config.concurrency)
