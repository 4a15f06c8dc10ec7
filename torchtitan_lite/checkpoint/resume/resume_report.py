"""What a resume would do, before it does it, and which settings would help where it is refused.

The step that it resumes from, the keys that do not fit, what changed in the configuration and the
topology, and what the states refuse. A pure value, the same on every rank, made from what the ranks
agreed on.

Of names that a run has and a checkpoint lacks, four causes are common: all names of the model have one prefix more or
less, one of two tied tensors was not saved, frozen parameters were left out, or a state is new. Each is looked for, and
a setting is suggested only if the load would then find the name, or miss none. A fifth has no setting: the optimizer
got a parameter group before one of the two, the save and the load, and not before the other. If it is none of
these, the model or the optimizer is built otherwise than it was. Pure: takes names and tensors, returns sentences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from torchtitan_lite.checkpoint.format.key_report import SHOWN, KeyReport
from torchtitan_lite.checkpoint.format.shards import local_of
from torchtitan_lite.checkpoint.state.optimizer_state import SETTINGS, STATE, split_state_key
from torchtitan_lite.config.drift import Change, Rule
from torchtitan_lite.log import listed
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


def ways_out(
    missing: Sequence[str],
    model: Mapping[str, torch.Tensor],
    names: Collection[str],
    states: Collection[str],
    frozen: Collection[str] = (),
    trainable: Collection[str] = (),
) -> list[str]:
    """Return a sentence for each setting that would supply some of `missing`.

    `names` are the checkpoint's tensor names after the configured renames; `states` are the run's small states;
    `frozen` are the model's parameters that are not trained; `trainable` are the others if they may have been frozen at
    the save, and left out of it.
    """
    of_model = [fqn for fqn in missing if fqn in model]
    ties = _ties(of_model, model, names)
    untied = [fqn for fqn in of_model if fqn not in ties]
    rename = _suggested_rename(untied, model, names) if untied else ""
    sentences = [f"  Its names fit with --checkpoint.load_rename={rename}"] if rename else []
    if ties:
        pairs = ", ".join(f"{fqn} is the same tensor as {other}" for fqn, other in ties.items())
        sentences.append(f"  {pairs}, which is there: leave it out with --checkpoint.load_exclude={','.join(ties)}")
    if of_model and not rename and not ties and all(fqn in frozen for fqn in of_model):
        sentences.append(
            "  They are frozen parameters: leave these out of the load with --checkpoint.save_trained_only"
        )
    if of_model and not rename and not ties and all(fqn in trainable for fqn in of_model):
        sentences.append(
            "  Frozen parameters that were never trained were left out of it (checkpoint.save_trained_only): freeze "
            "these before load(), and set requires_grad after it, for the step that it restored"
        )
    if lost := [name for name in missing if name in states and name not in model]:
        sentences.append(f"  To begin a state fresh: --checkpoint.exclude_from_loading={','.join(lost)}")
    return sentences


def other_groups(keys: KeyReport, model: Collection[str], in_optimizer: Collection[str]) -> list[str]:
    """Return a sentence for parameters of the `model` that are in a group of the optimizer only here, or only there.

    `in_optimizer` are the parameters that the optimizer has here; none if there is no optimizer.
    """
    if not in_optimizer:
        return []
    settings, state = f"optimizer.{SETTINGS}.", f"optimizer.{STATE}."
    with_settings = [key.removeprefix(settings) for key in keys.missing if key.startswith(settings)]
    new = [fqn for fqn in with_settings if fqn in model and fqn not in keys.missing]
    of_state = [key.removeprefix(state) for key in keys.unexpected if key.startswith(state)]
    known = dict.fromkeys(split_state_key(rest, model)[0] for rest in of_state)
    lost = [fqn for fqn in known if fqn in model and fqn not in in_optimizer]
    sentences = []
    if new:
        sentences.append(
            f"  The optimizer has {listed(new, most=SHOWN)} and had not when this was saved: call add_param_group() "
            "for these after load(), or make the optimizer without them"
        )
    if lost:
        sentences.append(
            f"  The optimizer had {listed(lost, most=SHOWN)} when this was saved and has not now: call "
            "add_param_group() for these before load(), or make the optimizer with them"
        )
    return sentences


def built_otherwise(keys: KeyReport, model: Collection[str]) -> list[str]:
    """Return a sentence for a `model` or an optimizer that is built otherwise than when it was saved."""
    different = [fqn for fqn in keys.mismatched if fqn in model]
    others = [key for key in (*keys.missing, *keys.unexpected) if not key.startswith("optimizer.")]
    if different and not others and len(different) <= min(SHOWN, len(model) - 1):
        return [f"  To load all others and begin these fresh: --checkpoint.load_exclude={','.join(different)}"]
    if keys.mismatched and not others and all(key.startswith("optimizer.") for key in keys.mismatched):
        return ["  To begin the optimizer fresh: --checkpoint.exclude_from_loading=optimizer,lr_scheduler"]
    if keys.unexpected and not keys.missing and not keys.mismatched:
        return ["  Build the model as when this was saved; to load only what it has: --checkpoint.load_strictness=warn"]
    if keys.mismatched or keys.missing:
        return ["  Build the model and its optimizer as when this was saved, or start a new run in another folder"]
    return []


def _ties(missing: Sequence[str], model: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, str]:
    """Return the names in `missing` whose tensor `model` also has under a name that is in `names`, with that name."""
    there = {place: fqn for fqn, tensor in model.items() if fqn in names and (place := _storage_place(tensor))}
    return {fqn: there[place] for fqn in missing if (place := _storage_place(model[fqn])) in there}


def _storage_place(tensor: torch.Tensor) -> tuple[int, int] | None:
    local = local_of(tensor)
    begin = local.untyped_storage().data_ptr()
    return (begin, int(local.storage_offset())) if begin and local.numel() else None


def _suggested_rename(missing: Sequence[str], model: Mapping[str, torch.Tensor], names: Collection[str]) -> str:
    """Return a rename of the checkpoint's `names` after which they include all of `missing`; empty if there is none."""
    for theirs, ours in _prefixes(missing[0], model, names):
        if all(fqn.startswith(ours) and theirs + fqn.removeprefix(ours) in names for fqn in missing):
            return f"'^{theirs.replace('.', '[.]')}={ours}'"
    return ""


def _prefixes(fqn: str, model: Mapping[str, torch.Tensor], names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of prefixes, the checkpoint's and the model's, under which a name in `names` could be `fqn`."""
    yield from ((name.removesuffix(fqn), "") for name in names if name.endswith(f".{fqn}"))
    # Else names that fit now would not fit then.
    if not any(other in names for other in model):
        parts = fqn.split(".")
        yield from (("", ".".join(parts[:count]) + ".") for count in range(1, len(parts)))
