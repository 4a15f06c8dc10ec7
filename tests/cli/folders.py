"""Folders of checkpoints for the tests of the command, made of golden ones without a job."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from tests.store.filled import later_format
from torchtitan_lite.store.manifest import Manifest

GOLDEN = Path(__file__).parents[1] / "golden" / "format-7" / "two-ranks" / "checkpoint" / "step-7"


def add_step(root: Path, step: int, *, name: str = "", **changes: Any) -> Path:
    """Add a checkpoint of `step` to `root` whose manifest has these `changes`; return its folder."""
    folder = root / (name or f"step-{step}")
    shutil.copytree(GOLDEN, folder)
    manifest = Manifest.of_folder(folder)
    assert manifest is not None
    extra = manifest.extra | changes.pop("extra", {})
    changed = dataclasses.replace(manifest, step=step, extra=extra, **changes)
    (folder / "manifest.json").write_bytes(changed.to_json())
    return folder


def of_newer_format(folder: Path) -> Path:
    """Give the manifest in `folder` the next format version."""
    path = folder / "manifest.json"
    path.write_bytes(later_format(path.read_bytes()))
    return folder


def damaged(folder: Path) -> Path:
    """Cut the last byte off a file of tensors in `folder`."""
    path = next(iter(sorted(folder.glob("__*"))))
    path.write_bytes(path.read_bytes()[:-1])
    return folder


def half_written(folder: Path) -> Path:
    """Remove the two descriptions in `folder`, which a save writes last."""
    (folder / "manifest.json").unlink()
    (folder / ".metadata").unlink()
    return folder


def without_manifest(folder: Path) -> Path:
    """Remove our manifest, so that the folder is one of plain DCP."""
    (folder / "manifest.json").unlink()
    return folder
