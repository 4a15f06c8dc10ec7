"""The mutation run reports mutants that a test notices as killed, and prints those that survive."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.mutation.operators import mutants_of

ROOT = Path(__file__).parents[1]
MODULE = """
def is_large(value: int) -> bool:
    if value < 0:
        raise ValueError("negative")
    return value > 10
"""
TEST = """
from torchtitan_lite.sizes import is_large

def test_what_is_above_ten_is_large():
    assert is_large(11) and not is_large(10)
"""


@pytest.mark.parametrize(
    "kind", [*ast.operator.__subclasses__(), *ast.cmpop.__subclasses__()], ids=lambda kind: kind.__name__
)
def test_each_operator_of_python_is_replaced_by_another_one(kind: type[ast.AST]) -> None:
    a, b = ast.Name("a"), ast.Name("b")
    value = ast.BinOp(a, kind(), b) if issubclass(kind, ast.operator) else ast.Compare(a, [kind()], [b])
    found = mutants_of("module.py", f"def f(a, b):\n    return {ast.unparse(value)}")
    assert {"arithmetic", "comparison"} & {mutant.operator for mutant in found}


@pytest.mark.slow
def test_a_mutant_that_a_test_notices_is_killed_and_others_survive(tmp_path: Path) -> None:
    mutants = _mutants(tmp_path, MODULE, TEST)

    kept = {(mutant["before"], mutant["becomes"]) for mutant in mutants if mutant["status"] == "SURVIVED"}
    assert kept == {("value < 0", "value <= 0"), ("0", "1"), ("raise ValueError('negative')", "pass")}
    killed = {mutant["becomes"]: mutant["by"] for mutant in mutants if mutant["status"] == "killed"}
    assert killed.keys() == {"not value < 0", "value >= 10", "11", "return not value > 10"}
    assert all("test_what_is_above_ten_is_large" in test for test in killed.values())


STARTING = """
import subprocess, sys
from pathlib import Path

def spawn():
    root = str(Path(__file__).parents[3])
    code = f"import sys; sys.path.append({root!r}); from torchtitan_lite.memory.keeper.process import main; main()"
    return subprocess.run([sys.executable, "-I", "-S", "-c", code]).returncode
"""
PROCESS = """
def main():
    raise SystemExit(7)
"""
STARTS = """
from torchtitan_lite.memory.keeper.starting import spawn

def test_the_process_ends_with_its_code():
    assert spawn() == 7
"""


@pytest.mark.slow  # Like the other one it runs the tool, in about three seconds.
def test_a_mutant_in_a_process_that_is_not_traced_is_tried_with_the_tests_that_start_it(tmp_path: Path) -> None:
    files = {"torchtitan_lite/memory/keeper/starting.py": STARTING, "torchtitan_lite/memory/keeper/process.py": PROCESS}
    mutants = _mutants_of(tmp_path, {**files, "tests/test_starts.py": STARTS})

    in_process = [mutant for mutant in mutants if mutant["file"].endswith("process.py")]
    assert {(mutant["becomes"], mutant["status"]) for mutant in in_process} == {("pass", "killed"), ("8", "killed")}


def _mutants(folder: Path, module: str, test: str) -> list[dict[str, Any]]:
    """Return the tool's outcomes for all mutants of a repository with one module and one file of tests."""
    return _mutants_of(folder, {"torchtitan_lite/sizes.py": module, "tests/test_sizes.py": test})


def _mutants_of(folder: Path, files: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the tool's outcomes for all mutants of a repository with `files`."""
    repository, outcomes = folder / "repository", folder / "outcomes.json"
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q", repository], check=True)
    places = ["--repository", repository, "--cache", folder / "reach.json", "--json", outcomes]
    arguments = [*map(str, places), "torchtitan_lite", "--count", "0", "--tests", "tests"]
    script = (
        f"import mutate; mutate.LOADED = (); mutate.main({arguments!r})"  # importing torch takes longer than the rest
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120, stdout=subprocess.DEVNULL)
    found: list[dict[str, Any]] = json.loads(outcomes.read_text(encoding="utf-8"))["mutants"]
    return found
