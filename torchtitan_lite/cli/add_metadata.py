"""`add-metadata`: write DCP's `.metadata` into a checkpoint that was saved without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torchtitan_lite.cli.exit_codes import ExitCode
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.cli.target import resolve
from torchtitan_lite.config.argument_parser import Positional
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import readable_bytes
from torchtitan_lite.store import layout


@dataclass(frozen=True)
class AddMetadata:
    """Add .metadata, which DCP's own readers need, to a checkpoint that was saved without (see dcp_metadata).

    Nothing else in it changes; a job may run meanwhile.
    """

    step: Annotated[str, Positional("STEP")]
    """FOLDER:10, the folder of a checkpoint, or FOLDER for its latest one; on disk."""
    json: bool = False
    """Print JSON."""

    def run(self, screen: Screen) -> ExitCode:
        folder = resolve(self.step).folder
        if not isinstance(folder, Path):
            raise ConfigError(f"{folder} is in an object store; write a copy: convert {folder} OUT --layout dcp")
        from torchtitan_lite.checkpoint.converting.adding_metadata import add_metadata
        from torchtitan_lite.checkpoint.reading.derived_metadata import lacks_metadata
        from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder

        if not lacks_metadata(CheckpointFolder(folder)):
            if not (folder / layout.METADATA).is_file():
                raise ConfigError(f"{folder}: it was saved with {layout.METADATA}, which is missing; verify it")
            screen.show({"path": str(folder), "bytes": 0}, lambda: f"{folder} was saved with {layout.METADATA}")
            return ExitCode.FINE
        num_bytes = add_metadata(folder)
        text = f"Added {layout.METADATA} to {folder}: {readable_bytes(num_bytes)}"
        screen.show({"path": str(folder), "bytes": num_bytes}, lambda: text)
        return ExitCode.FINE
