"""What `pip install` of the built wheel gives: the two commands, the configurations, and the types."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow  # A build, an install and two cold starts of the trainer: about 20 s.


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as the wheel has it, and nothing of the clone."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "torchtitan_lite", folder / "clone" / "torchtitan_lite", ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "clone")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    offline = ("--no-deps", "--no-index")
    run(*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, folder / "clone", cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(*pip, "install", *offline, "--target", folder / "site", wheel, cwd=folder)
    return folder / "site"


def test_the_installed_command_trains_and_resumes_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    train = (sys.executable, installed / "bin" / "torchtitan-lite-train", "--job.config_file", "llama_debug.toml")
    short = ("--checkpoint.interval=2", "--checkpoint.async_mode=async_with_pinned_mem", "--metrics.log_freq=1")
    paths = {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    first = run(*train, *short, "--training.steps=2", cwd=tmp_path, **paths)
    assert "Training completed" in first
    second = run(*train, *short, "--training.steps=3", cwd=tmp_path, **paths)
    assert "Loading the checkpoint at step 2." in second
    assert (tmp_path / "outputs" / "checkpoint" / "step-3" / "manifest.json").is_file()
    listed = run(sys.executable, installed / "bin" / "torchtitan-lite", "ls", "outputs", cwd=tmp_path, **paths)
    assert listed.startswith("outputs/checkpoint: 2 checkpoints, ")


def test_the_wheel_has_the_types_and_every_configuration(installed: Path) -> None:
    package = installed / "torchtitan_lite"
    assert (package / "py.typed").is_file()
    names = sorted(path.name for path in (ROOT / "train_configs").glob("*.toml"))
    assert sorted(path.name for path in (package / "train_configs").glob("*.toml")) == names
    for name in names:
        assert (package / "train_configs" / name).read_bytes() == (ROOT / "train_configs" / name).read_bytes()
