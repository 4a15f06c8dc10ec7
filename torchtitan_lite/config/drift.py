"""Which keys changed since a checkpoint was made, and what each change means at resume.

Each key has a rule. Most changes are honoured: the new value counts. Some are honoured with a warning, because the run
then differs from what it was. Some are refused, because training with the new value would be another run under the
same name; the refusal names the key, both values and the fix. A key that the checkpoint lacks is compared with its
default. Everything here is a function of plain values.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.config.address import is_address, printable
from torchtitan_lite.config.job_config import JobConfig, flat_config


class Rule(enum.Enum):
    """What happens at resume if a key changed."""

    HONOURED = "honoured"
    WARNED = "honoured, with a warning"
    REFUSED = "refused"
    IGNORED = "not compared"


NEW_RUN = "Start a new run in another job.dump_folder, from these weights with --checkpoint.initial_load_path."
NEW_OPTIMIZER = "Set it back, or start a new optimizer with --checkpoint.exclude_from_loading=optimizer,lr_scheduler."
NEW_ORDER = "Set it back, or start the data from the beginning with --checkpoint.exclude_from_loading=dataloader."

WARNED = {
    "optimizer.lr": "the new value counts from the next step on",
    "optimizer.beta1": "the new value counts from the next step on",
    "optimizer.beta2": "the new value counts from the next step on",
    "optimizer.eps": "the new value counts from the next step on",
    "optimizer.weight_decay": "the new value counts from the next step on",
    "lr_scheduler.warmup_steps": "the learning rate follows the new curve, from the step reached",
    "lr_scheduler.decay_ratio": "the learning rate follows the new curve, from the step reached",
    "lr_scheduler.decay_type": "the learning rate follows the new curve, from the step reached",
    "lr_scheduler.min_lr_factor": "the learning rate follows the new curve, from the step reached",
    "training.steps": "the learning rate's curve stretches to the new number of steps",
    "training.max_norm": "the new value counts from the next step on",
    "training.mixed_precision_param": "the run continues, but not bit for bit",
    "training.seed": "no effect: dropout and sample order continue from the seed of the checkpoint",
    "model.config_path": "the settings in the file are compared with those of the checkpoint, if it had a file too",
    "model.dropout": "the new value counts from the next step on",
}
"""Key to what its change does, as the warning says it."""

REFUSED = {
    "model.name": NEW_RUN,
    "model.flavor": "Its tensors have other shapes: start a new run in another job.dump_folder.",
    "model.tokenizer_path": NEW_RUN,
    "optimizer.name": NEW_OPTIMIZER,
    "training.dataset": NEW_ORDER,
    "training.dataset_text_key": NEW_ORDER,
    "training.dataset_subset": NEW_ORDER,
    "training.dataset_split": NEW_ORDER,
    "training.seq_len": NEW_ORDER,
}
"""Key to the fix, as the refusal says it."""

ALLOWED_BY_EXCLUSION = {NEW_OPTIMIZER: "optimizer", NEW_ORDER: "dataloader"}
"""Fix of a refusal to the state that, if excluded from loading, makes the change harmless: a warning in its place."""

IGNORED = frozenset(
    {
        "job.config_file",
        "checkpoint.load_step",
        "checkpoint.dry_run",
        "checkpoint.new_branch",
        "comm.simulated_ranks",
    }
)


@dataclass(frozen=True)
class Change:
    """One key whose value differs; `note` says what follows, or the fix."""

    key: str
    before: Any
    now: Any
    rule: Rule
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.key}: {shown_setting(self.before)} -> {shown_setting(self.now)}  {self.rule.value}{note}"


def rule_of(key: str) -> Rule:
    """Return the rule of `section.key`."""
    if key in IGNORED:
        return Rule.IGNORED
    if key in REFUSED:
        return Rule.REFUSED
    return Rule.WARNED if key in WARNED else Rule.HONOURED


def compare_configs(stored: Mapping[str, Mapping[str, Any]], config: JobConfig) -> list[Change]:
    """Return the keys that differ between `stored`, the configuration in a checkpoint, and `config`, in its order."""
    defaults = flat_config(JobConfig().to_dict())
    before, now = {**defaults, **flat_config(stored)}, flat_config(config.to_dict())
    excluded = config.checkpoint.exclude_from_loading
    changes = [
        _change(key, before[key], now[key], excluded)
        for key in now
        if _without_tuples(before[key]) != _without_tuples(now[key])
    ]
    return [change for change in changes if change.rule is not Rule.IGNORED]


def shown_setting(value: Any) -> str:
    """Return a value as people read it."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if text and value is not None else "(none)"


def _change(key: str, before: Any, now: Any, excluded: tuple[str, ...]) -> Change:
    rule = rule_of(key)
    if key == "model.tokenizer_path" and "bytes" not in (before, now):
        return Change(key, before, now, Rule.WARNED, "another place: its contents are compared with the checkpoint's")
    state = ALLOWED_BY_EXCLUSION.get(REFUSED.get(key, ""))
    if state in excluded:
        return Change(key, before, now, Rule.WARNED, f"{state} is not loaded")
    return Change(key, before, now, rule, REFUSED.get(key) or WARNED.get(key) or "")


def _without_tuples(value: Any) -> Any:
    # JSON has no tuples.
    return list(value) if isinstance(value, tuple) else value


# What of a configuration must be the same on all ranks of a job.
#
# All keys, but for those that only say where a host has its files, what one rank reports, or what a host traces. Of a
# path counts whether there is one: who reads it compares what it leads to.


_PATHS = frozenset(
    {
        *("checkpoint.folder", "checkpoint.export_folder", "checkpoint.upload_folder", "checkpoint.initial_load_path"),
        *("model.config_path", "model.tokenizer_path", "training.dataset_path"),
    }
)
_OF_A_HOST = frozenset(
    {
        *("job.config_file", "job.dump_folder", "job.description", "job.print_args", "training.tokens_folder"),
        *("metrics.enable_progress_bar", "metrics.enable_wandb", "comm.trace_buf_size"),
    }
)
_SECTION_OF_A_HOST = "profiling."


def shared_values(config: JobConfig) -> dict[str, str]:
    """Return by `section.key` what all ranks must have in common, as text."""
    return {
        key: _kind_of_path(value) if key in _PATHS else shown_setting(value)
        for key, value in flat_config(config.to_dict()).items()
        if key not in _OF_A_HOST and not key.startswith(_SECTION_OF_A_HOST)
    }


def _kind_of_path(value: Any) -> str:
    if value in (None, "", "bytes"):
        return shown_setting(value)
    return printable(value) if is_address(value) else "a path"
