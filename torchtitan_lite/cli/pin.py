"""`pin` and `unpin`: keep one checkpoint from removal, also while a job trains and removes others.

They need no lease: the file of pins is replaced in one rename, under a lock that a job takes, too, right before it
removes something; in an object store by a swap of the object that a removal swaps, too. So once `pin` has ended the
step is there and stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from torchtitan_lite.cli.named_checkpoint import resolve
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.config.argument_parser import Positional
from torchtitan_lite.errors import CheckpointError, CheckpointNotFound
from torchtitan_lite.store import layout
from torchtitan_lite.store.protocol import KeepsPins
from torchtitan_lite.stores import open_store

Step = Annotated[str, Positional("STEP")]


@dataclass(frozen=True)
class Pin:
    """Pin a checkpoint, so that no rule removes it (safe while a job is running)."""

    step: Step
    """FOLDER:10, the folder of a checkpoint, or FOLDER for its latest one."""

    def run(self, screen: Screen) -> None:
        root, step = _folder_and_step(self.step)
        store = open_store(root)
        pins = store.pins
        for folder in store.unmanaged():
            if layout.parse_step(folder.name) == step:
                raise CheckpointError(f"{folder} has no manifest, so no rule removes it and it needs no pin")
        with pins.changing() as pinned:
            store.get(step)
            was_pinned = step in pinned
            pinned.add(step)
        try:
            # Where the file system has no locks, a job may have removed it between its last look at the pins and ours.
            store.get(step)
        except CheckpointNotFound:
            with pins.changing() as pinned:
                pinned.discard(step)
            raise CheckpointError(f"step {step} of {root} was removed while it was being pinned") from None
        text = f"Step {step} of {root} was pinned already" if was_pinned else f"Pinned step {step} of {root}"
        screen.show(_pin_json(root, pins, step, changed=not was_pinned), lambda: text)


@dataclass(frozen=True)
class Unpin:
    """Unpin a checkpoint (safe while a job is running)."""

    step: Step
    """FOLDER:10, the folder of a checkpoint, or FOLDER for its latest one. It may be gone already."""

    def run(self, screen: Screen) -> None:
        root, step = _folder_and_step(self.step)
        pins = open_store(root).pins
        with pins.changing() as pinned:
            was_pinned = step in pinned
            pinned.discard(step)
        text = f"Unpinned step {step} of {root}" if was_pinned else f"Step {step} of {root} was not pinned"
        screen.show(_pin_json(root, pins, step, changed=was_pinned), lambda: text)


def _folder_and_step(spelling: str) -> tuple[str, int]:
    """Return the folder of checkpoints and the step that `spelling` means; the step need not be there."""
    try:
        target = resolve(spelling)
    except CheckpointNotFound as error:
        if error.step is None:
            raise
        return error.folder, error.step
    if not target.root or target.step is None:
        raise CheckpointError(f"{target.folder} has not the name of a step, so no rule removes it and it needs no pin")
    return target.root, target.step


def _pin_json(root: str, pins: KeepsPins, step: int, *, changed: bool) -> dict[str, Any]:
    return {"folder": root, "step": step, "changed": changed, "pinned": sorted(pins.read())}
