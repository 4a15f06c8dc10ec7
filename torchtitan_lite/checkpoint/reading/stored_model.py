"""The model's part of a checkpoint, and the memory that a load reads it into.

Tensors are read into the live tensors of the model's state dict. Extra state and everything else that is not
a tensor may have another size or form than the model's own, so it is read into new memory. Keys begin with
`model.`, or are bare FQNs in a weights-only checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.format.key_report import KeyReport, TensorLike, compare_tensors, merged
from torchtitan_lite.checkpoint.reading.entries import Leaf, assembled_entry, entries, room_for
from torchtitan_lite.checkpoint.reading.load_rules import LoadRules
from torchtitan_lite.checkpoint.state.model_wrapper import is_extra, tensors_of
from torchtitan_lite.checkpoint.state.names import EXTRA_STATE, is_extra_name
from torchtitan_lite.checkpoint.state.subclasses import form_difference, forms_in


class StoredModel:
    """The model's entries in `contents`, under the names that `rules` give them."""

    def __init__(self, contents: Contents, rules: LoadRules) -> None:
        self._contents = contents
        self._rules = rules
        self._tensors_under: dict[str, dict[str, TensorLike]] = {}
        self._extras_under: dict[str, dict[str, list[Leaf]]] = {}
        self._names_under: dict[str, dict[str, str]] = {}
        self._last_report: tuple[Mapping[str, Any], bool, KeyReport] | None = None

    def names(self, prefix: str) -> dict[str, str]:
        """Map the model's name of each entry below `prefix` to the checkpoint's name."""
        if prefix not in self._names_under:
            stored = dict.fromkeys([*self._tensors(prefix), *self._extras(prefix)])
            self._names_under[prefix] = self._rules.renamed(stored)
        return self._names_under[prefix]

    def keys(self, model: Mapping[str, Any]) -> dict[str, str]:
        """Map the model's name of each entry, after the renames, to the checkpoint's flat key."""
        prefix = self._prefix(model)
        return {fqn: prefix + name for fqn, name in self.names(prefix).items()}

    def report(self, model: Mapping[str, Any], *, cast: bool = False) -> KeyReport:
        """Return how the checkpoint differs from the model's state dict `model`. Reads no data."""
        last = self._last_report
        # A load asks three times, of thousands of keys.
        if last is None or last[0] is not model or last[1] != cast:
            self._last_report = last = (model, cast, self._report(model, cast))
        return last[2]

    def _report(self, model: Mapping[str, Any], cast: bool) -> KeyReport:
        if not model:
            return KeyReport()
        prefix = self._prefix(model)
        tensors, extras = self._tensors(prefix), self._extras(prefix)
        wanted = self._rules.chosen(model)
        expected = tensors_of(wanted)
        own_extras = wanted.keys() - expected.keys() if len(expected) < len(wanted) else set()
        names = self._rules.chosen(self.names(prefix))
        # Tensors inside an entry of nested containers have flat names of their own, which are not the model's.
        inner = {leaf.key for fqn in own_extras if fqn in names for leaf in extras.get(names[fqn], ())}
        found = {
            fqn: tensors[name]
            for fqn, name in names.items()
            if name in tensors and not (inner and prefix + name in inner)
        }
        report = merged(
            compare_tensors(expected, found, cast=cast or self._rules.cast),
            KeyReport(mismatched=self._other_forms(wanted, names, prefix)),
            KeyReport(
                missing=[fqn for fqn in wanted if fqn in own_extras and names.get(fqn) not in extras],
                unexpected=[fqn for fqn in names if is_extra_name(fqn) and fqn not in model and fqn not in found],
            ),
        )
        # A checkpoint with bare names may hold other things besides the model.
        return report if prefix else dataclasses.replace(report, unexpected=())

    def _other_forms(self, wanted: Mapping[str, Any], names: Mapping[str, str], prefix: str) -> dict[str, str]:
        """Return the tensors that are made of others, here or in the checkpoint, and are not so in the same form."""
        own, objects = forms_in(wanted), self._contents.objects
        there = {name: objects[prefix + key].value for name, key in forms_in(names).items() if prefix + key in objects}
        both = [*(name for name in own if name in there or name in names), *(name for name in there if name in wanted)]
        found = {name: form_difference(there.get(name), own.get(name)) for name in both}
        return {name: finding for name, finding in found.items() if finding}

    def targets(self, model: Mapping[str, Any], *, cast: bool = False) -> dict[str, Any]:
        """Map the checkpoint's keys to the tensors to read into, and to None for objects."""
        prefix, skipped = self._prefix(model), self.report(model, cast=cast).mismatched
        below = tuple(f"{name}." for name in skipped)  # Parts of a tensor in another form.
        targets: dict[str, Any] = {}
        own, tensors = tensors_of(model), self._tensors(prefix)
        for fqn, stored in self._wanted(model, prefix).items():
            if fqn in own:
                if fqn not in skipped and stored in tensors and not fqn.startswith(below):
                    targets[prefix + stored] = own[fqn]
                continue
            for leaf in self._extras(prefix).get(stored, ()):
                targets[leaf.key] = room_for(self._contents, leaf.key)
        return targets

    def assembled(self, model: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
        """Return the complete state dict for the model: the values that were `read`, else the model's own."""
        prefix = self._prefix(model)
        whole = dict(model)
        extras = self._extras(prefix)
        for fqn, stored in self._wanted(model, prefix).items() if extras else ():
            if stored in extras and is_extra(fqn, model[fqn]):
                extra = assembled_entry(self._contents, prefix + stored, extras[stored], read)
                own = model[fqn]
                is_moved = isinstance(extra, torch.Tensor) and isinstance(own, torch.Tensor)
                whole[fqn] = extra.to(own.device) if is_moved else extra
        return whole

    def _wanted(self, model: Mapping[str, Any], prefix: str) -> dict[str, str]:
        names = self.names(prefix)
        return {fqn: names[fqn] for fqn in self._rules.chosen(model) if fqn in names}

    def _prefix(self, model: Mapping[str, Any]) -> str:
        # If a model's own FQNs begin with "model.", a weights-only checkpoint has them without a second prefix.
        keys = self._contents
        bare = not any(f"model.{fqn}" in keys for fqn in model) and any(fqn in keys for fqn in model)
        return "" if bare or not any(key.startswith("model.") for key in keys) else "model."

    def _tensors(self, prefix: str) -> dict[str, TensorLike]:
        """Return the tensors below `prefix` that are complete entries."""
        if prefix not in self._tensors_under:
            table = self._contents.table
            kinds, skipped = table.kinds, len(prefix)
            self._tensors_under[prefix] = {
                key[skipped:]: kinds[key] if key in kinds else table.others[key]
                for key in table
                if key.startswith(prefix) and (EXTRA_STATE not in key or EXTRA_STATE not in key.split("."))
            }
        return self._tensors_under[prefix]

    def _extras(self, prefix: str) -> dict[str, list[Leaf]]:
        """Return all other entries below `prefix`."""
        if prefix not in self._extras_under:
            contents, paths, depth = self._contents, self._contents.paths, 2 if prefix else 1
            inner = [key for key in contents.tensors if EXTRA_STATE in key or len(paths.get(key, ())) > depth]
            self._extras_under[prefix] = {
                name: leaves
                for name, leaves in entries(contents, prefix, [*inner, *contents.objects]).items()
                if is_extra_name(name) or any(leaf.path or leaf.key in contents.objects for leaf in leaves)
            }
        return self._extras_under[prefix]
