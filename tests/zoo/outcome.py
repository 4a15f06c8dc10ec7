"""The outcome of a case: a value, of one rank or of all together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EQUAL, WARNED, REFUSED, NOT_OFFERED, DIFFERS = "equal", "warned", "refused", "not offered by torch", "DIFFERS"
NOT_OFFERED_THERE, NOT_RUN = "not offered", "not run"
"""Of another library: it raises when it trains this, even without a checkpoint; it could not be imported."""
IN_ORDER = (DIFFERS, NOT_OFFERED, REFUSED, WARNED, EQUAL)


@dataclass(frozen=True)
class Outcome:
    """One of the kinds, and the sentence that gives its reason."""

    kind: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}" if self.why else self.kind

    @staticmethod
    def of_text(text: str) -> Outcome:
        """Return the outcome whose text this is."""
        kind, _, why = text.partition(": ")
        return Outcome(kind, why)

    @staticmethod
    def of_reports(reports: Sequence[Any]) -> Outcome:
        """Return the outcome of all ranks together, from the `Report` of each."""
        return Outcome.of_ranks(
            [
                Outcome(DIFFERS, f"a rank failed: {report.failure.strip().splitlines()[-1]}")
                if report.failure
                else report.value
                for report in reports
            ]
        )

    @staticmethod
    def of_ranks(outcomes: Sequence[Outcome]) -> Outcome:
        """Return the outcome of all ranks together: equal only if every rank found it equal. One rank warns for all."""
        kinds = {outcome.kind for outcome in outcomes}
        worst = min(outcomes, key=lambda outcome: IN_ORDER.index(outcome.kind))
        if len(kinds) > 1 and worst.kind not in (DIFFERS, WARNED):
            return Outcome(DIFFERS, "; ".join(f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes)))
        return worst


def first_sentence(error: BaseException | str) -> str:
    """Return the first sentence of a message."""
    return re.split(r"(?<=\.) ", sentence(error), maxsplit=1)[0]


def sentence(error: BaseException | str) -> str:
    """Return a message in one line of at most 400 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:397]}..."
