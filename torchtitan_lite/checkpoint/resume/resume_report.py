"""What a resume would do, before it does it.

The step that it resumes from, the keys that do not fit, what changed in the configuration and the
topology, and what the states refuse. A pure value, the same on every rank, made from what the ranks
agreed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_lite.checkpoint.format.key_report import KeyReport
from torchtitan_lite.config.drift import Change, Rule
from torchtitan_lite.store.manifest_fields import topology_in_words
from torchtitan_lite.store.place import Place


@dataclass(frozen=True)
class ResumeReport:
    """A resume from `path` that has not happened yet."""

    path: Place
    step: int
    keys: KeyReport
    keys_are_refused: bool
    """Whether the resume is refused if keys differ (`checkpoint.load_strictness`)."""
    changes: Sequence[Change]
    topology_before: str
    topology_now: str
    refused_states: Sequence[str] = ()
    """The refusals of states, one sentence each."""
    fresh_states: Sequence[str] = ()
    """States that are not loaded from the checkpoint, and why, one sentence each."""
    ways_out: Sequence[str] = ()
    """Settings that would supply missing keys, one sentence each; empty if none are missing or none would help."""

    @property
    def refusals(self) -> list[str]:
        """Why this resume is refused, one line each; empty if it is not."""
        config = [f"  {change}" for change in self.changes if change.rule is Rule.REFUSED]
        keys = [str(self.keys)] if self.keys and self.keys_are_refused else []
        return [*keys, *config, *(f"  {sentence}" for sentence in self.refused_states)]

    @property
    def notes(self) -> list[str]:
        """Differences that the resume accepts, one line each."""
        before, now = topology_in_words(self.topology_before) or "unknown", topology_in_words(self.topology_now)
        topology = [f"topology: {before} -> {now}"] if self.topology_before != self.topology_now else []
        changes = (str(change) for change in self.changes if change.rule is not Rule.REFUSED)
        return [*topology, *self.fresh_states, *changes]

    def __str__(self) -> str:
        lines = [f"Resume from {self.path}, step {self.step}:"]
        lines += ["  keys: all there, all fit" if not self.keys else str(self.keys)]
        lines += [f"  {note}" for note in self.notes] or ["  configuration and topology: as they were"]
        lines += ["It would be refused:", *self.refusals, *self.ways_out] if self.refusals else ["It would continue."]
        return "\n".join(lines)
