"""Print how the package is built: lines, flats, lengths, names, companions, and the rooms that a save walks through.

    python scripts/measure_structure.py                 # this tree
    python scripts/measure_structure.py --root OTHER    # another checkout, such as an older commit

Counted on the syntax (structure/counts.py), except for the last lines: they are traces (`sys.setprofile`, calls of
functions of the package only, each thread for itself) of the second due save of a tiny loop, in the asynchronous mode,
until it is committed. A change of room is a call in another folder than the call before it in that thread; modules at
the root of the package, such as faults.py, are in no room; the depth is that of calls within the package. Medians of
five runs: what a thread in the background still does when the trace ends differs by a few.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.structure import counts, walk  # after the line above
from scripts.structure.source import PACKAGE, sources_of

FEATURE = re.compile(r"image|tier|memory|copies")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="a checkout")
    root = parser.parse_args().root.resolve()
    trees = {path: ast.parse(path.read_text()) for path in sorted((root / PACKAGE).rglob("*.py"))}
    modules = {".".join(path.relative_to(root).with_suffix("").parts): tree for path, tree in trees.items()}
    modules = {name: tree for name, tree in modules.items() if not name.endswith("__init__")}
    rows = [
        *counts.rows(sources_of(root)),
        ("modules that checkpoint.manager imports", len(closure(modules, f"{PACKAGE}.checkpoint.manager"))),
        ("tests of None on images, tier, memory, copies: saving/, resume/", guards(modules, "saving", "resume")),
        ("the same, elsewhere", guards(modules) - guards(modules, "saving", "resume")),
        ("saving/: files, levels, imports inside", "{}, {}, {}".format(*inside(modules, "saving"))),
        ("constructors with 8 or more arguments", ", ".join(f"{name} {n}" for name, n in constructors(modules))),
        ("definitions of State", sum(defines(tree, "State") for tree in modules.values())),
        ("bare event strings", bare_events(modules)),
    ]
    rows += walk.rows(root)
    for name, value in rows:
        print(f"{name:66} {value:>6}")


def imports_of(modules: dict[str, ast.Module], name: str) -> set[str]:
    """Return the modules of the package that `name` imports, also in functions."""
    found = set()
    for node in ast.walk(modules[name]):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
            for alias in node.names:
                home = f"{node.module}.{alias.name}"
                found.add(home if home in modules else node.module)
    return found & modules.keys()


def closure(modules: dict[str, ast.Module], start: str) -> set[str]:
    """Return the modules that importing `start` loads: its imports at the top of modules, and theirs."""
    tops = {
        name: ast.Module([node for node in tree.body if isinstance(node, ast.ImportFrom)], [])
        for name, tree in modules.items()
    }
    seen, left = set(), [start]
    while left:
        if (name := left.pop()) not in seen:
            seen.add(name)
            left += imports_of(tops, name)
    return seen


def guards(modules: dict[str, ast.Module], *rooms: str) -> int:
    """Return how often code of `rooms`, of all if none is named, asks whether something of the feature is None."""
    wanted = tuple(f"{PACKAGE}.checkpoint.{room}." for room in rooms) or (PACKAGE,)
    return sum(len([*guards_in(tree)]) for name, tree in modules.items() if name.startswith(wanted))


def guards_in(tree: ast.AST) -> Iterator[ast.Compare]:
    """Yield each `x is None` and `x is not None` where x is called after the feature."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            is_none = isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None
            words = re.findall(r"\w+", ast.unparse(node.left))
            if is_none and words and FEATURE.search(words[-1]):
                yield node


def inside(modules: dict[str, ast.Module], room: str) -> tuple[int, int, int]:
    """Return the files of a room, its levels (the longest chain of imports), and its imports of its own files."""
    own = {name for name in modules if name.startswith(f"{PACKAGE}.checkpoint.{room}.")}
    uses = {name: imports_of(modules, name) & own - {name} for name in own}

    def level(name: str) -> int:
        return 1 + max((level(other) for other in uses[name]), default=0)

    return len(own), max(map(level, own)), sum(map(len, uses.values()))


def constructors(modules: dict[str, ast.Module]) -> list[tuple[str, int]]:
    """Return the classes whose `__init__` takes eight or more arguments other than self."""
    found = []
    for tree in modules.values():
        for node in ast.walk(tree):
            for method in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    count = len(method.args.args) + len(method.args.kwonlyargs) - 1
                    found += [(node.name, count)] if count >= 8 else []
    return found


def twice(modules: dict[str, ast.Module]) -> list[str]:
    """Return the public class names that two folders define."""
    folders = defaultdict(set)
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                folders[node.name].add(name.rpartition(".")[0])
    return sorted(name for name, found in folders.items() if len(found) > 1)


def defines(tree: ast.Module, wanted: str) -> bool:
    return any(
        isinstance(target, ast.Name) and target.id == wanted
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    )


def bare_events(modules: dict[str, ast.Module]) -> int:
    """Return the calls of an `on_event` with the name of the event as a string."""
    return sum(
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("on_event")
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
        for tree in modules.values()
        for node in ast.walk(tree)
    )


if __name__ == "__main__":
    main()
