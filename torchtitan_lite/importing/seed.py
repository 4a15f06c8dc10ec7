"""Imported weights as a seed checkpoint: step 0 with a model alone, as `checkpoint.create_seed_checkpoint` makes it.

It is there when it is complete and was read back, with the digest of every block; any number of ranks begins a run from
it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtitan_lite import __version__
from torchtitan_lite.checkpoint.format.dtypes import dtype_name
from torchtitan_lite.checkpoint.format.structure import branch_of, encode_structure
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.resume.load_source import new_run
from torchtitan_lite.converting.dcp_folder import NewState
from torchtitan_lite.converting.exporting import Progress
from torchtitan_lite.converting.new_output import NewOutput
from torchtitan_lite.converting.rewriting import write_new_checkpoint
from torchtitan_lite.converting.streamed_file import NewTensor
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.examining.tensor_stream import TensorStream
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointKind, Manifest, Table

_FILE_BYTES = 5_000_000_000
"""The largest file, unless the caller wants another number of files."""
_MODEL = "model"


class Form(NamedTuple):
    """How the weights are stored."""

    dtype: str = "float32"
    """Of floating-point tensors; "" leaves each as it is."""
    num_files: int | None = None
    """None for files of up to 5 GB."""


def write_seed(
    out: Path, weights: Mapping[str, str], stream: TensorStream, form: Form, progress: Progress, extra: dict[str, Any]
) -> NewOutput:
    """Write `weights`, by name that in `stream`, as a seed checkpoint to the new folder `out`.

    `extra` goes into its manifest. Raises ConfigError before anything is written, what the stream raises, and OSError;
    whatever it raises, `out` is not there then.
    """
    refuse_out(out)
    state = _state(weights, stream, form.dtype)
    total = sum(tensor.num_bytes for tensor in state.tensors.values())
    num_files = form.num_files or max(1, -(-total // _FILE_BYTES))
    done = write_new_checkpoint(out, state, num_files, stream, progress, _seed_manifest(state, extra))
    return dataclasses.replace(done, num_bytes=total)


def refuse_out(out: Path) -> None:
    """Raise ConfigError if the name of `out` is that of a step other than 0: such a manifest counts as damaged."""
    step = layout.parse_step(out.name)
    if step:
        raise ConfigError(f"{out} is the name of step {step}, and imported weights are step 0: name OUT step-0")


def _state(weights: Mapping[str, str], stream: TensorStream, dtype: str) -> NewState:
    tensors = {}
    for name, source in weights.items():
        before = dtype_name(stream.contents.tensors[source].dtype)
        if before not in DTYPES:
            raise ConfigError(f"{source} is {before}, which PyTorch {torch.__version__} does not have")
        tensors[f"{_MODEL}.{name}"] = NewTensor.of(stream.contents, source, dtype)
    return NewState(tensors, {}, {f"{_MODEL}.{name}": (_MODEL, name) for name in weights})


def _seed_manifest(state: NewState, extra: dict[str, Any]) -> Manifest:
    names = [str(path[1]) for path in state.paths.values()]
    model = branch_of("dict", names, [None] * len(names))
    return Manifest(
        step=0,
        kind=CheckpointKind.FULL,
        created_at=time.time(),
        world_size=1,
        versions={"torchtitan_lite": __version__, "torch": torch.__version__},
        files={},
        lineage=new_run(),
        structure=Table({"root": encode_structure(branch_of("dict", [_MODEL], [model]))}),
        extra=extra,
    )
