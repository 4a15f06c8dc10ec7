"""Choose and rename the tensors that a load takes from a checkpoint.

Globs choose FQNs of the model (`layers.*.attention.*`), regular expressions rename the FQNs of the
checkpoint, and the strictness decides whether a difference is an error, a warning or nothing. The same rules
hold for the model and for the optimizer state of its parameters. Pure functions of names.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.config.sections.checkpoint import Strictness
from torchtitan_lite.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class LoadRules:
    """The settings `checkpoint.load_*`, parsed."""

    include: tuple[str, ...] = ()
    """Globs over the model's FQNs; empty: all."""
    exclude: tuple[str, ...] = ()
    """Globs over the model's FQNs; they win over `include`."""
    renames: tuple[tuple[re.Pattern[str], str], ...] = ()
    """Patterns and replacements, applied to the checkpoint's FQNs in this order."""
    cast: bool = False
    """Whether a floating-point tensor may be cast to the dtype of its target."""
    strictness: Strictness = "error"

    def wants(self, fqn: str) -> bool:
        """Return whether the model's `fqn` is to be loaded."""
        if not self.is_partial:
            return True
        included = not self.include or any(fnmatch.fnmatchcase(fqn, glob) for glob in self.include)
        return included and not any(fnmatch.fnmatchcase(fqn, glob) for glob in self.exclude)

    def chosen(self, model: Mapping[str, T]) -> Mapping[str, T]:
        """Return the entries of `model`, by the model's FQNs, that are to be loaded."""
        return {fqn: value for fqn, value in model.items() if self.wants(fqn)} if self.is_partial else model

    def renamed(self, stored: Iterable[str]) -> dict[str, str]:
        """Map the model's FQN to the checkpoint's, for each of `stored`. Raises ConfigError if two get one name."""
        names: dict[str, str] = {}
        if not self.renames:
            return {fqn: fqn for fqn in stored}
        for fqn in stored:
            new = fqn
            for pattern, replacement in self.renames:
                new = pattern.sub(replacement, new)
            if new in names:
                raise ConfigError(
                    f"checkpoint.load_rename: {names[new]!r} and {fqn!r} of the checkpoint would both be {new!r}. "
                    "Make the pattern more specific."
                )
            names[new] = fqn
        return names

    @property
    def is_partial(self) -> bool:
        """Whether the load may leave some tensors of the model unchanged."""
        return bool(self.include or self.exclude)

    @property
    def changes_tensors(self) -> bool:
        """Whether a tensor may have another name or dtype than in the checkpoint, or be skipped."""
        return bool(self.renames) or self.cast or self.strictness != "error"


EVERYTHING = LoadRules()
"""All tensors, under their names, as they are."""


def build_load_rules(config: Checkpoint) -> LoadRules:
    """Return the rules of `config`. Raises ConfigError for a rename that is not `pattern=replacement`."""
    return LoadRules(
        include=config.load_include,
        exclude=config.load_exclude,
        renames=tuple(_parse_rename(text) for text in config.load_rename),
        cast=config.load_cast,
        strictness=config.load_strictness,
    )


def unmatched_globs(rules: LoadRules, fqns: Sequence[str]) -> list[str]:
    """Return the globs that match none of `fqns`: most likely misspelt."""
    return [glob for glob in (*rules.include, *rules.exclude) if not fnmatch.filter(fqns, glob)]


def _parse_rename(text: str) -> tuple[re.Pattern[str], str]:
    pattern, separator, replacement = text.partition("=")
    if not separator or not pattern:
        raise ConfigError(f"checkpoint.load_rename: expected 'pattern=replacement', found {text!r}.")
    try:
        return re.compile(pattern), replacement
    except re.error as error:
        raise ConfigError(f"checkpoint.load_rename: {pattern!r} is not a regular expression: {error}.") from None
