"""Which lines each test executes and how long it takes, recorded by test file and cached in a file."""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mutation.operators import Mutant
from mutation.tree import Tree

PACKAGE = "torchtitan_lite"
LIMIT_SECONDS = 900.0
"""For one traced test; the slowest take minutes."""
STARTS_UNTRACED = f"{PACKAGE}/memory/keeper/starting.py"
"""The modules next to it run in an interpreter without site-packages too, which records no lines: a test that executes
this one counts for all of them."""
HEAVY_SECONDS = 0.5
"""A test that takes longer, or whose module's fixtures take longer, runs after the others."""


@dataclass(frozen=True)
class Test:
    """One test, and the lines that it executes."""

    nodeid: str
    seconds: float
    module_setup: float
    lines: int
    """One bit for each line of the package."""

    @property
    def file(self) -> str:
        return self.nodeid.partition("::")[0]

    @property
    def is_heavy(self) -> bool:
        return max(self.seconds, self.module_setup) > HEAVY_SECONDS


class Reach:
    """The lines that the tests of `tree` execute, cached in the file `cache`."""

    def __init__(self, tree: Tree, cache: Path) -> None:
        self._tree, self._cache = tree, cache
        texts = {str(path.relative_to(tree.root)): path.read_text() for path in sorted(_sources(tree.root))}
        self._lengths = {path: len(text.splitlines()) + 1 for path, text in texts.items()}
        starts = itertools.accumulate(self._lengths.values(), initial=0)
        self._bases = dict(zip(self._lengths, starts, strict=False))
        # Lines that run at import belong to no test.
        self._inside = sum(1 << self._bases[path] + line for path, text in texts.items() for line in _inside(text))
        self._imported_by = _importers(texts)
        # Number of lines and digest of each module, to find the changed ones.
        self._package = {path: [self._lengths[path], _digest(text)] for path, text in texts.items()}
        self._files: dict[str, Any] = {}

    def collect(self, files: Iterable[str]) -> None:
        """Record the lines that the tests in `files` execute; unchanged files come from the cache."""
        known = self._cached()
        for file in files:
            digest = _digest((self._tree.root / file).read_text(encoding="utf-8"))
            if known.get(file, {}).get("digest") != digest:
                known[file] = {"digest": digest, **self._traced(file)}
                tests, left_out = len(known[file]["tests"]), known[file]["left_out"]
                print(f"{file}: {tests} tests" + "".join(f"\n  left out, it fails: {test}" for test in left_out))
                whole = json.dumps({"package": self._package, "files": known})
                self._cache.with_suffix(".tmp").write_text(whole, encoding="utf-8")
                self._cache.with_suffix(".tmp").replace(self._cache)
            self._files[file] = known[file]

    def _cached(self) -> dict[str, Any]:
        """Return the cache. In a module that has changed since, a test that executed one line counts for all lines."""
        if not self._cache.exists():
            return {}
        cached = json.loads(self._cache.read_text(encoding="utf-8"))
        bases = itertools.accumulate((length for length, _ in cached["package"].values()), initial=0)
        parts = [
            (base, length, self._bases[path], self._lengths[path], [length, digest] == self._package[path])
            for (path, (length, digest)), base in zip(cached["package"].items(), bases, strict=False)
            if path in self._package
        ]

        def moved(lines: str) -> str:
            old, new = int(lines, 16), 0
            for base, length, new_base, new_length, is_same in parts:
                if part := old >> base & (1 << length) - 1:
                    new |= (part if is_same else (1 << new_length) - 1) << new_base
            return f"{new:x}"

        if cached["package"] != self._package:
            for file in cached["files"].values():
                file["lines"] = moved(file["lines"])
                file["tests"] = {test: (took, moved(lines)) for test, (took, lines) in file["tests"].items()}
        found: dict[str, Any] = cached["files"]
        return found

    def tests_of(self, mutant: Mutant) -> list[Test]:
        """Return the tests that execute the changed code of `mutant`, the quickest and most specific first."""
        mask = 0
        if mutant.lines:
            for line in mutant.lines:
                mask |= 1 << self._bases[mutant.path] + line
        else:
            for path in (mutant.path, *self._imported_by.get(mutant.path, ())):
                mask |= self._all_of(path)
        if STARTS_UNTRACED in self._bases and Path(mutant.path).parent == Path(STARTS_UNTRACED).parent:
            mask |= self._all_of(STARTS_UNTRACED)
        own = f"test_{Path(mutant.path).stem}.py"
        # None is found if the test sets a trace function of its own, or its process has none.
        found = [test for test in self._tests if test.lines & mask] or [
            test for test in self._tests if Path(test.file).name == own
        ]

        def order(test: Test) -> tuple[Any, ...]:
            return (test.is_heavy, Path(test.file).name != own, test.file if test.is_heavy else "", test.seconds)

        return sorted(found, key=order)

    def _all_of(self, path: str) -> int:
        return ((1 << self._lengths[path]) - 1) << self._bases[path]

    @functools.cached_property
    def _tests(self) -> list[Test]:
        return [
            Test(nodeid, seconds, file["setup"], (int(lines, 16) | int(file["lines"], 16)) & self._inside)
            for file in self._files.values()
            for nodeid, (seconds, lines) in file["tests"].items()
        ]

    def _traced(self, file: str) -> dict[str, Any]:
        folder = self._tree.root.parent / "trace"
        folder.mkdir(exist_ok=True)
        bases = {str(self._tree.root / path): base for path, base in self._bases.items()}
        (folder / "lines.json").write_text(json.dumps(bases))
        hits = folder / "hits"
        hits.write_bytes(bytes(sum(self._lengths.values())))
        recorder = _Recorder(hits, folder / "reached")
        run = self._tree.run(
            ["-m", "not slow", file], [recorder], lambda _: LIMIT_SECONDS, first_failure=False, trace=folder
        )
        seconds = dict(run.seconds)
        if missing := [test for test in run.failed if test not in seconds]:
            # A test of memory or frames fails under the trace, so the lines it executed before are not all.
            again = self._tree.run(["-m", "not slow", file], [], lambda _: LIMIT_SECONDS, first_failure=False)
            seconds |= {test: again.seconds[test] for test in missing if test in again.seconds}
        reached = recorder.read()
        if not run.ended:
            raise RuntimeError(f"{file}: the tests did not end\n{self._tree.output()}")
        left_out = sorted({*run.failed, *([run.started] if run.hung else [])} - seconds.keys())
        return {
            "lines": reached.get("", "0"),
            "setup": max(run.setup.values(), default=0.0),
            "tests": {test: (round(took, 3), reached.get(test, "0")) for test, took in seconds.items()},
            "left_out": left_out,
        }


class _Recorder:
    """A plugin that records the lines of each test; the lines of fixtures count for every test of the file."""

    def __init__(self, hits: Path, reached: Path) -> None:
        self._hits, self._reached = hits, reached
        reached.write_text("")

    def read(self) -> dict[str, str]:
        """Return test to lines; the key "" has those of the fixtures."""
        found: dict[str, str] = {}
        for line in self._reached.read_text().splitlines():
            nodeid, lines = json.loads(line)
            found[nodeid] = f"{int(found.get(nodeid, '0'), 16) | int(lines, 16):x}"
        return found

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        self._take("")  # Imports of test modules count with the fixtures.
        yield
        self._take("")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            self._take(item.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            self._take(item.nodeid)

    def _take(self, nodeid: str) -> None:
        with self._hits.open("r+b") as file:
            data = file.read()
            file.seek(0)
            file.write(bytes(len(data)))
        bits = sum(1 << line for line, hit in enumerate(data) if hit)
        if bits:
            with self._reached.open("a") as file:
                file.write(json.dumps([nodeid, f"{bits:x}"]) + "\n")


def test_files(root: Path, paths: Iterable[str]) -> list[str]:
    """Return the test files below `paths`, relative to `root`."""
    found = []
    for path in paths:
        whole = root / path
        found += sorted(whole.rglob("test_*.py")) if whole.is_dir() else [whole]
    return [str(path.relative_to(root)) for path in found]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    yield from (root / PACKAGE).rglob("*.py")


def _inside(text: str) -> set[int]:
    """Return the lines of function bodies."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {line for each in functions for line in range(each.body[0].lineno, (each.end_lineno or 0) + 1)}


def _importers(texts: dict[str, str]) -> dict[str, set[str]]:
    """Return, for each module path, the modules that import from it."""
    importers: dict[str, set[str]] = {}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    importers.setdefault(name.replace(".", os.sep) + ".py", set()).add(path)
    return importers
