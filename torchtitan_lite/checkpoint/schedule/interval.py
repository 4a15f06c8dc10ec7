"""When a checkpoint is due, as pure values.

A policy compares the current `Tick` with the `Tick` of the last save and reads no clock. Both count training, of all
starts of the run: after a load from memory the last save is the one that the disk has.
`needs_consensus` is true where two ranks could answer differently: their clocks differ, their step
numbers do not. The ranks then OR their answers before any of them acts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torchtitan_lite.config.job_config import Checkpoint


@dataclass(frozen=True)
class Tick:
    """A moment of the run: optimizer steps done, and seconds of training by this rank's clock."""

    step: int
    seconds: float
    is_writing: bool = False
    """Whether the last save is not durable yet, as far as this rank knows."""
    auto_seconds: float = math.inf
    """The interval that the coordinator has chosen; infinite on other ranks."""


BEGINNING = Tick(0, 0.0)
"""Of a run."""


class AtRisk(NamedTuple):
    """Training that the disk lacks."""

    steps: int
    seconds: float

    @classmethod
    def between(cls, on_disk: Tick, now: Tick) -> AtRisk:
        """Return what lies between the latest step on disk and `now`."""
        return cls(max(0, now.step - on_disk.step), max(0.0, now.seconds - on_disk.seconds))


NOTHING_AT_RISK = AtRisk(0, 0.0)


class SavePolicy(Protocol):
    """Decides when a checkpoint is due."""

    @property
    def needs_consensus(self) -> bool:
        """Whether ranks could answer differently."""
        ...

    def due(self, now: Tick, last_save: Tick) -> bool:
        """Return whether a save is due at `now`, if the last one was at `last_save`. Any rank."""
        ...


@dataclass(frozen=True)
class EverySteps:
    """Due at every multiple of `interval` steps."""

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
class Continuous:
    """Due as soon as the last save is durable, `floor_seconds` after it at the earliest."""

    floor_seconds: float
    needs_consensus: bool = True

    def due(self, now: Tick, last_save: Tick) -> bool:
        return not now.is_writing and now.seconds - last_save.seconds >= self.floor_seconds


@dataclass(frozen=True)
class EveryAutoSeconds:
    """Due once the seconds that the coordinator has chosen have passed since the last save, and that is durable."""

    needs_consensus: bool = True

    def due(self, now: Tick, last_save: Tick) -> bool:
        return not now.is_writing and now.seconds - last_save.seconds >= now.auto_seconds


@dataclass(frozen=True)
class AtStep:
    """Due at one step only."""

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
    """Due when at least one of `policies` is due."""

    policies: tuple[SavePolicy, ...]

    @property
    def needs_consensus(self) -> bool:
        return any(policy.needs_consensus for policy in self.policies)

    def due(self, now: Tick, last_save: Tick) -> bool:
        return any(policy.due(now, last_save) for policy in self.policies)


def split(policy: SavePolicy) -> tuple[SavePolicy, SavePolicy]:
    """Return `policy` in two parts: one that every rank answers alike, and one that needs consensus."""
    parts = _parts(policy)
    return (
        AnyOf(tuple(part for part in parts if not part.needs_consensus)),
        AnyOf(tuple(part for part in parts if part.needs_consensus)),
    )


def missed_step(policy: SavePolicy, after: int, before: int) -> int | None:
    """Return the first step between `after` and `before`, without these, that `policy` has due by its number."""
    missed = []
    for part in _parts(policy):
        if isinstance(part, EverySteps):
            missed.append(after - after % part.interval + part.interval)
        elif isinstance(part, AtStep):
            missed.append(part.step)
    return min((step for step in missed if after < step < before), default=None)


def is_overdue(policy: SavePolicy, loaded: Tick, on_disk: Tick) -> bool:
    """Return whether the state that was `loaded` from memory is owed to the disk: a save since `on_disk` is missing.

    A step of `at_steps` that was missed is not made up for.
    """
    for part in _parts(policy):
        if isinstance(part, EverySteps):
            missed = part.interval * (on_disk.step // part.interval + 1) <= loaded.step
        else:
            missed = not isinstance(part, AtStep) and part.due(loaded, on_disk)
        if missed:
            return True
    return False


def intervals_behind(policy: SavePolicy, loaded: Tick, on_disk: Tick) -> float:
    """Return how many intervals lie between both, of the shortest that is configured; 0 if none is."""
    steps, seconds = loaded.step - on_disk.step, loaded.seconds - on_disk.seconds
    behind = [0.0]
    for part in _parts(policy):
        if isinstance(part, EverySteps):
            behind.append(steps / part.interval)
        elif isinstance(part, EverySeconds):
            behind.append(seconds / part.interval)
    return max(behind)


def build_save_policy(config: Checkpoint) -> SavePolicy:
    """Return the save policy that `config` describes."""
    if config.load_only:
        return Never()
    policies: list[SavePolicy] = [_build_every(config)]
    if config.or_every_seconds:
        policies.append(EverySeconds(config.or_every_seconds))
    if steps := {*config.at_steps} | ({1} if config.enable_first_step_checkpoint else set()):
        policies = [*(AtStep(step) for step in sorted(steps)), *policies]
    return policies[0] if len(policies) == 1 else AnyOf(tuple(policies))


def _parts(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    return policy.policies if isinstance(policy, AnyOf) else (policy,)


def _build_every(config: Checkpoint) -> SavePolicy:
    if config.interval_type == "steps":
        return EverySteps(config.interval)
    if config.interval_type == "seconds":
        return EverySeconds(config.interval)
    if config.interval_type == "auto":
        return EveryAutoSeconds()
    return Continuous(config.continuous_floor_seconds) if config.interval_type == "continuous" else Never()


def build_skips_when_busy(config: Checkpoint) -> bool:
    """Return whether a save that is due while another one is in flight is skipped (`checkpoint.when_busy`)."""
    return config.when_busy == "skip"
