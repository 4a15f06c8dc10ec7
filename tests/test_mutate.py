"""The mutation run reports mutants that a test notices as killed, and prints those that survive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_a_mutant_that_a_test_notices_is_killed_and_others_survive(tmp_path: Path) -> None:
    mutants = _mutants(tmp_path, MODULE, TEST)

    kept = {(mutant["before"], mutant["becomes"]) for mutant in mutants if mutant["status"] == "SURVIVED"}
    assert kept == {("value < 0", "value <= 0"), ("0", "1"), ("raise ValueError('negative')", "pass")}
    killed = {mutant["becomes"]: mutant["by"] for mutant in mutants if mutant["status"] == "killed"}
    assert killed.keys() == {"not value < 0", "value >= 10", "11", "return not value > 10"}
    assert all("test_what_is_above_ten_is_large" in test for test in killed.values())


def _mutants(folder: Path, module: str, test: str) -> list[dict[str, Any]]:
    """Return the tool's outcomes for all mutants of a repository with one module and one file of tests."""
    repository, outcomes = folder / "repository", folder / "outcomes.json"
    for name, text in (("torchtitan_lite/sizes.py", module), ("tests/test_sizes.py", test)):
        (repository / name).parent.mkdir(parents=True)
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
