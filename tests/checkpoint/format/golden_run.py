"""The run whose checkpoints are kept in tests/golden/, one folder for each released version of the format.

`values` computes every value from its key, so a test knows what a checkpoint must hold without reading one.
scripts/make_golden_checkpoints.py runs this file with older versions of the package too, so it imports only what all
of them have.
"""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state.train_state import TrainState
from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig
from torchtitan_lite.store.format_version import FORMAT_VERSION
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import Manifest

GOLDEN = Path(__file__).parents[2] / "golden"
STEP = 7
WRITERS = {
    "one-process": 1,
    "two-ranks": 2,
    "five-ranks": 5,
    "without-metadata": 1,
    "with-records": 2,
}
"""Name of a folder to the number of processes that wrote its checkpoints."""
WRITTEN = dict.fromkeys(WRITERS, 7)
"""The version of the format in which these processes write today."""

PARAMETERS: dict[str, tuple[torch.dtype, tuple[int, ...], Placement]] = {
    "weight": (
        torch.float32,
        (5, 3),
        Shard(0),
    ),  # Of two ranks one has three rows, the other two.
    "brief": (torch.bfloat16, (4, 2), Shard(1)),
}
BUFFERS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "turned": (torch.float64, (3, 2)),  # Column-major in memory.
    "scale": (torch.float32, ()),
    "nothing": (torch.float32, (0, 3)),
    "count": (torch.int64, (4,)),
    "mask": (torch.bool, (5,)),
}
PLAIN_SINCE: dict[int, dict[str, Any]] = {
    7: {
        "position": STEP,
        "share": 0.625,
        "name": "golden \u00e9",
        "page": "a line of a text that takes more room\n" * 6,
        "absent": None,
        "on": True,
        "large": 0xABCDEF << 60,
        "least": -math.inf,
        "raw": b"\x00\xff",
        "pair": (1, (2.5, "x"), [3, None]),
        "nested": {"deeper": {"list": [1, {"two": 2}, (3,)]}},
        "typed": {1: "one", "1x": {}, True.__int__() + 1: {(1, "a"): 2.5, None: {}}, b"k": [{}, {"x": 1}]},
        "counted": Counter({30: 1, 80: 2}),
        "ordered": OrderedDict([("z", 1), ("a", {})]),
        "by_default": defaultdict(list, {3: [1]}),
        "hollow": [{}, {"a": [{}]}],
    },
}
"""The objects of the state `plain`, by the first version of the format that restores them with their types."""
NOT_RECORDED = ("model", "records_model", "recent_losses", "loss_window")
"""Fields of a train state that a checkpoint has only if the run records them."""


class GoldenModel(nn.Module):
    """Tensors of several kinds, with their values if `filled`, else zeros; sharded if there is a mesh."""

    def __init__(self, *, filled: bool, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        for name, (dtype, shape, placement) in PARAMETERS.items():
            self.register_parameter(name, nn.Parameter(_tensor(name, dtype, shape, filled, mesh, placement)))
        for name, (dtype, shape) in BUFFERS.items():
            tensor = _tensor(name, dtype, shape, filled)
            self.register_buffer(name, tensor.t().contiguous().t() if name == "turned" else tensor)


class Plain:
    """A `Stateful` of a tensor and of objects that JSON has no type for."""

    def __init__(self, version: int, *, filled: bool) -> None:
        self.state: dict[str, Any] = plain(version) if filled else {"tensor": torch.zeros(3, dtype=torch.int32)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class GoldenRun:
    """The run at step 7 if `filled`, else before it loads that step. With a mesh it is one of several ranks."""

    def __init__(
        self, folder: Path, version: int, *, filled: bool, mesh: DeviceMesh | None = None, **checkpoint: Any
    ) -> None:
        seed = 77 if filled else 0
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = GoldenModel(filled=filled, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5, weight_decay=0.25)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)
        self.train_state, self.plain = TrainState(), Plain(version, filled=filled)
        if filled:
            self._go_to_step(mesh)
        options: dict[str, Any] = {
            "enable_checkpoint": True,
            "preemption_signals": (),
            "digest_tensors": ("save",),
        }
        self.config = JobConfig(job=Job(dump_folder=str(folder)), checkpoint=Checkpoint(**options | checkpoint))
        self.manager = CheckpointManager(
            None,
            [self.model],
            [self.optimizer],
            [self.scheduler],
            {"train_state": self.train_state, "plain": self.plain},
            self.config,
        )

    def contents(self) -> dict[str, Any]:
        """Return the state of the run in the form of `expected`. **Collective** with a mesh."""
        moments = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            moments |= {f"{name}.{quantity}": _whole(tensor) for quantity, tensor in state.items()}
        group = self.optimizer.param_groups[0]
        return {
            "model": {name: _whole(tensor) for name, tensor in self.model.state_dict().items()},
            "moments": moments,
            "settings": {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad")},
            "scheduler": {
                key: self.scheduler.state_dict()[key] for key in ("step_size", "gamma", "base_lrs", "last_epoch")
            },
            "train_state": {k: v for k, v in vars(self.train_state).items() if k not in NOT_RECORDED},
            "plain": self.plain.state,
        }

    def _go_to_step(self, mesh: DeviceMesh | None) -> None:
        for name, parameter in self.model.named_parameters():
            dtype, shape, placement = PARAMETERS[name]
            moments = {key: values(f"{name}.{key}", dtype, shape) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(STEP)),
                **{key: _placed(tensor, mesh, placement) for key, tensor in moments.items()},
            }
        lr = 0.5 * 0.5 ** (STEP // 3)
        self.optimizer.param_groups[0]["lr"] = lr
        come_to = {"last_epoch": STEP, "_step_count": STEP + 1, "_last_lr": [lr]}
        self.scheduler.load_state_dict(self.scheduler.state_dict() | come_to)
        vars(self.train_state).update(expected(FORMAT_VERSION)["train_state"])


def expected(version: int) -> dict[str, Any]:
    """Return the contents of every golden checkpoint of the format `version`."""
    model = {name: values(name, dtype, shape) for name, (dtype, shape, _) in PARAMETERS.items()}
    moments: dict[str, Tensor] = {}
    for name, (dtype, shape, _) in PARAMETERS.items():
        moments[f"{name}.step"] = torch.tensor(float(STEP))
        moments |= {f"{name}.{key}": values(f"{name}.{key}", dtype, shape) for key in ("exp_avg", "exp_avg_sq")}
    steps = list(range(1, STEP + 1))
    return {
        "model": model | {name: values(name, dtype, shape) for name, (dtype, shape) in BUFFERS.items()},
        "moments": moments,
        "settings": {"lr": 0.125, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.25, "amsgrad": False},
        "scheduler": {"step_size": 3, "gamma": 0.5, "base_lrs": [0.5], "last_epoch": STEP},
        "train_state": {
            "step": STEP,
            "n_tokens_seen": 7169,
            "skipped_steps": 1,
            "run_seconds": 12.5,
            "productive_seconds": 10.25,
            "log_steps": steps,
            "global_avg_losses": [8.0 - step / 4 for step in steps],
            "global_max_losses": [9.0 - step / 4 for step in steps],
        },
        "plain": plain(version),
    }


def plain(version: int) -> dict[str, Any]:
    """Return the state `plain` of a checkpoint of the format `version`."""
    state: dict[str, Any] = {"tensor": values("plain.tensor", torch.int32, (3,))}
    for since, objects in PLAIN_SINCE.items():
        state |= objects if since <= version else {}
    return state


def values(key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the elements of the tensor `key`: eighths between -8 and 8, exact in every floating dtype, or integers."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 37 + zlib.crc32(key.encode())) % 127 - 63
    if dtype is torch.bool:
        return (numbers % 2 == 0).view(shape)
    return (numbers / 8 if dtype.is_floating_point else numbers).to(dtype).view(shape)


def save(folder: Path, mesh: DeviceMesh | None = None, writer: str = "") -> None:
    """Write this version's checkpoints into `folder`, as `writer`: checkpoint/step-7 and export/step-7. **Collective**.

    The writer "with-records" keeps a record of each rank, as otherwise only hundreds of ranks do.
    """
    options: dict[str, Any] = {"model_weights_only": True, "export_folder": "export", "export_dtype": "bfloat16"}
    if writer == "without-metadata":
        options["dcp_metadata"] = "never"
    run = GoldenRun(folder, FORMAT_VERSION, filled=True, mesh=mesh, **options)
    with records_from_rank(0) if writer == "with-records" else nullcontext(), run.manager:
        run.manager.save(STEP, force=True)


@contextmanager
def records_from_rank(number: int) -> Iterator[None]:
    """Let jobs of `number` ranks or more keep records, in the block."""
    from torchtitan_lite.store import rank_records

    before, rank_records.FROM_RANKS = rank_records.FROM_RANKS, number
    try:
        yield
    finally:
        rank_records.FROM_RANKS = before


def fix(folder: Path) -> None:
    """Set what differs from run to run in the manifest in `folder` (run id, time, dump folder) to constants."""
    path = folder / "manifest.json"
    manifest = Manifest.parse(path.read_bytes())
    config = manifest.extra["config"]
    config["job"]["dump_folder"] = "outputs"
    lineage = Lineage("golden")
    path.write_bytes(
        replace(manifest, created_at=1.0e9, lineage=lineage, extra=manifest.extra | {"config": config}).to_json()
    )


def _tensor(
    key: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    filled: bool,
    mesh: DeviceMesh | None = None,
    placement: Placement | None = None,
) -> Tensor:
    return _placed(values(key, dtype, shape) if filled else torch.zeros(shape, dtype=dtype), mesh, placement)


def _placed(whole: Tensor, mesh: DeviceMesh | None, placement: Placement | None) -> Tensor:
    return whole if mesh is None or placement is None else distribute_tensor(whole, mesh, [placement])


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
