"""`bring-back`: restore the name of a checkpoint that was quarantined or abandoned.

A damaged one comes back only if every byte is again what was written; an abandoned one only if it is then visible.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.cli.writing_verbs import holding, recover_with_notes, store_to_write
from torchtitan_lite.config.address import is_address
from torchtitan_lite.config.argument_parser import Positional
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.examining.verification import check_set_aside
from torchtitan_lite.log import readable_bytes
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.protocol import SetAside
from torchtitan_lite.store.set_aside import refuse_harm


@dataclass(frozen=True)
class BringBack:
    """Restore the name of a checkpoint that was quarantined or abandoned."""

    folder: Annotated[str, Positional("FOLDER")]
    """A folder of checkpoints, on disk or as an address, or the dump folder of a run."""
    name: Annotated[str, Positional("NAME")]
    """The name in it, as ls shows it: step-10.corrupt, which is verified first, or step-10.abandoned-RUN."""
    leave_branch: bool = False
    """Abandon the branch that replaced it."""

    def run(self, screen: Screen) -> None:
        store = store_to_write(self.folder, screen)
        shelf, name = store.shelf, self._name_in(store.address)
        with holding(store, "bring-back") as lease:
            recover_with_notes(
                store, screen
            )  # First: after a crash the step may have its old name and still be abandoned.
            aside = shelf.find(name)
            refuse_harm(store, aside, shelf.in_the_way(aside), leave_branch=self.leave_branch)
            with screen.progress(f"verifying {aside.folder.name}", aside.manifest.nbytes) as advance:
                check_set_aside(aside, advance)
            lease.check()
            left = shelf.bring_back(aside)
            info = store.get(aside.step)
        latest = store.latest()
        is_latest = latest is not None and latest.step == aside.step and info.kind is CheckpointKind.FULL
        data = {
            "folder": store.address,
            "name": aside.folder.name,
            "step": aside.step,
            "run_id": aside.run_id,
            "set_aside": [path.name for path in left],
            "is_latest": is_latest,
        }
        screen.show(data, lambda: _brought_back_text(aside, [path.name for path in left], is_latest))

    def _name_in(self, folder: str) -> str:
        """Return the name, which a shell may have completed to a path. Raise ConfigError for one elsewhere."""
        path = Path(self.name)
        is_elsewhere = (
            self.name != f"{folder}/{path.name}"
            if is_address(folder)
            else path.parent.resolve() != Path(folder).resolve()
        )
        if path.name != self.name and is_elsewhere:
            raise ConfigError(f"{self.name} is not in {folder}: NAME is the name of a folder in FOLDER")
        return path.name


def _brought_back_text(aside: SetAside, left: list[str], is_latest: bool) -> str:
    lines = [f"{aside.folder.name} ({readable_bytes(aside.manifest.nbytes)}) is step {aside.step} again"]
    if left:
        lines.append(f"Set aside in its place: {', '.join(left)}")
    if is_latest:
        lines.append("It is the latest: the next start resumes from it")
    return "\n".join(lines)
