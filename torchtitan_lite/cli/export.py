"""`export`: the weights of a checkpoint, for other tools."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from torchtitan_lite.cli.exit_codes import ExitCode
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.cli.target import local, resolve
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import readable_bytes

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class Export:
    """Write the weights of a checkpoint in another format, for other tools.

    The checkpoint may be ours, plain DCP's or torchtitan's, full or weights-only. OUT appears when it is whole and was
    read back.
    """

    step: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STEP")]
    """A checkpoint: its folder, FOLDER:10, or FOLDER for the latest."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The folder to make (safetensors, dcp) or the file (torch; safetensors if it is named *.safetensors)."""
    format: Literal["safetensors", "torch", "dcp"] = "safetensors"
    """safetensors: files with an index. torch: one file for torch.load. dcp: a folder for dcp.load."""
    dtype: Literal["", "float32", "float16", "bfloat16"] = ""
    """Cast floating-point tensors to it; without it, each keeps its own."""
    max_shard_size: str = ""
    """The largest file, as 5GB or 500MiB; of safetensors 5GB by default."""
    include: str = ""
    """Globs of the model's names, with commas: only these."""
    exclude: str = ""
    """Globs of the model's names, with commas: not these."""
    json: bool = False
    """Print JSON."""

    def run(self, screen: Screen) -> ExitCode:
        most = num_bytes(self.max_shard_size) if self.max_shard_size else None
        out = local(self.out)
        target = resolve(self.step)

        from torchtitan_lite.checkpoint.converting.exporting import Wanted, export
        from torchtitan_lite.checkpoint.examining.opened import open_checkpoint
        from torchtitan_lite.checkpoint.examining.presence import unless_gone

        wanted = Wanted(self.format, self.dtype, most, self.include, self.exclude)
        with unless_gone(target.folder):
            done = export(open_checkpoint(target.folder), out, wanted, screen.progress)
        data = {
            "step": target.step,
            "source": str(target.folder),
            "out": str(out),
            "format": self.format,
            "dtype": self.dtype or None,
            "files": done.files,
            "tensors": done.num_tensors,
            "bytes": done.num_bytes,
        }
        screen.show(data, lambda: _text(target.folder, out, done.files, done.num_tensors, done.num_bytes))
        return ExitCode.FINE


def num_bytes(text: str) -> int:
    """Return the number of bytes that `text`, such as "5GB", means. Raise ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper().removesuffix("B") + "B" if match[2] else "") if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise ConfigError(f"--max-shard-size {text!r} is no size: expected a number with a unit, as 5GB or 500MiB")
    return size


def _text(source: Path, out: Path, files: list[str], num_tensors: int, size: int) -> str:
    which = "1 file" if len(files) == 1 else f"{len(files)} files"
    return f"Exported {num_tensors} tensors of {source}\nto {out}: {readable_bytes(size)} in {which}"
