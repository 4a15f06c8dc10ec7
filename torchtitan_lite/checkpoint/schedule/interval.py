"""When a checkpoint is due, as pure values.

A policy compares the current `Tick` with the `Tick` of the last save and reads no clock. Both count training, of all
starts of the run: after a load from memory the last save is the one that the disk has. Otherwise a job that is killed
more often than its interval would advance in memory and never save. `needs_consensus` is true where two ranks could
answer differently: their clocks differ, their step numbers do not. The ranks then OR their answers before any of them
acts. What else the manager asks, each policy answers by itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import in_one_line


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


# A base class and not a protocol: its answers to what the manager asks next to `due` fit any policy. So a user's needs
# `due` only, and a question that is added later breaks none.
class SavePolicy(ABC):
    """Decides when a checkpoint is due. A policy of your own derives from this class and defines `due`.

    Every rank has a policy, made alike, and asks it at the end of each step.
    """

    needs_consensus: bool = True
    """Whether ranks could answer `due` differently, as by a clock, a file or a metric of one rank.

    If so (the default), any rank's yes counts: the ranks exchange their answers, and all save one step later. If not,
    each rank saves at once by its own answer. That must then follow from the step alone: ranks that answer differently
    wait for one another until a time-out.
    """

    @abstractmethod
    def due(self, now: Tick, last_save: Tick) -> bool:
        """Return whether a save is due at `now`, if the last one was at `last_save`. Any rank."""

    def split(self) -> tuple[SavePolicy, SavePolicy]:
        """Return this policy in two parts: one that every rank answers alike, and one that needs consensus."""
        return (AnyOf(()), self) if self.needs_consensus else (self, AnyOf(()))

    def missed_step(self, after: int, before: int) -> int | None:
        """Return the first step between `after` and `before`, without these, that is due by its number; None for none.

        By default none is known: a loop that leaves out calls of `save` is then not warned.
        """
        return None

    def is_overdue(self, loaded: Tick, on_disk: Tick) -> bool:
        """Return whether a save since `on_disk` is missing, where the state was `loaded` from memory.

        The next step is saved then. By default it is missing if a save is due at `loaded`.
        """
        return self.due(loaded, on_disk)

    def intervals_behind(self, loaded: Tick, on_disk: Tick) -> float:
        """Return how many intervals lie between both; 0, the default, for a policy without a fixed interval."""
        return 0.0


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Due at every multiple of `interval` steps."""

    interval: int
    needs_consensus = False

    def due(self, now: Tick, last_save: Tick) -> bool:
        return now.step % self.interval == 0

    def missed_step(self, after: int, before: int) -> int | None:
        step = self._next_after(after)
        return step if step < before else None

    def is_overdue(self, loaded: Tick, on_disk: Tick) -> bool:
        return self._next_after(on_disk.step) <= loaded.step

    def intervals_behind(self, loaded: Tick, on_disk: Tick) -> float:
        return max(0.0, (loaded.step - on_disk.step) / self.interval)

    def _next_after(self, step: int) -> int:
        return self.interval * (step // self.interval + 1)


@dataclass(frozen=True)
class EverySeconds(SavePolicy):
    """Due once `interval` seconds of training have passed since the last save."""

    interval: float

    def due(self, now: Tick, last_save: Tick) -> bool:
        return now.seconds - last_save.seconds >= self.interval

    def intervals_behind(self, loaded: Tick, on_disk: Tick) -> float:
        return max(0.0, (loaded.seconds - on_disk.seconds) / self.interval)


@dataclass(frozen=True)
class EveryAutoSeconds(SavePolicy):
    """Due once the seconds that the coordinator has chosen have passed since the last save, and that is durable."""

    def due(self, now: Tick, last_save: Tick) -> bool:
        return not now.is_writing and now.seconds - last_save.seconds >= now.auto_seconds


@dataclass(frozen=True)
class AtStep(SavePolicy):
    """Due at one step only; if that is missed, it is not made up for."""

    step: int
    needs_consensus = False

    def due(self, now: Tick, last_save: Tick) -> bool:
        return now.step == self.step

    def missed_step(self, after: int, before: int) -> int | None:
        return self.step if after < self.step < before else None

    def is_overdue(self, loaded: Tick, on_disk: Tick) -> bool:
        return False


@dataclass(frozen=True)
class AnyOf(SavePolicy):
    """Due when at least one of `policies` is due; of none, never."""

    policies: tuple[SavePolicy, ...]

    @property
    def needs_consensus(self) -> bool:  # type: ignore[override]  # it follows from the policies
        """Whether one of them does. `split` parts them: only these save a step later."""
        return any(policy.needs_consensus for policy in self.policies)

    def due(self, now: Tick, last_save: Tick) -> bool:
        return any(answer(policy, "due", now, last_save) for policy in self.policies)

    def split(self) -> tuple[SavePolicy, SavePolicy]:
        parts = [policy.split() for policy in self.policies]
        return AnyOf(tuple(alike for alike, _ in parts)), AnyOf(tuple(differing for _, differing in parts))

    def missed_step(self, after: int, before: int) -> int | None:
        missed = [answer(policy, "missed_step", after, before) for policy in self.policies]
        return min((step for step in missed if step is not None), default=None)

    def is_overdue(self, loaded: Tick, on_disk: Tick) -> bool:
        return any(answer(policy, "is_overdue", loaded, on_disk) for policy in self.policies)

    def intervals_behind(self, loaded: Tick, on_disk: Tick) -> float:
        behind: list[float] = [answer(policy, "intervals_behind", loaded, on_disk) for policy in self.policies]
        return max(behind, default=0.0)


def answer(policy: SavePolicy, question: str, *given: object) -> Any:
    """Return what the method `question` of `policy` returns. Raises ConfigError, which names the class and the method,
    for what it raises and for what is no answer: a run would save never, or at every step, without a word.
    """
    expected, is_answer = _ANSWERS[question]
    name = f"save_policy: {type(policy).__name__}.{question}: expected {expected},"
    try:
        found = getattr(policy, question)(*given)
    except ConfigError:
        raise  # Of a policy in `AnyOf`, which is named.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{name} but it raised {in_one_line(error)}. Fix that method.") from error
    if not is_answer(found):
        raise ConfigError(f"{name} found {in_one_line(found)}. Fix that method.")
    return found


def _is_bool(found: Any) -> bool:
    # Of numpy and torch, too: comparisons of metrics return them.
    if str(getattr(found, "dtype", "")) in ("bool", "torch.bool"):
        return bool(math.prod(found.shape) == 1)
    return isinstance(found, bool)


_ANSWERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "due": ("True or False", _is_bool),
    "is_overdue": ("True or False", _is_bool),
    "missed_step": ("a step or None", lambda found: found is None or isinstance(found, Integral)),
    "intervals_behind": ("a number", lambda found: isinstance(found, Real)),
}


def build_save_policy(config: Checkpoint, own: SavePolicy | None = None) -> SavePolicy:
    """Return the save policy that `config` describes, or the caller's `own`; one that is never due for `load_only`."""
    if config.load_only:
        return AnyOf(())
    if own is not None:
        return own
    policies: list[SavePolicy] = [_build_every(config)]
    if config.or_every_seconds:
        policies.append(EverySeconds(config.or_every_seconds))
    if steps := {*config.at_steps} | ({1} if config.enable_first_step_checkpoint else set()):
        policies = [*(AtStep(step) for step in sorted(steps)), *policies]
    return policies[0] if len(policies) == 1 else AnyOf(tuple(policies))


def _build_every(config: Checkpoint) -> SavePolicy:
    if config.interval_type == "steps":
        return EverySteps(config.interval)
    if config.interval_type == "seconds":
        return EverySeconds(config.interval)
    return EveryAutoSeconds() if config.interval_type == "auto" else AnyOf(())


def build_skips_when_busy(config: Checkpoint) -> bool:
    """Return whether a save that is due while another one is in flight is skipped (`checkpoint.when_busy`)."""
    return config.when_busy == "skip"
