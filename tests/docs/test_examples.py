"""The scripts of docs/examples run, and a restarted one continues as if it had never stopped."""

from __future__ import annotations

import ast
import os
import random
import re
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.forked import run_code, run_script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
LIBRARIES = {
    "transformers_loop.py": ["transformers"],
    "peft_loop.py": ["peft", "transformers"],
    "timm_loop.py": ["timm"],
    "accelerate_loop.py": ["accelerate"],
    "lightning_callback.py": ["lightning"],
    "trainer_callback.py": ["transformers", "accelerate"],
    "several_models.py": [],
}
"""Libraries that each script needs in addition to those of this package."""
SHARDED = "own_fsdp_loop.py"
"""Run by tests/docs/test_docs.py, under torchrun."""
STEPS, STOPPED_AT = 20, 8
KILLABLE = range(12, STEPS + 1)
"""The steps whose loss is printed after the save of step 10 has begun, so that of step 5 is committed."""
KILLED = """
import builtins, os, runpy, signal, sys
sys.argv = [{script!r}, "{steps}"]
show = print

def show_and_die(*words, **options):
    show(*words, **options | {{"flush": True}})
    if str(words[0]).startswith("step {at}:"):
        os.kill(os.getpid(), signal.SIGKILL)

builtins.print = show_and_die
runpy.run_path({script!r}, run_name="__main__")
"""
"""Runs a script as it is, and kills it once it has printed a loss."""
SHOWN = {
    "Lightning": "lightning_callback.py",
    "transformers' Trainer": "trainer_callback.py",
    "accelerate": "accelerate_loop.py",
}
"""The sections of docs/trainers.md whose lines are those of a script."""
DEADLINE_SECONDS = 300.0


def test_every_example_is_tested_and_linked_from_a_page_about_own_loops() -> None:
    page = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("own_loop.md", "several_models.md"))
    scripts = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix == ".py")
    assert sorted([*LIBRARIES, SHARDED]) == scripts
    assert not [name for name in scripts if f"(examples/{name})" not in page]


@pytest.mark.slow  # three starts, one of a new interpreter, each with the import of a large library
@pytest.mark.parametrize("script", LIBRARIES)
def test_a_killed_and_restarted_example_has_the_losses_of_a_run_that_never_stopped(
    script: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    straight = _straight(script, tmp_path)
    at = random.Random(f"{request.config.getoption('seed')} {script}").choice(KILLABLE)
    folder = tmp_path / "killed"
    folder.mkdir()
    log = folder / "killed.log"
    code = KILLED.format(script=str(EXAMPLES / script), steps=STEPS, at=at)
    assert run_code(code, log, _environment(), folder).wait(DEADLINE_SECONDS) == -signal.SIGKILL, log.read_text()
    first, second = _printed(log.read_text()), _forked_losses(script, STEPS, folder)
    assert list(first) == [*range(1, at + 1)]
    assert list(second) == [*range(min(second), STEPS + 1)] and 1 < min(second) <= at
    assert first.items() | second.items() == straight.items()


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", LIBRARIES)
def test_a_stopped_and_restarted_example_has_the_losses_of_a_run_that_never_stopped(
    script: str, tmp_path: Path
) -> None:
    straight = _straight(script, tmp_path)
    first = _forked_losses(script, STOPPED_AT, tmp_path / "stopped")
    second = _forked_losses(script, STEPS, tmp_path / "stopped")
    assert list(second) == [*range(STOPPED_AT + 1, STEPS + 1)], "it continues, and begins nothing again"
    assert first | second == straight


@pytest.mark.parametrize("title", SHOWN)
def test_the_lines_of_the_page_about_trainers_are_those_of_its_scripts(title: str) -> None:
    page = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
    [row] = re.findall(rf"^\| \[{title}\]\(#.*\| `(.+)` \|$", page, re.MULTILINE)
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    shown = [row, *(line.strip() for line in section.splitlines() if line.startswith("    "))]
    imports, calls = _imports_and_calls((EXAMPLES / SHOWN[title]).read_text(encoding="utf-8"))
    assert len(shown) > 1
    for line in shown:
        its_imports, its_calls = _imports_and_calls(line)
        assert its_imports or its_calls, line
        assert its_imports <= imports, line
        for name, keywords in its_calls:
            assert any(name == each and keywords <= theirs for each, theirs in calls), f"{name} in {line}"


def _imports_and_calls(code: str) -> tuple[set[str], set[tuple[str, frozenset[str]]]]:
    """Return the imports in `code`, and the name of what each call calls with the names of its keywords."""
    nodes = [*ast.walk(ast.parse(code))]
    imports = {ast.unparse(node) for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))}
    called = [(node.func, node.keywords) for node in nodes if isinstance(node, ast.Call)]
    names = [(func.attr if isinstance(func, ast.Attribute) else ast.unparse(func), words) for func, words in called]
    return imports, {(name, frozenset(each.arg or "**" for each in words)) for name, words in names}


def _straight(script: str, folder: Path) -> dict[int, str]:
    """Return the losses of all steps in one run; nine digits distinguish any two floats of 32 bits."""
    for library in LIBRARIES[script]:
        _skip_without(library)
    losses = _losses(script, STEPS, folder / "straight")
    assert list(losses) == [*range(1, STEPS + 1)]
    return losses


def _skip_without(library: str) -> None:
    try:
        version(library)
    except PackageNotFoundError:
        pytest.skip(f"{library} is not installed")


def _losses(script: str, steps: int, folder: Path) -> dict[int, str]:
    folder.mkdir()
    ended = subprocess.run(
        [sys.executable, EXAMPLES / script, str(steps)],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return _printed(ended.stdout)


def _forked_losses(script: str, steps: int, folder: Path) -> dict[int, str]:
    folder.mkdir(exist_ok=True)
    log = folder / f"{steps}.log"
    process = run_script(EXAMPLES / script, [str(steps)], log, _environment(), folder)
    assert process.wait(DEADLINE_SECONDS) == 0, log.read_text()
    return _printed(log.read_text())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _printed(output: str) -> dict[int, str]:
    found = re.findall(r"^step (\d+): loss (.+)$", output, re.MULTILINE)
    return {int(step): loss for step, loss in found}
