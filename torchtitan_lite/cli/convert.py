"""`convert`, `reshard` and `add-metadata`: a checkpoint in another layout, in other files, or with `.metadata`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from torchtitan_lite.cli.named_checkpoint import resolve
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.cli.writing_verbs import new_place
from torchtitan_lite.config.argument_parser import Positional
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.examining.opened import open_checkpoint
from torchtitan_lite.examining.presence import reporting_removal
from torchtitan_lite.log import counted, readable_bytes
from torchtitan_lite.store import layout
from torchtitan_lite.store.place import Place, on_disk

if TYPE_CHECKING:
    from torchtitan_lite.converting.new_output import NewOutput


@dataclass(frozen=True)
class Convert:
    """Convert a checkpoint to another tool's layout, or from one to ours.

    Every tensor keeps its bits, and the checkpoint does not change. Writes OUT only after verifying it.
    """

    step: Annotated[str, Positional("STEP")]
    """A checkpoint: its folder, FOLDER:10, or FOLDER for the latest."""
    out: Annotated[str, Positional("OUT")]
    """Output folder (name it step-N if a job must find it)."""
    layout: Literal["dcp", "torchtitan", "ours"] = "dcp"
    """dcp: without our manifest. torchtitan: for the manager of torchtitan 0.3. ours: with manifest and digests."""
    optimizer: Literal["flat", "nested"] = "flat"
    """With --layout dcp. flat: as torch's flatten_optimizer_state_dict=True. nested: as get_state_dict without it."""
    dp_ranks: int = 0
    """With --layout torchtitan: data-parallel ranks of its job; 0: as many as torchtitan saved the data of, else 1."""

    def run(self, screen: Screen) -> None:
        if self.dp_ranks < 0 or (self.dp_ranks and self.layout != "torchtitan"):
            raise ConfigError(f"--dp-ranks {self.dp_ranks}: expected at least 1, with --layout torchtitan")
        if self.optimizer == "nested" and self.layout != "dcp":
            raise ConfigError("--optimizer nested: expected --layout dcp")
        out = new_place(self.out, is_step=True)
        target = resolve(self.step)

        from torchtitan_lite.converting.rewriting import convert

        with reporting_removal(target.folder):
            layout = "dcp, nested" if self.optimizer == "nested" else self.layout
            done = convert(open_checkpoint(target.folder), out, layout, screen.progress, dp_ranks=self.dp_ranks)
        data = {"step": target.step, "source": str(target.folder), "out": str(out), "layout": self.layout}
        data |= done.to_json() | {"left_out": done.notes}
        screen.show(data, lambda: _converted_text(target.folder, out, done))


def _converted_text(source: Place, out: Path, done: NewOutput) -> str:
    text = f"Converted {source}\nto {out}: {counted(done.num_tensors, 'tensor')}, {readable_bytes(done.num_bytes)}"
    if not done.notes:
        return text
    # Many keys of a few states.
    states = Counter(key.partition(".")[0] for key in done.notes)
    keys = {state: f" ({count} of its keys)" for state, count in states.items() if state not in done.notes}
    names = ", ".join(f"{state}{keys.get(state, '')}" for state in states)
    return f"{text}\nLeft out, because the layout cannot hold it: {names}"


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

    def run(self, screen: Screen) -> None:
        if self.files < 1:
            raise ConfigError(f"--files {self.files}: expected at least 1")
        out = new_place(self.out, is_step=True)
        target = resolve(self.step)

        from torchtitan_lite.converting.rewriting import reshard_checkpoint

        with reporting_removal(target.folder):
            done = reshard_checkpoint(open_checkpoint(target.folder), out, self.files, screen.progress)
        data = {"step": target.step, "source": str(target.folder), "out": str(out), **done.to_json()}
        size = f"{readable_bytes(done.num_bytes)} in {counted(self.files, 'file')} of tensors"
        text = f"Wrote {target.folder}\nto {out}: {size}"
        screen.show(data, lambda: text)


@dataclass(frozen=True)
class AddMetadata:
    """Add .metadata, which DCP's own readers need, to a checkpoint that was saved without (see dcp_metadata).

    Nothing else in it changes; a job may run meanwhile.
    """

    step: Annotated[str, Positional("STEP")]
    """FOLDER:10, the folder of a checkpoint, or FOLDER for its latest one; on disk."""

    def run(self, screen: Screen) -> None:
        folder = on_disk(resolve(self.step).folder, "; write a copy: convert {place} OUT --layout dcp")
        from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
        from torchtitan_lite.converting.rewriting import add_metadata
        from torchtitan_lite.examining.derived_metadata import lacks_metadata

        if lacks_metadata(CheckpointFolder(folder)):
            num_bytes = add_metadata(folder)
            text = f"Added {layout.METADATA} to {folder}: {readable_bytes(num_bytes)}"
        elif (folder / layout.METADATA).is_file():
            num_bytes, text = 0, f"{folder} was saved with {layout.METADATA}"
        else:
            raise ConfigError(f"{folder}: it was saved with {layout.METADATA}, which is missing; verify it")
        screen.show({"path": str(folder), "bytes": num_bytes}, lambda: text)
