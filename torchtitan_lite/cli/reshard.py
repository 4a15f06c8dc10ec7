"""`reshard`: the same checkpoint in another number of files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torchtitan_lite.cli.exit_codes import ExitCode
from torchtitan_lite.cli.new_place import new_place
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.cli.target import resolve
from torchtitan_lite.config.argument_parser import Positional
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import counted, readable_bytes


@dataclass(frozen=True)
class Reshard:
    """Rewrite a checkpoint with another number of files, of equal size.

    No load needs this: any number of ranks reads any number of files. Writes OUT only after verifying it.
    """

    step: Annotated[str, Positional("STEP")]
    """A checkpoint: its folder, FOLDER:10, or FOLDER for the latest."""
    out: Annotated[str, Positional("OUT")]
    """Output folder (name it step-N if a job must find it)."""
    files: int
    """The number of files with tensors."""
    json: bool = False
    """Print JSON."""

    def run(self, screen: Screen) -> ExitCode:
        if self.files < 1:
            raise ConfigError(f"--files {self.files}: expected at least 1")
        out = new_place(self.out, is_step=True)
        target = resolve(self.step)

        from torchtitan_lite.checkpoint.converting.rewriting import reshard
        from torchtitan_lite.checkpoint.examining.opened import open_checkpoint
        from torchtitan_lite.checkpoint.examining.presence import reporting_removal

        with reporting_removal(target.folder):
            done = reshard(open_checkpoint(target.folder), out, self.files, screen.progress)
        data = {
            "step": target.step,
            "source": str(target.folder),
            "out": str(out),
            "files": done.files,
            "tensors": done.num_tensors,
            "bytes": done.num_bytes,
        }
        size = f"{readable_bytes(done.num_bytes)} in {counted(self.files, 'file')} of tensors"
        text = f"Wrote {target.folder}\nto {out}: {size}"
        screen.show(data, lambda: text)
        return ExitCode.FINE
