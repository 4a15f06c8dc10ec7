"""What `pip install` of the built wheel gives: the two commands, the configurations, and the types."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.bpe import TEXTS, write_tokenizer
from torchtitan_lite import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
MAX_WHEEL_BYTES = 1_200_000
"""More than the source needs: data of tests, or a second copy of a folder, would pass it."""
MYPY = shutil.which("mypy", path=f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}")

pytestmark = pytest.mark.slow  # A build, an install and a dozen cold starts of Python with torch: about a minute.

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
OFFLINE = ("--no-deps", "--no-index")
TRAIN = ("torchtitan-lite-train", "--job.config_file", "llama_debug.toml")
SHORT = ("--checkpoint.interval=2", "--checkpoint.async_mode=async_with_pinned_mem", "--metrics.log_freq=1")
OPENED = (
    "from torchtitan_lite.bucket.bucket_store import open_bucket as o; print('opened', o('s3://bucket/run').address)"
)
ADAPTED = "from torchtitan_lite.data.adapters import StatefulDataLoaderAdapter as A; A(None, rank=0, num_ranks=1)"
WITHOUT = {
    "torchtitan": ("torchtitan", ["python", "-c", "import torchtitan_lite.integrations.torchtitan"]),
    "lightning": ("lightning", ["python", "-c", "import torchtitan_lite.integrations.lightning"]),
    "transformers": ("transformers", ["python", "-c", "import torchtitan_lite.integrations.transformers"]),
    "accelerate": ("accelerate", ["python", "-c", "import torchtitan_lite.integrations.accelerate"]),
    "torchdata": ("torchdata", ["python", "-c", ADAPTED]),
    "tokenizers": ("tokenizers", [*TRAIN, "--model.tokenizer_path={folder}"]),
    "parquet": ("pyarrow", [*TRAIN, "--training.dataset=parquet", "--training.dataset_path={folder}/*.parquet"]),
    "datasets": ("datasets", [*TRAIN, "--training.dataset=huggingface", "--training.dataset_path={folder}"]),
    "report": ("jinja2", ["torchtitan-lite", "report", "{trained}/outputs", "{folder}/report.html"]),
    "safetensors": ("safetensors", ["torchtitan-lite", "export", "{trained}/outputs", "{folder}/out"]),
    "wandb": ("wandb", [*TRAIN, "--metrics.enable_wandb"]),
    "cloud": ("obstore", [*TRAIN, "--checkpoint.folder=s3://bucket/run"]),
}
"""The package of each extra, and a command that needs it."""

SMALL = ("--training.steps=1", "--training.batch_size=1", "--training.seq_len=16")
WITH = {
    "torchdata": (["python", "{folder}/two_batches.py"], "[4, 5] [6, 7]"),
    "tokenizers": (
        [
            *(*TRAIN, *SMALL, "--training.dataset=text"),
            *("--training.dataset_path={folder}/a.txt", "--model.tokenizer_path=."),
        ],
        "Training completed",
    ),
    "parquet": (
        [*TRAIN, *SMALL, "--training.dataset=parquet", "--training.dataset_path={folder}/a.parquet"],
        "Training completed",
    ),
    "report": (WITHOUT["report"][1], "{folder}/report.html"),
    "safetensors": (WITHOUT["safetensors"][1], "Exported"),
    "cloud": (["python", "-c", OPENED], "opened s3://bucket/run"),
    "accelerate": (
        ["python", "-c", "import torchtitan_lite.integrations.accelerate as a; print(a.__all__)"],
        "Batches",
    ),
    "lightning": (
        ["python", "-c", "import torchtitan_lite.integrations.lightning as a; print(a.__all__)"],
        "Checkpoints",
    ),
}
"""A command that uses each extra that the tests have, and words of what it says."""

TWO_BATCHES = """
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_lite.checkpoint import CheckpointManager, TrainState
from torchtitan_lite.data import StatefulDataLoaderAdapter

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = StatefulDataLoaderAdapter(StatefulDataLoader(range(10), batch_size=2), rank=0, num_ranks=1)
progress = TrainState()
with CheckpointManager.for_loop(
    model=model, optimizer=optimizer, dataloader=loader, states={"train_state": progress}, folder="run"
) as manager:
    manager.load()
    batches = iter(loader)
    print(next(batches).tolist(), next(batches).tolist())
    progress.step += 1
    manager.save(progress.step, force=True)
"""

ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
sys.modules["pytorch_" + {package!r}] = None  # Lightning's other name
"""

USER_PROGRAM = """
from pathlib import Path

import torch
from torch import nn
from typing_extensions import assert_type

from torchtitan_lite import log
from torchtitan_lite.checkpoint import CheckpointManager, CheckpointReader, PerRank, Stateful, TrainState, load_model
from torchtitan_lite.errors import CheckpointNotFound


class Position:
    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


def train(steps: int, folder: Path) -> int:
    log.setup()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    progress, loader = TrainState(), Position()
    data: Stateful = loader
    own = PerRank(Position())
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, dataloader=data, states={"train_state": progress, "own": own}, folder=folder
    ) as manager:
        assert_type(manager.load(), bool)
        manager.reset()
        while progress.step < steps and not manager.preempted_by:
            progress.step += 1
            manager.save(progress.step, force=progress.step == steps, metrics={"loss": torch.tensor(1.0)})
    assert_type(manager.loaded_step, int | None)
    return assert_type(progress.step, int)


def read(folder: Path, module: nn.Module) -> CheckpointReader | None:
    try:
        load_model(module, folder)
        return assert_type(CheckpointReader(folder), CheckpointReader)
    except CheckpointNotFound as error:
        print(error.step)
        return None
"""


def run(*command: str | Path, cwd: Path, code: int = 0, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_installed(installed: Path, *command: str, cwd: Path, code: int = 0, before: str = "") -> str:
    """Run a command of the installed package, or python; the folder `before` is first on its path."""
    name, *arguments = command
    program = [] if name == "python" else [installed / "bin" / name]
    path = f"{before}:{installed}" if before else str(installed)
    return run(sys.executable, *program, *arguments, cwd=cwd, code=code, PYTHONPATH=path, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this clone."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "torchtitan_lite", folder / "clone" / "torchtitan_lite", ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "clone")
    run(*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", folder, folder / "clone", cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as the wheel has it, and nothing of the clone."""
    folder = tmp_path_factory.mktemp("installed")
    run(*PIP, "install", *OFFLINE, "--target", folder, wheel, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def trained(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, empty before, in which the installed command trained two steps."""
    folder = tmp_path_factory.mktemp("trained")
    logged = run_installed(installed, *TRAIN, *SHORT, "--training.steps=2", cwd=folder)
    assert "Training completed" in logged
    return folder


def test_the_installed_command_trains_and_resumes_in_an_empty_folder(installed: Path, trained: Path) -> None:
    resumed = run_installed(installed, *TRAIN, *SHORT, "--training.steps=3", cwd=trained)
    assert "Loading the checkpoint at step 2." in resumed
    assert (trained / "outputs" / "checkpoint" / "step-3" / "manifest.json").is_file()
    listed = run_installed(installed, "torchtitan-lite", "ls", "outputs", cwd=trained)
    assert listed.startswith("outputs/checkpoint: 2 checkpoints, ")


def test_the_loop_of_the_readme_resumes_with_the_installed_package(installed: Path, tmp_path: Path) -> None:
    (loop,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "loop.py").write_text(loop)
    said = [run_installed(installed, "python", "loop.py", cwd=tmp_path).strip() for _ in range(2)]
    assert said == ["Started at step 0", "Resumed at step 300"]


def test_the_wheel_is_small_and_has_the_files_of_the_package_and_no_others(wheel: Path) -> None:
    about = f"torchtitan_lite-{__version__}.dist-info"
    kinds = ("**/*.py", "py.typed", "report/*.html", "report/*.css", "train_configs/*.toml")
    package = ROOT / "torchtitan_lite"
    expected = {f"torchtitan_lite/{path.relative_to(package)}" for kind in kinds for path in package.glob(kind)}
    expected |= {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt")}
    expected |= {f"{about}/licenses/LICENSE"}
    assert set(zipfile.ZipFile(wheel).namelist()) == expected
    assert wheel.stat().st_size <= MAX_WHEEL_BYTES


def test_the_wheel_has_the_types_and_every_configuration(installed: Path) -> None:
    package = installed / "torchtitan_lite"
    assert (package / "py.typed").is_file()
    names = sorted(path.name for path in (ROOT / "train_configs").glob("*.toml"))
    assert sorted(path.name for path in (package / "train_configs").glob("*.toml")) == names
    for name in names:
        assert (package / "train_configs" / name).read_bytes() == (ROOT / "train_configs" / name).read_bytes()


def test_every_extra_of_the_package_is_tried_without() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(WITHOUT) == extras.keys() - {"docs", "test", "dev"}


@pytest.mark.parametrize("extra", WITHOUT)
def test_without_an_extra_one_sentence_says_how_to_install_it(
    extra: str, installed: Path, trained: Path, tmp_path: Path
) -> None:
    package, command = WITHOUT[extra]
    (tmp_path / "sitecustomize.py").write_text(ABSENT.format(package=package))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "a.parquet").touch()
    given = [word.format(folder=tmp_path, trained=trained) for word in command]
    said = run_installed(installed, *given, cwd=tmp_path, code=1, before=str(tmp_path))
    sentence = f"{package} is not installed. Install it with: pip install 'torchtitan-lite[{extra}]'"
    assert said.count(sentence) == 1
    assert said.endswith(f"{sentence}\n")
    assert ("Traceback" in said) == (command[0] == "python"), "a command shows none, a program of your own does"


def test_every_extra_of_the_tests_is_tried() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(WITH) == {extra for extra, packages in extras.items() if set(packages) < set(extras["test"])}


@pytest.mark.parametrize("extra", WITH)
def test_with_an_extra_the_installed_package_does_what_it_is_for(
    extra: str, installed: Path, trained: Path, tmp_path: Path
) -> None:
    command, expected = WITH[extra]
    (tmp_path / "two_batches.py").write_text(TWO_BATCHES)
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    write_tokenizer(tmp_path)
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    given = [word.format(folder=tmp_path, trained=trained) for word in command]
    if extra == "torchdata":  # A save, and then a resume.
        assert "[0, 1] [2, 3]" in run_installed(installed, *given, cwd=tmp_path)
    assert expected.format(folder=tmp_path) in run_installed(installed, *given, cwd=tmp_path)


@pytest.mark.skipif(MYPY is None, reason="needs mypy: scripts/check.sh installs it")
def test_a_strict_type_checker_sees_the_types_of_the_installed_package(installed: Path, tmp_path: Path) -> None:
    assert MYPY is not None
    check = (MYPY, "--strict", "--python-executable", sys.executable, "--cache-dir", str(tmp_path / "cache"))
    (tmp_path / "right.py").write_text(USER_PROGRAM)
    (tmp_path / "wrong.py").write_text(USER_PROGRAM.replace("manager.save(progress.step", "manager.save('three'"))
    assert run(*check, "right.py", cwd=tmp_path, PYTHONPATH=str(installed)).startswith("Success")
    said = run(*check, "wrong.py", cwd=tmp_path, code=1, PYTHONPATH=str(installed))
    assert 'Argument 1 to "save" of "CheckpointManager" has incompatible type "str"; expected "int"' in said
