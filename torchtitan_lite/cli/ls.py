"""`ls`: the checkpoints in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from torchtitan_lite.cli.exit_codes import ExitCode
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.cli.target import folder_of_checkpoints
from torchtitan_lite.store.store import CheckpointStore


@dataclass(frozen=True)
class Ls:
    """List the checkpoints in a folder."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A folder of checkpoints, or the dump folder of a run."""
    json: bool = False
    """Print JSON."""

    def run(self, screen: Screen) -> ExitCode:
        root = folder_of_checkpoints(self.folder)
        steps = [info.step for info in CheckpointStore(root).committed()]
        screen.show({"steps": steps}, lambda: "\n".join(map(str, steps)))
        return ExitCode.FINE
