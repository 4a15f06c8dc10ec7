"""When a checkpoint is due, as pure values.

A policy is asked with the present `Tick` and the `Tick` of the last save and answers yes or no; it
reads no clock. `needs_consensus` says whether two ranks could answer differently (their clocks
differ, their step numbers do not), in which case the ranks' answers are ORed before anyone acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torchtitan_lite.config.job_config import Checkpoint


@dataclass(frozen=True)
class Tick:
    """A moment of the run: optimizer steps done, and monotonic seconds on this rank's clock."""

    step: int
    seconds: float


class SavePolicy(Protocol):
    """Says when a checkpoint is due."""

    @property
    def needs_consensus(self) -> bool:
        """Whether ranks could answer differently."""
        ...

    def due(self, now: Tick, last_save: Tick) -> bool:
        """Whether a save is due at `now`, the last one having been at `last_save`."""
        ...


@dataclass(frozen=True)
class EverySteps:
    """Due at the multiples of `interval` steps."""

    interval: int
    needs_consensus: bool = False

    def due(self, now: Tick, last_save: Tick) -> bool:
        return now.step % self.interval == 0


@dataclass(frozen=True)
class EverySeconds:
    """Due once `interval` seconds have passed since the last save."""

    interval: float
    needs_consensus: bool = True

    def due(self, now: Tick, last_save: Tick) -> bool:
        return now.seconds - last_save.seconds >= self.interval


@dataclass(frozen=True)
class AtStep:
    """Due at one step."""

    step: int
    needs_consensus: bool = False

    def due(self, now: Tick, last_save: Tick) -> bool:
        return now.step == self.step


@dataclass(frozen=True)
class Never:
    """Never due."""

    needs_consensus: bool = False

    def due(self, now: Tick, last_save: Tick) -> bool:
        return False


@dataclass(frozen=True)
class AnyOf:
    """Due when one of `policies` is."""

    policies: tuple[SavePolicy, ...]

    @property
    def needs_consensus(self) -> bool:
        return any(policy.needs_consensus for policy in self.policies)

    def due(self, now: Tick, last_save: Tick) -> bool:
        return any(policy.due(now, last_save) for policy in self.policies)


def split(policy: SavePolicy) -> tuple[SavePolicy, SavePolicy]:
    """`policy` as the part that every rank answers alike, to be acted on at once, and the part that needs consensus."""
    parts = policy.policies if isinstance(policy, AnyOf) else (policy,)
    return (
        AnyOf(tuple(part for part in parts if not part.needs_consensus)),
        AnyOf(tuple(part for part in parts if part.needs_consensus)),
    )


def build_save_policy(config: Checkpoint) -> SavePolicy:
    """The policy that `config` describes."""
    if config.load_only:
        return Never()
    every: SavePolicy = (
        EverySeconds(config.interval) if config.interval_type == "seconds" else EverySteps(config.interval)
    )
    return AnyOf((AtStep(1), every)) if config.enable_first_step_checkpoint else every


def build_skips_when_busy(config: Checkpoint) -> bool:
    """Whether a save that is due while another is in flight is left out, as `when_busy` says."""
    return config.when_busy == "skip"
