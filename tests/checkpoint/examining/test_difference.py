"""What differs between two checkpoints, however they are sharded; values to the last bit, for every dtype."""

from __future__ import annotations

import collections
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.reading.foreign_folders import save_plain
from tests.checkpoint.small_run import SmallRun
from tests.checkpoint.with_manifest import add_manifest
from tests.store.filled import manifest_of
from torchtitan_lite.checkpoint.format.dtypes import DTYPES
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import CheckpointDamaged, CheckpointNotFound, CheckpointUnreadable
from torchtitan_lite.examining.difference import Difference, ValuesByDigest, compare_checkpoints, digest_of
from torchtitan_lite.examining.opened import OpenedCheckpoint, open_checkpoint
from torchtitan_lite.examining.presence import reporting_removal
from torchtitan_lite.examining.value_difference import EQUAL, ValueDifference, compare_values
from torchtitan_lite.store.manifest import Table

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"


def golden(ranks: str, kind: str = "checkpoint") -> OpenedCheckpoint:
    return open_checkpoint(GOLDEN / "format-7" / ranks / kind / "step-7")


def plain(folder: Path, **state: Any) -> OpenedCheckpoint:
    return open_checkpoint(save_plain(state, folder))


def values(a: OpenedCheckpoint, b: OpenedCheckpoint) -> dict[str, ValueDifference]:
    return dict(compare_values(a, b, compare_checkpoints(a, b).comparable))


def of_one(a: torch.Tensor, b: torch.Tensor, base: Path) -> ValueDifference:
    """Return how two stored tensors differ."""
    for number, tensor in enumerate((a, b)):
        shutil.rmtree(base / str(number), ignore_errors=True)
        write(base / str(number), tensor)
    found = values(open_checkpoint(base / "0"), open_checkpoint(base / "1"))
    return found["t"]


def write(folder: Path, tensor: torch.Tensor, **checkpoint: Any) -> None:
    """Write a checkpoint of ours with one tensor, by a run with these keys: DCP cannot save every dtype."""
    folder.mkdir(parents=True)
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    (folder / "__0_0.distcp").write_bytes(data)
    (folder / ".metadata").write_bytes(b"")
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    chunk = ["__0_0.distcp", 0, [0] * len(shape), shape]
    manifest = manifest_of(
        1,
        files={"__0_0.distcp": FileRecord.of(data), ".metadata": FileRecord.of(b"")},
        extra={"config": {"checkpoint": checkpoint}},
        tensors=Table({"t": {"dtype": dtype, "shape": shape, "chunks": [chunk], "path": ["t"]}}),
    )
    (folder / "manifest.json").write_bytes(manifest.to_json())


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_the_same_state_in_another_sharding_is_equal(kind: str) -> None:
    a, b = golden("one-process", kind), golden("two-ranks", kind)
    found = compare_checkpoints(a, b)
    # The one object that each rank has of its own, and what says how many ranks there were.
    assert not {key for key in (*found.only_in_a, *found.only_in_b) if "rank1" not in key}
    assert not found.tensors and not found.objects
    assert set(found.by_digest.equal) | set(found.by_digest.unknown) == set(found.comparable)
    assert not found.by_digest.different
    assert set(values(a, b).values()) == {EQUAL}
    assert {"topology", "ranks"} <= found.origin.keys()


def test_a_checkpoint_with_records_and_one_of_plain_dcp_are_compared(tmp_path: Path) -> None:
    ours = golden("two-ranks")
    shutil.copytree(ours.folder, tmp_path / "plain")
    (tmp_path / "plain" / "manifest.json").unlink()
    theirs = open_checkpoint(tmp_path / "plain")
    for other in (theirs, golden("with-records")):
        found = compare_checkpoints(ours, other)
        assert not found.objects, "JSON and pickles describe the same objects"
        assert set(values(ours, other).values()) == {EQUAL}
    assert not compare_checkpoints(ours, theirs).has_any


def test_keys_shapes_and_dtypes(tmp_path: Path) -> None:
    a = plain(tmp_path / "a", both=torch.zeros(2), dtype=torch.zeros(2), shape=torch.zeros(2), mine=torch.zeros(3), n=1)
    b = plain(
        tmp_path / "b",
        both=torch.zeros(2),
        dtype=torch.zeros(2).half(),
        shape=torch.zeros(3),
        m=2,
        theirs=torch.ones(()),
    )
    found = compare_checkpoints(a, b)
    assert found.only_in_a == {"mine": "float32 [3]", "n": "an object"}
    assert found.only_in_b == {"theirs": "float32 []", "m": "an object"}
    assert found.tensors == {
        "dtype": ("float32 [2]", "float16 [2]"),
        "shape": ("float32 [2]", "float32 [3]"),
    }
    assert (found.by_digest.unknown, set(found.comparable)) == (("both",), {"both", "dtype"})
    assert found.has_any
    assert values(a, b)["dtype"] == ValueDifference(False), "the same numbers, in another dtype"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 2),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("text", b"text"),
        ([1, 2], [2, 1]),
        ((1, 2), [1, 2]),
        ({"x": 1}, {"x": 1.0}),
        ({1}, {2}),
        (collections.OrderedDict(x=1), collections.OrderedDict(x=2)),
        (torch.float32, torch.float64),
    ],
    ids=repr,
)
def test_objects_that_differ_in_value_or_type(a: Any, b: Any, tmp_path: Path) -> None:
    in_a, in_b = plain(tmp_path / "a", o=(a,)), plain(tmp_path / "b", o=(b,))
    assert compare_checkpoints(in_a, in_b).objects.keys() == {"o"}
    assert not compare_checkpoints(in_a, plain(tmp_path / "c", o=(a,))).has_any


def test_a_tensor_inside_an_object_is_compared_by_its_bytes(tmp_path: Path) -> None:
    state = {"o": (torch.arange(4), "x")}
    a, b = plain(tmp_path / "a", **state), plain(tmp_path / "b", **state)
    assert not compare_checkpoints(a, b).has_any
    c = plain(tmp_path / "c", o=(torch.arange(4) + 1, "x"))
    assert compare_checkpoints(a, c).objects == {"o": ("a tuple of 2", "a tuple of 2")}


def test_nan_in_an_object_equals_nan(tmp_path: Path) -> None:
    a, b = plain(tmp_path / "a", o=(math.nan, 1)), plain(tmp_path / "b", o=(math.nan, 1))
    assert not compare_checkpoints(a, b).has_any


def test_plain_objects_have_one_digest_in_json_and_in_a_pickle(tmp_path: Path) -> None:
    state = {"o": ({"a": [1, -(1 << 70), None, True], 3: (2.5, "é", b"\x00\xff")},), "p": {"q": {}}, "inf": (math.inf,)}
    folder = save_plain(state, tmp_path / "a")
    shutil.copytree(folder, tmp_path / "b")
    add_manifest(tmp_path / "b")
    theirs, ours = open_checkpoint(folder), open_checkpoint(tmp_path / "b")
    assert any(stored.item is None for stored in ours.contents.objects.values())
    assert compare_checkpoints(theirs, ours).objects == {}


def test_a_damaged_object_is_damage_and_names_it(tmp_path: Path) -> None:
    a, b = plain(tmp_path / "a", o=(1, 2)), plain(tmp_path / "b", o=(1, 3))
    stored = b.contents.objects["o"]
    assert stored.item is not None
    (tmp_path / "b" / stored.item.file).write_bytes(bytes(stored.item.offset + stored.item.length))
    with pytest.raises(CheckpointDamaged, match=r"the item of o is not what torch\.save writes"):
        compare_checkpoints(a, b)
    assert digest_of(a.folder, "o", a.contents.objects["o"])[1] == "(1, 2)"


def test_containers_of_another_type_and_empty_ones(tmp_path: Path) -> None:
    def saved(name: str, state: dict[str, Any]) -> OpenedCheckpoint:
        class Extra:
            def state_dict(self) -> dict[str, Any]:
                return state

            def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

        run = SmallRun(tmp_path / name, interval=1, states={"extra": Extra()}).finished(1)
        return open_checkpoint(run.root / "step-1")

    a = saved("a", {"x": {"n": 1}, "empty": {}, "list": [1, {}]})
    b = saved("b", {"x": collections.OrderedDict(n=1), "list": [1]})
    assert compare_checkpoints(a, b).containers == {
        "extra.x": ("dict", "OrderedDict"),
        "extra.empty": ("dict", "-"),
        "extra.list": ("list", "-"),  # without a container in it, it is an object
    }
    assert not compare_checkpoints(a, a).has_any


def test_digests_say_which_values_differ_without_reading_them(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, interval=1, digest_tensors=("save",)).finished(2)
    a, b = (open_checkpoint(run.root / f"step-{step}") for step in (1, 2))
    found = compare_checkpoints(a, b)
    assert not found.by_digest.unknown
    assert "model.first.weight" in found.by_digest.different and "rng.rank0.python" in found.by_digest.equal
    read = values(a, b)
    assert {key for key, value in read.items() if not value.is_bitwise_equal} == found.by_digest.different


NUMBERS = {
    "bool": (0, 1, 1.0),
    **dict.fromkeys(("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"), (1, 4, 3.0)),
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64", "complex64", "complex128"), (1, 1.5, 0.5)),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), (1, 1.5, 0.5)),
    "float8_e8m0fnu": (1, 4, 3.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_difference_of_every_dtype(dtype: str, tmp_path: Path) -> None:
    if dtype == "complex32":
        a, b = (torch.tensor([1.0, 0.0, 2.0, x]).half().view(torch.complex32) for x in (0.0, 0.5))
        largest = 0.5
    elif dtype == "float4_e2m1fn_x2":
        a, b = (torch.tensor([0x11, x], dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for x in (0x21, 0x79))
        largest = 6.0 - 1.0  # the high half; the low one goes from 0.5 to -0.5
    else:
        low, high, largest = NUMBERS[dtype]
        a, b = torch.full((3, 5), low), torch.full((3, 5), low)
        b = b.double().index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(float(high)).double())
        a, b = a.double().to(getattr(torch, dtype)), b.to(getattr(torch, dtype))
    found = of_one(a, b, tmp_path)
    assert not found.is_bitwise_equal
    assert found.max_abs == largest
    assert found.num_different == (2 if dtype.startswith("float4") else 1)
    assert of_one(a, a, tmp_path) == EQUAL


def test_integers_that_float64_does_not_have(tmp_path: Path) -> None:
    a = torch.tensor([2**60, -(2**63)])
    assert of_one(a, a + torch.tensor([1, 0]), tmp_path).max_abs == 1
    assert of_one(a, torch.tensor([2**60, 2**63 - 1]), tmp_path).max_abs == 2.0**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_nan_and_infinity(dtype: torch.dtype, tmp_path: Path) -> None:
    a = torch.tensor([math.nan, math.inf, -math.inf, 1.0], dtype=dtype)
    assert of_one(a, a.clone(), tmp_path) == EQUAL
    b = a.clone()
    b[3] = 2
    assert of_one(a, b, tmp_path) == ValueDifference(False, 1.0, 1), "equal NaN and infinities count as equal"
    b[1] = 3
    assert of_one(a, b, tmp_path) == ValueDifference(False, math.inf, 2)
    b[0] = 3
    found = of_one(a, b, tmp_path)
    assert math.isnan(found.max_abs) and found.num_different == 3 and found.exceeds(1e9)


def test_zeros_of_another_sign_are_other_bits_and_equal_numbers(tmp_path: Path) -> None:
    found = of_one(torch.zeros(3), -torch.zeros(3), tmp_path)
    assert found == ValueDifference(False, 0.0, 0)
    assert found.exceeds(0) and not found.exceeds(1e-9)


@pytest.mark.parametrize(("atol", "exceeds"), [(0, True), (0.1, True), (0.25, False), (1, False)])
def test_a_tolerance(atol: float, exceeds: bool) -> None:
    assert ValueDifference(False, 0.25, 1).exceeds(atol) is exceeds
    assert not EQUAL.exceeds(atol)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...], tmp_path: Path) -> None:
    assert of_one(torch.ones(shape), torch.ones(shape), tmp_path) == EQUAL
    if 0 not in shape:
        assert of_one(torch.ones(shape), torch.zeros(shape), tmp_path) == ValueDifference(False, 1.0, 1)


def test_a_tensor_of_many_slices_in_another_cut(tmp_path: Path) -> None:
    tensor = torch.rand(9 << 20)  # 36 MiB
    other = tensor.clone()
    other[8 << 20] += 2
    a, b = plain(tmp_path / "a", t=tensor), plain(tmp_path / "b", t=other)
    seen: list[int] = []
    [(key, found)] = compare_values(a, b, ["t"], seen.append)
    assert key == "t" and found.num_different == 1 and found.max_abs == pytest.approx(2)
    assert sum(seen) == 2 * 36 << 20 and len(seen) > 2


def test_a_checkpoint_that_is_removed_or_replaced_meanwhile_is_no_damage(tmp_path: Path) -> None:
    a, b = plain(tmp_path / "a", t=torch.rand(9)), plain(tmp_path / "b", t=torch.rand(9))
    gone = "it was removed or replaced while it was read"
    with pytest.raises(CheckpointNotFound, match=gone), reporting_removal(a.folder, b.folder, always=True):
        (b.folder / ".metadata").unlink()
        shutil.copy(a.folder / ".metadata", b.folder / ".metadata")
    with pytest.raises(CheckpointNotFound, match=gone), reporting_removal(a.folder, b.folder, always=True):
        shutil.rmtree(b.folder)
        list(compare_values(a, b, ["t"]))
    with pytest.raises(CheckpointUnreadable), reporting_removal(a.folder, b.folder, always=True):
        list(compare_values(a, b, ["t"]))


def test_equal_checkpoints_are_compared_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from torchtitan_lite.examining.difference import compare_checkpoints\n"
        "from torchtitan_lite.examining.opened import open_checkpoint\n"
        "a, b = (open_checkpoint(Path(folder)) for folder in sys.argv[1:])\n"
        "found = compare_checkpoints(a, b)\n"
        "assert 'numpy' not in sys.modules and 'torch' not in sys.modules\n"
        "from torchtitan_lite.examining.value_difference import compare_values\n"
        "assert all(value.is_bitwise_equal for _, value in compare_values(a, b, found.comparable))\n"
        "sys.exit('torch' in sys.modules)"
    )
    folders = [str(golden("one-process").folder), str(golden("two-ranks").folder)]
    assert subprocess.run([sys.executable, "-c", code, *folders], cwd=ROOT, check=False).returncode == 0


def test_a_difference_of_nothing_is_none() -> None:
    assert not Difference({}, {}, {}, {}, {}, {}).has_any
    assert Difference({}, {}, {}, {}, {}, {}, by_digest=ValuesByDigest(different=frozenset("a"))).has_any
