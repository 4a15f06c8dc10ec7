"""The modules of a checkout: their syntax, their lines by kind, and the flat in which each stands."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PACKAGE = "torchtitan_lite"
FLATS = {
    "core": (
        *(
            "checkpoint",
            "store",
            "stores",
            "bucket",
            "disk",
            "distributed",
            "config",
            "errors",
            "events",
            "event_lines",
            "accounts",
            "faults",
        ),
        *("log", "host_memory", "collection", "torch_private", "__init__"),
    ),
    "extras": (
        *("checkpoint.images", "checkpoint.replicas", "keeper"),
        *("uploading", "checkpoint.uploads", "hangs", "report", "integrations"),
    ),
    "trainer": (
        *("trainer", "train", "preflight", "data", "models", "parallelisms", "optim", "divergence", "metrics"),
    ),
    "tools": (
        *("cli", "checkpoint.examining", "checkpoint.converting", "checkpoint.importing", "checkpoint.hugging_face"),
        "dry_run",
    ),
}
"""The rooms and modules of each flat; the longest name that fits a module is its own."""
KINDS = ("code", "docstring", "comment", "import", "blank")


@dataclass(frozen=True)
class Source:
    """One module."""

    name: str
    """Its dotted name below the package."""
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        """Return the folder in which it stands, below the package."""
        return self.name.rpartition(".")[0]

    @property
    def flat(self) -> str:
        """Return the name of its flat. Raises ValueError if no list has it."""
        fitting = [
            (len(part), flat)
            for flat, parts in FLATS.items()
            for part in parts
            if self.name == part or self.name.startswith(f"{part}.")
        ]
        if not fitting:
            raise ValueError(f"{self.name}: expected a module in one of FLATS, found one in none; add it to its flat")
        return max(fitting)[1]

    @cached_property
    def lines(self) -> Counter[str]:
        """Return how many lines there are of each of `KINDS`."""
        kinds = dict.fromkeys(range(1, len(self.text.splitlines()) + 1), "blank")
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
                kind = "comment" if token.type == tokenize.COMMENT else "code"
                for line in range(token.start[0], token.end[0] + 1):
                    kinds[line] = "code" if "code" in (kind, kinds[line]) else kind
        for node in ast.walk(self.tree):
            kind = "import" if isinstance(node, ast.Import | ast.ImportFrom) else "docstring" if _is_text(node) else ""
            if kind:
                kinds |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), kind)
        return Counter(kinds.values())


def imports_of(source: Source, names: Collection[str]) -> set[str]:
    """Return the modules among `names` that `source` imports, also in functions."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{PACKAGE}."):
            module = node.module.removeprefix(f"{PACKAGE}.")
            found |= {f"{module}.{alias.name}" if f"{module}.{alias.name}" in names else module for alias in node.names}
    return found & {*names}


def sources_of(root: Path) -> list[Source]:
    """Return the modules of the package in the checkout `root`; an empty `__init__` is none."""
    package = root / PACKAGE
    paths = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    return [
        Source(".".join(path.relative_to(package).with_suffix("").parts), text)
        for path, text in paths.items()
        if text.strip()
    ]


def _is_text(node: ast.AST) -> bool:
    """Return whether `node` is a string that stands by itself: a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
