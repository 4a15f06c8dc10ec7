"""What changed in the configuration since a checkpoint was made, and what follows from it.

Each key has a rule. Most are honoured: the new value counts. Some are honoured with a warning,
because the run is no longer the one that it was. Some are refused, because going on with the new
value would be another run under the same name; the refusal names the key, both values and the way
out. Pure values; a key that one side does not have is compared with its default.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.config.job_config import JobConfig


class Rule(enum.Enum):
    """What a changed key means at resume."""

    HONOURED = "honoured"
    WARNED = "honoured, with a warning"
    REFUSED = "refused"
    IGNORED = "not compared"


NEW_RUN = "Start a new run in another job.dump_folder, from these weights with --checkpoint.initial_load_path."
FRESH_OPTIMIZER = "Set it back, or begin afresh: --checkpoint.exclude_from_loading=optimizer,lr_scheduler."
OLD_ORDER = "Set it back, or start the data order anew with --checkpoint.exclude_from_loading=dataloader."

WARNED = {
    "optimizer.lr": "the new value counts from the next step on",
    "optimizer.beta1": "the new value counts from the next step on",
    "optimizer.beta2": "the new value counts from the next step on",
    "optimizer.eps": "the new value counts from the next step on",
    "optimizer.weight_decay": "the new value counts from the next step on",
    "lr_scheduler.warmup_steps": "the curve is the new one, at the step reached",
    "lr_scheduler.decay_ratio": "the curve is the new one, at the step reached",
    "lr_scheduler.decay_type": "the curve is the new one, at the step reached",
    "lr_scheduler.min_lr_factor": "the curve is the new one, at the step reached",
    "training.steps": "the learning rate's curve stretches to the new number of steps",
    "training.max_norm": "the new value counts from the next step on",
    "training.mixed_precision_param": "the run goes on, not bit for bit",
    "training.seed": "dropout and sample order go on as they were; the seed of the checkpoint stays",
    "model.dropout": "the new value counts from the next step on",
}
"""Key to what its change does."""

REFUSED = {
    "model.name": NEW_RUN,
    "model.flavor": "Its tensors have other shapes: start a new run in another job.dump_folder.",
    "model.tokenizer_path": NEW_RUN,
    "optimizer.name": FRESH_OPTIMIZER,
    "training.dataset": OLD_ORDER,
    "training.dataset_text_key": OLD_ORDER,
    "training.seq_len": OLD_ORDER,
}
"""Key to the way out."""

ALLOWED_BY_EXCLUSION = {
    "optimizer.name": "optimizer",
    "training.dataset": "dataloader",
    "training.dataset_text_key": "dataloader",
    "training.seq_len": "dataloader",
}
"""Key to the state whose exclusion from loading makes its change harmless."""

IGNORED = frozenset({"job.config_file", "checkpoint.load_step", "checkpoint.dry_run", "checkpoint.new_branch"})


@dataclass(frozen=True)
class Change:
    """One key that differs."""

    key: str
    before: Any
    now: Any
    rule: Rule
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.now)}  {self.rule.value}{note}"


def rule_of(key: str) -> Rule:
    """The rule of `section.key`."""
    if key in IGNORED:
        return Rule.IGNORED
    if key in REFUSED:
        return Rule.REFUSED
    return Rule.WARNED if key in WARNED else Rule.HONOURED


def compare(stored: Mapping[str, Mapping[str, Any]], config: JobConfig) -> list[Change]:
    """What differs between the configuration in a checkpoint and `config`, in the order of the sections."""
    defaults = _flat(JobConfig().to_dict())
    before, now = {**defaults, **_flat(stored)}, _flat(config.to_dict())
    excluded = config.checkpoint.exclude_from_loading
    changes = [_change(key, before[key], now[key], excluded) for key in now if _plain(before[key]) != _plain(now[key])]
    return [change for change in changes if change.rule is not Rule.IGNORED]


def _change(key: str, before: Any, now: Any, excluded: tuple[str, ...]) -> Change:
    rule = rule_of(key)
    if rule is Rule.REFUSED and ALLOWED_BY_EXCLUSION.get(key) in excluded:
        return Change(key, before, now, Rule.WARNED, f"{ALLOWED_BY_EXCLUSION[key]} is not loaded")
    return Change(key, before, now, rule, REFUSED.get(key) or WARNED.get(key) or "")


def _flat(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _plain(value: Any) -> Any:
    # JSON has no tuples.
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if text and value is not None else "(none)"
