"""The modules of a checkout: their syntax, their lines by kind, and the flat in which each stands."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path

PACKAGE = "torchtitan_lite"
FLATS: dict[str, tuple[tuple[str, ...], ...]] = {
    # What saves and loads a run.
    "core": (
        ("__init__", "errors", "log", "host_memory", "collection"),
        ("events", "faults", "torch_private"),
        ("config", "disk"),
        ("store",),
        ("distributed", "checkpoint.schedule", "checkpoint.format"),
        ("bucket", "checkpoint.context", "checkpoint.state", "checkpoint.devices"),
        ("stores", "checkpoint.untrusted", "checkpoint.staging"),
        ("checkpoint.run_folders", "checkpoint.planning", "checkpoint.reading"),
        ("checkpoint.saving", "checkpoint.resume"),
        ("checkpoint.seams",),
        ("checkpoint",),
    ),
    # What may accompany a run, and what reads or makes checkpoints without one.
    "extras": (
        ("json_lines",),
        ("accounts", "event_lines"),
        ("memory", "memory.keeper", "uploading", "examining", "hangs"),
        ("converting",),
        ("uploads", "hugging_face", "importing", "memory.images"),
        ("checkpoint.companions",),
    ),
    # Loops that train: ours, and those of other libraries.
    "trainer": (
        ("models",),
        ("data", "divergence", "optim", "metrics", "parallelisms"),
        ("preflight",),
        ("trainer", "integrations"),
        ("train",),
    ),
    # What a person calls.
    "tools": (("report",), ("cli",)),
}
"""The rooms and modules of each flat, floor by floor: a module imports only from floors below its own. The longest name
that fits a module is its own."""
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
            for flat, floors in FLATS.items()
            for part in chain(*floors)
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
