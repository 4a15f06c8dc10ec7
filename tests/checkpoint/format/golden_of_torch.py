"""The small run that each version of torch wrote into tests/golden/torch-X.Y/, and the tools that read it.

Two ranks of FSDP2 wrote `ours/step-7`, a full checkpoint, `ours.pt`, its weights as `torchtitan-lite export --format
torch` writes them, and `plain`, what torch's own `dcp.save` makes of the same state. Every value follows from its key,
as in `golden_run`.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.checkpoint.format.golden_run import GOLDEN, STEP, values
from torchtitan_lite.checkpoint import CheckpointManager, CheckpointReader
from torchtitan_lite.cli.app import main as command

SHAPES = {"weight": (5, 4)}
"""Of five rows one rank has three, the other two. A second parameter would make the folders twice as large."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def folder_of(version: str) -> Path:
    """Return the folder that the torch `version` wrote, as in "2.13.0+cpu"."""
    return GOLDEN / f"torch-{'.'.join(version.split('.')[:2])}"


def folders() -> list[Path]:
    """Return the folders of all versions, the oldest first."""
    return sorted(GOLDEN.glob("torch-*"), key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def write(target: Path, mesh: DeviceMesh) -> None:
    """Write the folder of the torch at hand. **Collective**."""
    model, optimizer = _run(mesh)
    _fill(model, optimizer, mesh)
    with _manager(model, optimizer, target / "ours") as manager:
        manager.save(STEP, force=True)
    state = {"state": get_optimizer_state_dict(model, optimizer)["state"], "lr": 0.5}
    dcp_save({"model": get_model_state_dict(model), "optimizer": state}, checkpoint_id=target / "plain")
    if mesh.get_rank() == 0:
        step = target / "ours" / f"step-{STEP}"
        assert command(["export", str(step), str(target / "ours.pt"), "--format", "torch"]) == 0


def weights() -> dict[str, Tensor]:
    """Return what each of the checkpoints has of the model."""
    return {name: values(name, torch.float32, shape) for name, shape in SHAPES.items()}


def moments() -> dict[str, Tensor]:
    """Return what each of the checkpoints has of the optimizer, as in "weight.exp_avg"."""
    return {f"{name}.{key}": values(f"{name}.{key}", torch.float32, SHAPES[name]) for name in SHAPES for key in MOMENTS}


def by_manager(folder: Path) -> None:
    """Resume from a copy of `folder`, as one process."""
    model, optimizer = _run()
    with tempfile.TemporaryDirectory() as scratch:
        copy = shutil.copytree(folder.parent, Path(scratch, "run"))
        with _manager(model, optimizer, copy) as manager:
            manager.load(STEP)
    _compare(model.state_dict(), weights())
    parameters = dict(model.named_parameters())
    found = {f"{name}.{key}": optimizer.state[parameters[name]][key] for name in SHAPES for key in MOMENTS}
    _compare(found, moments())


def by_reader(folder: Path) -> None:
    """Load with `dcp.load` and our reader, which takes folders of plain DCP too."""
    _load(CheckpointReader(folder))


def by_dcp(folder: Path) -> None:
    """Load with `dcp.load` alone."""
    _load(FileSystemReader(folder))


def by_dcp_to_torch(folder: Path) -> None:
    """Convert with DCP's tool, and read the result. It unpickles: these are our own files."""
    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(folder, Path(scratch, "x.pt"))
        state = torch.load(Path(scratch, "x.pt"), weights_only=False)
    _compare({name: state["model"][name] for name in SHAPES}, weights())
    optimizer = state["optimizer"]
    if "state" in optimizer:  # Ours is flat, as in "state.weight.exp_avg".
        optimizer = {f"state.{name}.{key}": optimizer["state"][name][key] for name in SHAPES for key in MOMENTS}
    _compare({key: optimizer[f"state.{key}"] for key in moments()}, moments())


def by_torch_load(file: Path) -> None:
    """Read an export with `torch.load`, which by default runs no code from it."""
    _compare(torch.load(file), weights())


TOOLS: dict[str, dict[str, tuple[Callable[[Path], None], str]]] = {
    "ours": {
        "our manager": (by_manager, f"ours/step-{STEP}"),
        "dcp.load": (by_dcp, f"ours/step-{STEP}"),
        "dcp_to_torch": (by_dcp_to_torch, f"ours/step-{STEP}"),
        "torch.load of an export": (by_torch_load, "ours.pt"),
    },
    "torch's": {
        "our reader": (by_reader, "plain"),
        "dcp.load": (by_dcp, "plain"),
        "dcp_to_torch": (by_dcp_to_torch, "plain"),
    },
}
"""What reads our checkpoints and torch's own: the function, and what it reads in the folder of a version."""


def outcome(read: Callable[[Path], None], path: Path) -> str:
    """Return "reads", or the error in one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns of a single process.
            read(path)
    except (
        Exception,
        CheckpointException,
    ) as error:  # DCP's is no Exception.
        last = str(error).strip().rpartition("\n")[2].replace(str(path), path.name)
        return last if isinstance(error, CheckpointException) else f"{type(error).__name__}: {last}"
    return "reads"


def report() -> dict[str, dict[str, str]]:
    """Return the outcome of each tool at each version's folder: {"torch-2.13": {"ours, dcp.load": "reads"}}."""
    tools = {f"{whose}, {tool}": tools[tool] for whose, tools in TOOLS.items() for tool in tools}
    return {
        folder.name: {tool: outcome(read, folder / path) for tool, (read, path) in tools.items()}
        for folder in folders()
    }


def _run(mesh: DeviceMesh | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 5, bias=False)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.25)


def _manager(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> CheckpointManager:
    return CheckpointManager.for_loop(model=model, optimizer=optimizer, folder=folder, preemption_signals=())


def _fill(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        state = {"step": torch.tensor(float(STEP))}
        for key in MOMENTS:
            state[key] = distribute_tensor(moments()[f"{name}.{key}"], mesh, parameter.placements)
        optimizer.state[parameter] = state
        with torch.no_grad():
            parameter.copy_(distribute_tensor(weights()[name], mesh, parameter.placements))


def _load(reader: Any) -> None:
    """Load with `dcp.load` from `reader`, and compare."""
    found = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    nested = {name: {key: torch.zeros(shape) for key in MOMENTS} for name, shape in SHAPES.items()}
    dcp_load({"model": found, "optimizer": {"state": nested}}, storage_reader=reader, no_dist=True)
    _compare(found, weights())
    _compare({f"{name}.{key}": nested[name][key] for name in SHAPES for key in MOMENTS}, moments())


def _compare(found: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    """Raise ValueError for the first key whose tensor is not as wanted."""
    if found.keys() != wanted.keys():
        raise ValueError(f"keys differ: {sorted(found.keys() ^ wanted.keys())}")
    for key, tensor in wanted.items():
        if not torch.equal(found[key].detach(), tensor):
            raise ValueError(f"{key} has other values")


if __name__ == "__main__":
    logging.disable()  # DCP logs the traceback of what it cannot read.
    json.dump(report(), sys.stdout)
