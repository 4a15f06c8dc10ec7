"""Which tensors of a checkpoint go where, when not all go where they came from.

Globs choose FQNs of the model (`layers.*.attention.*`), regular expressions rename those of the
checkpoint, a strictness says what a difference means. The same rules hold for the model and for the
optimizer state of its parameters. Pure: names come in, names go out.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchtitan_lite.config.job_config import Checkpoint, Strictness
from torchtitan_lite.errors import ConfigError


@dataclass(frozen=True)
class LoadRules:
    """What `checkpoint.load_*` asks for."""

    include: tuple[str, ...] = ()
    """Globs over FQNs; empty: all."""
    exclude: tuple[str, ...] = ()
    """Globs over FQNs; they win over `include`."""
    renames: tuple[tuple[re.Pattern[str], str], ...] = ()
    """Applied to the checkpoint's FQNs, in order."""
    cast: bool = False
    """Whether a floating tensor may be cast to the dtype of its target."""
    strictness: Strictness = "error"

    def wants(self, fqn: str) -> bool:
        """Whether the model's `fqn` is to be loaded."""
        if not self.is_partial:
            return True
        included = not self.include or any(fnmatch.fnmatchcase(fqn, glob) for glob in self.include)
        return included and not any(fnmatch.fnmatchcase(fqn, glob) for glob in self.exclude)

    def renamed(self, stored: Iterable[str]) -> dict[str, str]:
        """The model's FQN to the checkpoint's, for each of `stored`; raises ConfigError if two get one name."""
        names: dict[str, str] = {}
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
        """Whether something of the model may be left as it is."""
        return bool(self.include or self.exclude)

    @property
    def changes_tensors(self) -> bool:
        """Whether a tensor may have another name or dtype than in the checkpoint, or be passed over."""
        return bool(self.renames) or self.cast or self.strictness != "error"


EVERYTHING = LoadRules()
"""All tensors, under their names, as they are."""


def build_load_rules(config: Checkpoint) -> LoadRules:
    """The rules of `config`; raises ConfigError for a rename that is no `pattern=replacement`."""
    return LoadRules(
        include=config.load_include,
        exclude=config.load_exclude,
        renames=tuple(_rename(text) for text in config.load_rename),
        cast=config.load_cast,
        strictness=config.load_strictness,
    )


def unmatched_globs(rules: LoadRules, fqns: Sequence[str]) -> list[str]:
    """The globs that choose nothing: most likely misspelt."""
    return [glob for glob in (*rules.include, *rules.exclude) if not fnmatch.filter(fqns, glob)]


def _rename(text: str) -> tuple[re.Pattern[str], str]:
    pattern, separator, replacement = text.partition("=")
    if not separator or not pattern:
        raise ConfigError(f"checkpoint.load_rename: expected 'pattern=replacement', found {text!r}.")
    try:
        return re.compile(pattern), replacement
    except re.error as error:
        raise ConfigError(f"checkpoint.load_rename: {pattern!r} is no regular expression: {error}.") from None
