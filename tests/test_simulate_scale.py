"""The simulation of many ranks: its plans are those of DCP, and its extrapolations agree with full counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FIGURES = {
    "first_gathered_bytes",
    "first_scattered_bytes",
    "results_gathered_bytes",
    "first_coordinator_seconds",
    "cached_coordinator_seconds",
    "metadata_bytes",
    "load_planning_seconds",
}

COMPARE_WITH_DCP = """
import os
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from scale_simulation.plans import Mesh, item_of, llama_shapes, state_of
from torchtitan_lite.models.llama.args import FLAVORS
from torchtitan_lite.models.llama.model import Transformer
from torchtitan_lite.parallelisms.parallelize_llama import apply_tensor_parallelism

args = FLAVORS["debugmodel"]


def compare(mesh, rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.size)
    with torch.device("meta"):
        model = Transformer(args)
    names = {"replicate": mesh.replicate, "shard": mesh.shard, "tensor": mesh.tensor}
    names = {name: size for name, size in names.items() if size > 1}
    devices = init_device_mesh("cpu", tuple(names.values()), mesh_dim_names=tuple(names))
    if mesh.tensor > 1:
        apply_tensor_parallelism(model, devices["tensor"])
    over = tuple(name for name in names if name != "tensor")
    fully_shard(model, mesh=devices[over])
    parameters = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    assert [(f"model.{n}", s) for n, s in llama_shapes(args)] == [(n, tuple(p.shape)) for n, p in parameters.items()]
    simulated = {tensor.fqn: tensor for tensor in state_of("debugmodel")}
    for item in create_default_local_save_plan(parameters, False).items:
        ours = item_of(simulated[item.index.fqn], rank, mesh)
        assert (ours.index, ours.type) == (item.index, item.type), (rank, ours, item)
        assert ours.tensor_data.chunk == item.tensor_data.chunk, (rank, ours, item)
        assert ours.tensor_data.size == item.tensor_data.size


# A process for each rank: DTensor caches its rank.
# More ranks than a norm has elements; two replicas; rows of tensor parallelism sharded again.
for mesh in (Mesh(1, 8), Mesh(1, 300), Mesh(2, 4), Mesh(1, 3, 2), Mesh(1, 100, 2)):
    for rank in (1, mesh.size - 2, mesh.size - 1):
        pid = os.fork()
        if pid == 0:
            compare(mesh, rank)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("compared")
"""


@pytest.mark.slow
def test_the_plan_of_a_rank_is_the_one_that_dcp_makes_of_its_tensors() -> None:
    assert _output_of(["-c", COMPARE_WITH_DCP]) == "compared\n"


COVER = """
import math
from scale_simulation.plans import box_in, held_by, mesh_of, outlines, state_of
from torchtitan_lite.checkpoint.format.dtypes import DTYPES
from torchtitan_lite.checkpoint.format.chunk_runs import chunk_mismatch
from torchtitan_lite.checkpoint.format.tensor_table import TensorTable
from torchtitan_lite.checkpoint.planning.joint_plan import JointPlan
from torchtitan_lite.store.manifest import Table

points = [("fsdp", 8), ("fsdp", 130), ("hsdp", 100), ("tp", 136), ("pp", 512), ("pp_tp", 1100), ("ep", 200)]
for layout, ranks in points:
    mesh = mesh_of(layout, ranks)
    state = state_of("debugmodel", mesh)
    own = list(outlines(state, mesh))
    plan = JointPlan()
    plan.answers([each.of(wanted) for each, wanted in zip(own, plan.ask([each.outline for each in own]))])
    table = TensorTable.parse(Table(dict(plan.description.tensors)), DTYPES)
    expected = {tensor.fqn: tensor for tensor in state if tensor.kind != "own"}
    assert table.keys() == expected.keys()
    boxes = {key: set() for key in expected}
    for rank in range(mesh.size):
        for tensor in held_by(rank, state, mesh):
            box = box_in(tensor, rank, mesh)
            if tensor.kind != "own" and 0 not in box.sizes:
                boxes[tensor.fqn].add(box)
    for key, tensor in table.items():
        assert not chunk_mismatch(tensor), (layout, key, chunk_mismatch(tensor))
        assert tensor.shape == expected[key].shape
        assert sorted((c.offsets, c.sizes) for c in tensor.chunks) == sorted(map(tuple, boxes[key])), (layout, key)
print("covered")
"""


@pytest.mark.slow
def test_in_every_layout_each_element_is_in_one_chunk_that_a_rank_has() -> None:
    assert _output_of(["-c", COVER]) == "covered\n"


EXTRAPOLATE = """
import json
from scale_simulation.costs import num_bytes, stock
from scale_simulation.plans import mesh_of, state_of
from simulate_scale import _extrapolated

state, mesh = state_of("debugmodel"), mesh_of("fsdp", 8)
print(json.dumps([_extrapolated(state, mesh, stock, 300, {}), stock(state, mesh)]))
"""


@pytest.mark.exhaustive
def test_a_cost_extrapolated_from_some_tensors_is_close_to_the_cost_of_all() -> None:
    extrapolated, counted = json.loads(_output_of(["-c", EXTRAPOLATE]))
    sizes = {name for name in counted if name.endswith("_bytes")}
    assert {"metadata_bytes", "first_gathered_bytes"} <= sizes
    for name in sizes:
        assert extrapolated[name] == pytest.approx(counted[name], rel=0.1), name


@pytest.mark.exhaustive
def test_the_command_prints_stock_dcp_and_ours_for_each_point(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    printed = _output_of([str(ROOT / "scripts" / "simulate_scale.py"), "--quick", "--json", str(path)])
    assert max(map(len, printed.splitlines())) <= 80
    lines = json.loads(path.read_text(encoding="utf-8"))["lines"]
    points = {(line["model"], line["layout"], line["ranks"]) for line in lines}
    assert {(*point, planner) for point in points for planner in ("dcp", "ours")} == {
        (line["model"], line["layout"], line["ranks"], line["planner"]) for line in lines
    }
    assert {line["is_extrapolated"] for line in lines} == {False, True}
    for line in lines:
        assert line["figures"].keys() >= FIGURES
        assert any("~" in cell for cell in _row(printed, line)) == line["is_extrapolated"]


def _row(printed: str, line: dict[str, Any]) -> list[str]:
    """Return the words of `line` in the table."""
    rows = [row.split() for row in printed.splitlines()]
    key = [line["model"][:5], line["layout"], str(line["ranks"]), line["planner"]]
    return next(row for row in rows if [row[0][:5], *row[1:4]] == key)


def _output_of(arguments: list[str]) -> str:
    scripts = str(ROOT / "scripts")
    environment = {**os.environ, "PYTHONPATH": f"{scripts}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
