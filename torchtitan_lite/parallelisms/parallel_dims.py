"""The degrees of parallelism, and the arithmetic of ranks.

Ranks are numbered with the pipeline outermost and tensor parallelism, which communicates most often, innermost:
rank = ((pp * dp_replicate + ...) * dp_shard + ...) * tp + .... Everything except `build_mesh` is a function of these
four degrees.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torchtitan_lite.config.job_config import Parallelism
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import counted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The degrees in the order of the mesh's dimensions; str() names those above 1: "pp 2 x dp_shard 2"."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __str__(self) -> str:
        return _product({name: degree for name, degree in asdict(self).items() if degree > 1}) or "1 process"

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.pp * self.dp_degree * self.tp

    @property
    def dp_degree(self) -> int:
        """Number of ranks that take different data."""
        return self.dp_replicate * self.dp_shard

    def dp_rank(self, rank: int) -> int:
        """Return which of the `dp_degree` shares of the data `rank` takes."""
        return rank // self.tp % self.dp_degree

    def takes_data_first(self, rank: int) -> bool:
        """Return whether `rank` is the first one of the ranks that take the same data."""
        return rank % self.tp == 0 and self.pp_rank(rank) == 0

    def pp_rank(self, rank: int) -> int:
        """Return the pipeline rank of `rank`."""
        return rank // (self.tp * self.dp_degree)

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """Return a mesh with a named dimension for each degree above 1 and for `dp_shard`. **Collective**."""
        from torch.distributed.device_mesh import init_device_mesh  # The launcher has no torch when it needs degrees.

        dims = {name: degree for name, degree in asdict(self).items() if degree > 1 or name == "dp_shard"}
        return init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))

    def dp_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the submesh over which FSDP works: `dp_shard`, and before it `dp_replicate` if there are replicas."""
        return mesh["dp_replicate", "dp_shard"] if self.dp_replicate > 1 else mesh["dp_shard"]


def build_parallel_dims(config: Parallelism, world_size: int) -> ParallelDims:
    """Return the degrees of `config`, -1 replaced by the remaining ranks. Raise ConfigError if `world_size` differs."""
    degrees = {
        "pp": config.pipeline_parallel_degree,
        "dp_replicate": config.data_parallel_replicate_degree,
        "dp_shard": config.data_parallel_shard_degree,
        "tp": config.tensor_parallel_degree,
    }
    others = {name: degree for name, degree in degrees.items() if degree != -1}
    product = math.prod(others.values())
    if len(others) < len(degrees) and world_size % product == 0:
        return ParallelDims(**degrees | {"dp_shard": world_size // product})
    if product == world_size and others == degrees:
        return ParallelDims(**degrees)
    relation = "but this job has" if others == degrees else "which does not divide this job's"
    raise ConfigError(
        f"parallelism: {_product(others)} = {product}, {relation} {counted(world_size, 'process')}; start a fitting "
        "number of processes or change a degree (data_parallel_shard_degree = -1 takes what is left)."
    )


def _product(degrees: dict[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in degrees.items())
