"""The scripts of docs/examples run, and a restarted one continues as if it had never stopped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.forked import run_script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
LIBRARIES = {
    "transformers_loop.py": ["transformers"],
    "peft_loop.py": ["peft", "transformers"],
    "timm_loop.py": ["timm"],
    "lightning_callback.py": ["lightning"],
    "trainer_callback.py": ["transformers", "accelerate"],
    "several_models.py": [],
}
"""Libraries that each script needs in addition to those of this package."""
STEPS, STOPPED_AT = 20, 8
DEADLINE_SECONDS = 300.0


def test_every_example_is_tested_and_linked_from_a_page_about_own_loops() -> None:
    page = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("own_loop.md", "several_models.md"))
    assert sorted(LIBRARIES) == sorted(path.name for path in EXAMPLES.iterdir() if path.suffix == ".py")
    assert not [name for name in LIBRARIES if f"(examples/{name})" not in page]


@pytest.mark.slow  # three starts, one of a new interpreter, each with the import of a large library
@pytest.mark.parametrize("script", LIBRARIES)
def test_a_restarted_example_has_the_losses_of_a_run_that_never_stopped(script: str, tmp_path: Path) -> None:
    for library in LIBRARIES[script]:
        _skip_without(library)
    straight = _losses(script, STEPS, tmp_path / "straight")
    first = _forked_losses(script, STOPPED_AT, tmp_path / "stopped")
    second = _forked_losses(script, STEPS, tmp_path / "stopped")
    assert list(straight) == [*range(1, STEPS + 1)]
    assert list(second) == [*range(STOPPED_AT + 1, STEPS + 1)], "it continues, and begins nothing again"
    # Nine digits distinguish any two floats of 32 bits.
    assert first | second == straight


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
