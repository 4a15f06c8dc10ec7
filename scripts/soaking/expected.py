"""What must be in a folder of checkpoints: a model of its own, which knows nothing of the package's retention.

It hears of each step that was acknowledged, with the rules of the start that acknowledged it, and of each step that
an injection took or damaged. A step must be there, with the bytes that it had when it was first seen, unless at some
commit no rule kept it, or an injection took that step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Rules:
    """The keys of a start that say what is kept; 0 for none."""

    latest: int = 0
    every: int = 0
    best: int = 0

    def kept(self, losses: Mapping[int, float]) -> set[int]:
        """Return which of the steps of `losses` a commit of the last of them leaves."""
        steps = sorted(losses)
        if not (self.latest or self.every or self.best):
            return set(steps)
        best = sorted(steps, key=lambda step: losses[step])[: self.best]
        every = {step for step in steps if self.every and step % self.every == 0}
        return {steps[-1], *steps[len(steps) - min(self.latest, len(steps)) :], *every, *best}


@dataclass
class Step:
    """A checkpoint that was seen in the folder."""

    files: dict[str, str]
    """A digest of each file; empty if it went before it could be read."""
    is_damaged: bool = False
    may_go: bool = False
    """Whether a rule did not keep it at some commit."""


@dataclass
class Expected:
    """The checkpoints of the folder `root`."""

    root: Path
    steps: dict[int, Step] = field(default_factory=dict)

    def acknowledged(self, step: int, rules: Rules, losses: Mapping[int, float]) -> None:
        """Note that `step` was reported as durable, in a start with `rules`. `losses` has the loss of each step."""
        self.steps[step] = Step(digests(self.root / f"step-{step}"))
        present = {each: losses.get(each, float("inf")) for each in self.steps if each <= step}
        for each in present.keys() - rules.kept(present):
            self.steps[each].may_go = True

    def took(self, step: int) -> None:
        """Note that an injection removed `step`."""
        self.steps.pop(step, None)

    def damaged(self, step: int) -> None:
        """Note that an injection changed a byte of `step`."""
        self.steps[step].is_damaged = True

    @property
    def least(self) -> int:
        """The step that the next start must resume from, or a later one; 0 for none."""
        return max((step for step in self.intact() if not self.steps[step].may_go), default=0)

    def intact(self) -> list[int]:
        """Return the steps that are there and that nothing has damaged, in order."""
        there = listed(self.root)
        return sorted(step for step, seen in self.steps.items() if step in there and not seen.is_damaged)

    def look(self) -> list[str]:
        """Compare the folder with the model, and note steps without an acknowledgement. Return what is wrong."""
        there, wrong = listed(self.root), []
        for step, seen in sorted(self.steps.items()):
            if step not in there:
                if not (seen.may_go or seen.is_damaged):
                    wrong.append(f"step {step} was acknowledged, and is gone")
                del self.steps[step]
            elif seen.files and not seen.is_damaged and (found := digests(self.root / f"step-{step}")) != seen.files:
                other = sorted(name for name in found.keys() | seen.files if found.get(name) != seen.files.get(name))
                wrong.append(f"step {step} has other bytes than when it was acknowledged, in {', '.join(other)}")
                seen.files = found
        for step in there - self.steps.keys():
            self.steps[step] = Step(digests(self.root / f"step-{step}"))
        return wrong


def listed(root: Path) -> set[int]:
    """Return the steps in `root` that are complete: a rename gives a folder its name once it is."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    return {int(match[1]) for name in names if (match := STEP.fullmatch(name))}


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of each file of a checkpoint; empty where it goes meanwhile."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        return {path.name: xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in files}
    except OSError:
        return {}
