"""What training loops of other people import stays where it is."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PUBLIC = {
    "torchtitan_lite.checkpoint": [
        "AnyOf",
        "AtStep",
        "CheckpointInfo",
        "CheckpointManager",
        "CheckpointReader",
        "EverySeconds",
        "EverySteps",
        "HuggingFaceModel",
        "KeepAny",
        "KeepBest",
        "KeepEvery",
        "KeepFor",
        "KeepLatest",
        "Past",
        "PerRank",
        "Place",
        "RetentionPolicy",
        "Ruling",
        "SavePolicy",
        "Seams",
        "Stateful",
        "Tick",
        "TrainState",
        "load_model",
    ],
    "torchtitan_lite.config": ["Checkpoint", "Job", "JobConfig"],
    "torchtitan_lite.data": ["HuggingFaceStreamAdapter", "StatefulDataLoaderAdapter"],
    "torchtitan_lite.errors": [
        "AllCheckpointsDamaged",
        "CheckpointDamaged",
        "CheckpointError",
        "CheckpointMismatch",
        "CheckpointNotFound",
        "CheckpointUnreadable",
        "CheckpointUnsafe",
        "ConfigError",
        "CorpusChanged",
        "ExtraMissing",
        "FolderInUse",
        "FolderNotShared",
        "FolderUnusable",
        "FormatTooNew",
        "FormatTooOld",
        "HostsDiffer",
        "KeeperUnavailable",
        "LeaseLost",
        "PeerLost",
        "PinsUnreadable",
        "RanksDiffer",
        "RunNotLoaded",
        "SaveFailed",
        "TokensNotWritten",
        "TorchtitanLiteError",
        "TrainingDiverged",
        "UnknownFormat",
        "UploadRefused",
        "WriterProcessDied",
    ],
    "torchtitan_lite.faults": ["install", "point"],
    "torchtitan_lite.log": ["setup"],
    "torchtitan_lite.metrics": ["Accounts", "Start", "read_accounts"],
}


OF_OTHERS = {
    "torchtitan_lite.integrations.accelerate": ["Batches", "for_accelerator"],
    "torchtitan_lite.integrations.lightning": ["Checkpoints"],
    "torchtitan_lite.integrations.torchtitan": ["CheckpointManager"],
    "torchtitan_lite.integrations.transformers": ["Checkpoints"],
}
"""Of modules that cannot be imported without another library."""


@pytest.mark.parametrize("name", PUBLIC)
def test_these_names_are_public_and_no_others(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(module.__all__) == PUBLIC[name]
    assert {*PUBLIC[name]} <= {*dir(module)}
    for each in PUBLIC[name]:
        assert getattr(module, each).__name__ == each
        assert getattr(module, each).__doc__


IMPORT = re.compile(
    r"^ *(?:from (torchtitan_lite[\w.]*) import ([^#\n]+)|import (torchtitan_lite[\w.]*))", re.MULTILINE
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "examples").glob("*.py"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_imports_is_public(page: Path) -> None:
    private = []
    for module, names, whole in IMPORT.findall(page.read_text(encoding="utf-8")):
        for name in map(str.strip, names.strip("() ").split(",")):
            is_public = name in (PUBLIC | OF_OTHERS).get(module, ()) or f"{module}.{name}" in PUBLIC or whole in PUBLIC
            private += [] if is_public else [f"{module or whole}: {name}"]
    assert not private


def test_a_name_that_is_not_there_is_the_usual_error() -> None:
    for name in ("torchtitan_lite.checkpoint", "torchtitan_lite.data"):
        with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'Manager'"):
            _ = importlib.import_module(name).Manager


def test_importing_the_packages_loads_no_torch() -> None:
    script = f"import sys, {', '.join(PUBLIC)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_the_package_says_that_it_has_types() -> None:
    assert (ROOT / "torchtitan_lite" / "py.typed").is_file()
    assert 'torchtitan_lite = ["py.typed", ' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_api_reference_is_up_to_date() -> None:
    specification = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "generate_api_reference.py")
    assert specification is not None and specification.loader is not None
    reference = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(reference)
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == reference.render(), "run: python scripts/generate_api_reference.py"
