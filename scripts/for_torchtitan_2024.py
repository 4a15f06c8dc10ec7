"""Convert a full checkpoint of this package into a folder that torchtitan of November 2024 loads completely.

    python scripts/for_torchtitan_2024.py outputs/checkpoint/step-100 titan/checkpoint/step-100 --dp-ranks 8

The files with model, optimizer and learning rate are hard links to those of the checkpoint, or copies if the disk
cannot link. torchtitan's `train_state` and `dataloader` replace ours: the step, three lists of losses in torchtitan's
form, and for each data-parallel rank a dataloader at its beginning. The checkpoint is verified, and does not change.
docs/partial_loads.md gives the reasons.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import pickle
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # Works in a clone that is not installed.

from torchtitan_lite.checkpoint.format.metadata_file import metadata_bytes  # noqa: E402  # after the line above
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder  # noqa: E402  # as above
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint  # noqa: E402  # as above
from torchtitan_lite.checkpoint.state.train_state import TrainState  # noqa: E402  # as above
from torchtitan_lite.disk.block_reader import BlockReader  # noqa: E402  # as above
from torchtitan_lite.disk.digest import DIGEST_BYTES  # noqa: E402  # as above
from torchtitan_lite.distributed.peers import Peers  # noqa: E402  # as above
from torchtitan_lite.errors import TorchtitanLiteError  # noqa: E402  # as above
from torchtitan_lite.store import layout  # noqa: E402  # as above
from torchtitan_lite.torch_private import storage_info  # noqa: E402  # as above

ADDED_FILE = "__torchtitan.distcp"
STEP = "train_state.step"
LISTS = ("log_steps", "global_avg_losses", "global_max_losses")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a full checkpoint of this package, a folder step-N")
    parser.add_argument("target", type=Path, help="the folder to make, also named step-N")
    parser.add_argument("--dp-ranks", type=int, default=1, help="data-parallel ranks of torchtitan's job (default: 1)")
    arguments = parser.parse_args()
    try:
        convert(arguments.checkpoint, arguments.target, arguments.dp_ranks)
    except (TorchtitanLiteError, ValueError, OSError) as error:
        sys.exit(str(error))


def convert(checkpoint: Path, target: Path, dp_ranks: int = 1) -> None:
    """Make `target`. Raise ValueError if it exists, or if `checkpoint` is damaged or not a full one of this package."""
    if target.exists():
        raise ValueError(f"{target} exists. Remove it, or name another folder.")
    if not (checkpoint / layout.MANIFEST).exists():
        raise ValueError(
            f"{checkpoint} is not a checkpoint of this package: expected {layout.MANIFEST} in it, found none. "
            "Name a folder step-N."
        )
    stored = StoredCheckpoint(checkpoint, Peers(timedelta(seconds=60)))
    if "train_state.log_steps" not in stored.contents:
        raise ValueError(f"{checkpoint} has no train_state with losses. Expected a full checkpoint of the Trainer.")
    for name, record in CheckpointFolder(checkpoint).records.items():
        BlockReader().verify(checkpoint / name, record, range(len(record.blocks) // DIGEST_BYTES))
    progress = TrainState()
    progress.load_state_dict(stored.read_state("train_state", progress.state_dict()))
    added: dict[str, Any] = {f"train_state.{name}": _saved(getattr(progress, name)) for name in LISTS}
    # torchdata's loader treats an empty position as none.
    added |= {f"dataloader.dp_rank_{rank}": pickle.dumps({}) for rank in range(dp_ranks)}
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for file in checkpoint.glob("*.distcp"):
        _link(file, unfinished / file.name)
    _add(FileSystemReader(checkpoint).read_metadata(), added, unfinished)
    unfinished.rename(target)


def _saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


def _link(file: Path, link: Path) -> None:
    try:
        os.link(file, link)
    except OSError:
        shutil.copyfile(file, link)


def _add(metadata: Any, added: dict[str, Any], folder: Path) -> None:
    """Write `added` to `folder`, and metadata that has it in place of our own train_state and dataloader keys."""
    kept = {
        key
        for key in metadata.state_dict_metadata
        if key == STEP or not key.startswith(("train_state.", "dataloader."))
    }
    places = {index: place for index, place in metadata.storage_data.items() if index.fqn in kept}
    with (folder / ADDED_FILE).open("wb") as file:
        for key, value in added.items():
            item = _saved(value).getvalue()
            places[MetadataIndex(key)] = storage_info()(ADDED_FILE, file.tell(), len(item))  # words: kept
            file.write(item)
    described = {key: metadata.state_dict_metadata[key] for key in kept} | dict.fromkeys(added, BytesStorageMetadata())
    paths = {key: metadata.planner_data[key] for key in kept} | {key: tuple(key.split(".")) for key in added}
    whole = dataclasses.replace(metadata, state_dict_metadata=described, planner_data=paths, storage_data=places)
    (folder / layout.METADATA).write_bytes(metadata_bytes(whole))


if __name__ == "__main__":
    main()
