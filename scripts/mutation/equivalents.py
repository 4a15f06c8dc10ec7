"""The list of equivalent mutants: changes that no test can distinguish from the original, each with its reason."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from mutation.operators import Mutant

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("equivalents.toml")


class Equivalents:
    """The tables `[[equivalent]]`: file, line (its text, stripped), operator, becomes (the new node), why.

    `nth` distinguishes mutants of a file that are equal in all of these; without it the entry is for the first.
    """

    def __init__(self) -> None:
        tables = tomllib.loads(FILE.read_text(encoding="utf-8"))["equivalent"] if FILE.exists() else []
        self._reasons = {(t["file"], t["line"], t["operator"], t["becomes"], t.get("nth", 1)): t["why"] for t in tables}

    def reason(self, mutant: Mutant) -> str | None:
        """Return why `mutant` is equivalent, or None if it is not listed."""
        return self._reasons.get(mutant.key)

    def stale(self, mutants: Iterable[Mutant]) -> list[str]:
        """Return the entries in the files of `mutants` that match no mutant: the line has changed or is gone."""
        keys = {mutant.key for mutant in mutants}
        files = {path for path, *_ in keys}
        return [": ".join(map(str, key)) for key in self._reasons if key[0] in files and key not in keys]
