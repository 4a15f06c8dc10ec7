"""The syntax of source files: what a module imports, and which names it uses."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "torchtitan_lite"


@dataclass(frozen=True)
class Module:
    """One source file; `name` is without that of the package, as in "store.layout"."""

    path: Path

    @cached_property
    def name(self) -> str:
        base = ROOT / PACKAGE if self.path.is_relative_to(ROOT / PACKAGE) else ROOT
        parts = self.path.relative_to(base).with_suffix("").parts
        return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def bindings(self) -> dict[str, str]:
        """Return the full name of each imported one: {"dist": "torch.distributed", "Path": "pathlib.Path"}."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {
                    a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
                }
            elif isinstance(node, ast.ImportFrom):
                found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return found

    def at(self, node: ast.AST, finding: str) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {finding}"

    def imports(self) -> Iterator[tuple[ast.AST, str]]:
        """Yield every import in the file, also those in functions."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, self.at(node, "relative import")
                yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)

    @cached_property
    def uses(self) -> list[tuple[ast.expr, str]]:
        """Every use of an imported name, in full: `dist.barrier` is "torch.distributed.barrier"."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Attribute | ast.Name):
                base, *attributes = dotted(node).split(".")
                if base in self.bindings:
                    found.append((node, ".".join((self.bindings[base], *attributes))))
        return found


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def is_in(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@cache
def modules_of(folder: Path) -> list[Module]:
    """Return the modules in `folder`, and in the folders below it."""
    return [Module(path) for path in sorted(folder.rglob("*.py"))]
