"""Which checkpoints stay.

Pure: takes committed checkpoints, returns for each which rules keep it; no clock, no disk. Rules form a union: a
checkpoint stays if any rule keeps it, and goes only if at least one rule can judge it. Only full checkpoints are
judged, and only undamaged ones: a damaged checkpoint is left for a load to find. Whatever the rules say, these
checkpoints stay: the latest full one, the latest full one known to be good (this run committed or loaded it), and the
latest full one in which no NaN was found, because a run that diverged can roll back to it; if ranks differed
when that was saved, also the latest full one with nothing against it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import in_one_line
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind

LATEST_K, EVERY_N, BEST_K, FOR_HOURS = "keep_latest_k", "keep_every_n_steps", "keep_best_k", "keep_for_hours"
NO_RULE = "no_rule"
"""No rule is set that can judge the checkpoint."""
PINNED = "pinned"
WEIGHTS_ONLY = "weights_only"
DAMAGED = "damaged"
LATEST, LAST_GOOD, WITHOUT_NAN, PROTECTED = "latest", "last_good", "latest_without_nan", "protected"
EQUAL_RANKS = "latest_of_equal_ranks"
"""It has no NaN either, and ranks differed when a later one was saved."""

# Free space is not a rule: rules only keep, and it would have to remove what another rule keeps.
_YIELD_TO_FREE_SPACE = {LATEST_K, NO_RULE}
"""What only these keep may go where the disk has too little free space."""

_STEP = operator.attrgetter("step")
_Kept = Sequence[tuple[str, AbstractSet[int]]]
"""Each rule, or reason beyond all rules, with the steps that it keeps."""


@dataclass(frozen=True)
class Ruling:
    """What `rule` says: of the steps in `judges` it keeps those in `keeps`; of others it says nothing."""

    rule: str
    keeps: frozenset[int]
    judges: frozenset[int]


class RetentionPolicy(Protocol):
    """Decides which checkpoints stay: one rule, or several. Any object with `rulings` is one."""

    def rulings(self, full: Sequence[CheckpointInfo], now: float) -> list[Ruling]:
        """Return what each rule says of the full checkpoints `full`, by ascending step, at the Unix second `now`.

        A checkpoint goes if at least one rule judges it and none keeps it. **Coordinator only**, from any thread.
        """


@dataclass(frozen=True)
class KeepAll:
    """Keeps every checkpoint: no rule is set."""

    def rulings(self, full: Sequence[CheckpointInfo], now: float) -> list[Ruling]:
        return []


@dataclass(frozen=True)
class KeepLatest:
    """Keeps the `count` full checkpoints of the highest steps."""

    count: int

    def __post_init__(self) -> None:
        _at_least_one("KeepLatest", self.count)

    def rulings(self, full: Sequence[CheckpointInfo], now: float) -> list[Ruling]:
        return [Ruling(LATEST_K, _steps_of(full[-self.count :]), _steps_of(full))]


@dataclass(frozen=True)
class KeepEvery:
    """Keeps the checkpoints whose step is a multiple of `num_steps`, step 0 among them."""

    num_steps: int

    def __post_init__(self) -> None:
        _at_least_one("KeepEvery", self.num_steps)

    def rulings(self, full: Sequence[CheckpointInfo], now: float) -> list[Ruling]:
        kept = [info for info in full if info.step % self.num_steps == 0]
        return [Ruling(EVERY_N, _steps_of(kept), _steps_of(full))]


@dataclass(frozen=True)
class KeepBest:
    """Keeps the `count` checkpoints with the lowest value of `metric`, or the highest; of equals, the later.

    A checkpoint without the metric is never best, and this rule alone removes none. One with NaN, or of ranks that
    differed, is never best either.
    """

    count: int
    metric: str
    highest: bool = False

    def __post_init__(self) -> None:
        _at_least_one("KeepBest", self.count)

    def rulings(self, full: Sequence[CheckpointInfo], now: float) -> list[Ruling]:
        measured = [info for info in full if self.metric in info.metrics]
        sign = -1 if self.highest else 1
        ranked = sorted(
            (info for info in measured if info.is_good),
            key=lambda info: (sign * info.metrics[self.metric], -info.step),
        )
        return [Ruling(BEST_K, _steps_of(ranked[: self.count]), _steps_of(measured))]


@dataclass(frozen=True)
class KeepFor:
    """Keeps the checkpoints that were saved at most `hours` ago."""

    hours: float

    def rulings(self, full: Sequence[CheckpointInfo], now: float) -> list[Ruling]:
        kept = [info for info in full if now - info.created_at <= self.hours * 3600]
        return [Ruling(FOR_HOURS, _steps_of(kept), _steps_of(full))]


@dataclass(frozen=True)
class KeepAny:
    """Keeps what any of `policies` keeps."""

    policies: tuple[RetentionPolicy, ...]

    def rulings(self, full: Sequence[CheckpointInfo], now: float) -> list[Ruling]:
        return [ruling for policy in self.policies for ruling in _rulings(policy, full, now)]


def build_retention(config: Checkpoint) -> RetentionPolicy:
    """Return the policy for the `keep_` keys; KeepAll where none is set."""
    rules: list[RetentionPolicy] = []
    if config.keep_latest_k:
        rules.append(KeepLatest(config.keep_latest_k))
    if config.keep_every_n_steps:
        rules.append(KeepEvery(config.keep_every_n_steps))
    if config.keep_best_k:
        rules.append(KeepBest(config.keep_best_k, *config.best_metric))
    if config.keep_for_hours:
        rules.append(KeepFor(config.keep_for_hours))
    if not rules:
        return KeepAll()
    return rules[0] if len(rules) == 1 else KeepAny(tuple(rules))


@dataclass(frozen=True)
class Verdict:
    """What happens to the checkpoint `info`."""

    info: CheckpointInfo
    kept_by: tuple[str, ...]
    """The rules, and the reasons beyond all rules, for which it stays; empty if it goes."""
    for_space: bool = False
    """Whether it goes only because the disk has too little free space."""

    @property
    def goes(self) -> bool:
        """Return whether the checkpoint is purged."""
        return not self.kept_by


def judge_checkpoints(
    policy: RetentionPolicy,
    committed: Sequence[CheckpointInfo],
    protected: AbstractSet[int] = frozenset(),
    *,
    known_good: AbstractSet[int] = frozenset(),
    pinned: AbstractSet[int] = frozenset(),
    now: float = 0.0,
    missing_bytes: int = 0,
    is_sound: Callable[[CheckpointInfo], bool] = lambda info: True,
) -> list[Verdict]:
    """Return what happens to each checkpoint of `committed`, lowest step first. Raises ConfigError for a failing rule.

    None goes that is in `protected` or `pinned`, weights-only, the latest full one, the latest full one of the steps in
    `known_good`, the latest full one without NaN, or the latest full one with nothing against it. `missing_bytes` is
    how much free space the disk lacks: while what goes is less than that, the oldest goes that nothing but `KeepLatest`
    keeps, or no rule at all. `is_sound` is called for full checkpoints only, and only if one would go; by default all
    are. A checkpoint that is not sound counts as absent, and stays.
    """
    full = sorted((info for info in committed if info.kind is CheckpointKind.FULL), key=_STEP)
    protections = [(PINNED, pinned), (PROTECTED, protected)]
    kept = [*_kept_steps(policy, full, known_good, now), *protections]
    damaged: list[CheckpointInfo] = []
    # Only if one would go: `is_sound` looks at files.
    if _would_one_go(full, kept, missing_bytes):
        damaged = [info for info in full if not is_sound(info)]
        if damaged:
            steps = _steps_of(damaged)
            full = [info for info in full if info.step not in steps]
            kept = [*_kept_steps(policy, full, known_good, now), *protections]
    others = [Verdict(info, (WEIGHTS_ONLY,)) for info in committed if info.kind is not CheckpointKind.FULL]
    others += [Verdict(info, (DAMAGED,)) for info in damaged]
    verdicts = _for_space([Verdict(info, _keepers(info, kept)) for info in full], missing_bytes)
    return sorted([*verdicts, *others], key=lambda verdict: verdict.info.step)


def _kept_steps(
    policy: RetentionPolicy, full: Sequence[CheckpointInfo], known_good: AbstractSet[int], now: float
) -> Iterator[tuple[str, AbstractSet[int]]]:
    rulings = _rulings(policy, full, now)
    yield from ((ruling.rule, ruling.keeps) for ruling in rulings)
    # What no rule can judge stays. So `keep_best_k` alone removes nothing whose metric is unknown, and no rule at all
    # keeps everything, without an exception for either.
    yield NO_RULE, _steps_of(full).difference(*(ruling.judges for ruling in rulings))
    yield LATEST, _steps_of(full[-1:])
    finite = _steps_of([info for info in full if not info.has_nan][-1:])
    good = [info for info in full if info.is_good]
    yield LAST_GOOD, _steps_of([info for info in good if info.step in known_good][-1:])
    yield WITHOUT_NAN, finite
    yield EQUAL_RANKS, _steps_of(good[-1:]) - finite


def _rulings(policy: RetentionPolicy, full: Sequence[CheckpointInfo], now: float) -> list[Ruling]:
    """Return what `policy` says. Raises ConfigError, which names the class of a user's policy that fails to say it."""
    try:
        # A copy: the policy may sort it, and which one is the latest follows from the order here.
        given = policy.rulings(list(full), now)
    except ConfigError:
        raise  # Of a policy in `KeepAny`, which is named.
    except (Exception, SystemExit) as error:
        raise _without_rulings(policy, f"but it raised {in_one_line(error)}") from error
    try:
        return [Ruling(str(each.rule), _checked_steps(each.keeps), _checked_steps(each.judges)) for each in given]
    except (Exception, SystemExit) as error:
        raise _without_rulings(policy, f"found {in_one_line(given)}") from error


def _checked_steps(steps: AbstractSet[int]) -> frozenset[int]:
    """Return `steps`. Raises TypeError for anything else, such as names: it keeps no step, and what is judged goes."""
    # Numbers of numpy are steps, too. To convert all of all rules would double the time of a decision.
    if isinstance(steps, frozenset) and set(map(type, steps)) <= {int}:
        return steps
    return frozenset(map(operator.index, steps))


def _without_rulings(policy: RetentionPolicy, found: str) -> ConfigError:
    name = f"retention: {type(policy).__name__}.rulings"
    return ConfigError(f"{name}: expected a list of Ruling with steps as numbers, {found}.")


def _keepers(info: CheckpointInfo, kept: _Kept) -> tuple[str, ...]:
    return tuple(name for name, steps in kept if info.step in steps)


def _would_one_go(full: Sequence[CheckpointInfo], kept: _Kept, missing_bytes: int) -> bool:
    stay = set[int]().union(*(steps for _, steps in kept))
    if any(info.step not in stay for info in full):
        return True
    return missing_bytes > 0 and any(_YIELD_TO_FREE_SPACE.issuperset(_keepers(info, kept)) for info in full)


def _for_space(verdicts: Sequence[Verdict], missing_bytes: int) -> list[Verdict]:
    """Let more go, the oldest first, until `missing_bytes` are freed or nothing is left that may go."""
    missing_bytes -= sum(verdict.info.nbytes for verdict in verdicts if verdict.goes)
    found = []
    for verdict in verdicts:
        if missing_bytes > 0 and not verdict.goes and _YIELD_TO_FREE_SPACE.issuperset(verdict.kept_by):
            missing_bytes -= verdict.info.nbytes
            found.append(Verdict(verdict.info, (), for_space=True))
        else:
            found.append(verdict)
    return found


def _steps_of(infos: Sequence[CheckpointInfo]) -> frozenset[int]:
    return frozenset(info.step for info in infos)


def _at_least_one(name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"{name}: expected at least 1, found {count}.")
