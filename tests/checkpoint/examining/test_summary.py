"""Totals of contents, and rows of tensors that are alike."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torchtitan_lite.checkpoint.format.contents import Chunk, Contents, Item, StoredObject, StoredTensor
from torchtitan_lite.checkpoint.format.dtypes import DTYPES
from torchtitan_lite.examining.summary import bytes_by_file, matching, rows_of, state_parts


def tensor(*shape: int, dtype: str = "float32", files: tuple[str, ...] = ("__0_0.distcp",)) -> StoredTensor:
    """Return a tensor whose rows are divided equally over `files`."""
    chunks = []
    for number, file in enumerate(files):
        rows = shape[0] // len(files) if shape else 0
        offsets = (number * rows, *[0] * (len(shape) - 1)) if shape else ()
        chunks.append(Chunk(file, 0, offsets, (rows, *shape[1:]) if shape else ()))
    return StoredTensor(DTYPES[dtype], shape, chunks)


def names(tensors: dict[str, StoredTensor], *, folded: bool = True) -> dict[str, int]:
    return {row.name: row.num_tensors for row in rows_of(tensors, folded=folded)}


def test_tensors_that_differ_in_numbers_or_the_last_word_are_one_row() -> None:
    tensors = {f"model.layers.{i}.{name}.weight": tensor(4, 4) for i in range(12) for name in ("wq", "wk")}
    tensors |= {f"optimizer.state.norm.weight.{name}": tensor(4) for name in ("exp_avg", "exp_avg_sq")}
    tensors |= {f"optimizer.state.layers.{i}.wq.weight.step": tensor() for i in range(12)}
    tensors |= {f"rng.rank{rank}.torch": tensor(9, dtype="uint8") for rank in range(3)}
    assert names(tensors) == {
        "model.layers.*.wq.weight": 12,
        "model.layers.*.wk.weight": 12,
        "optimizer.state.norm.weight.*": 2,
        "optimizer.*.step": 12,
        "rng.rank*.torch": 3,
    }
    for row in rows_of(tensors, folded=True):
        assert set(matching(tensors, row.name)) >= {key for key in tensors if fnmatchcase(key, row.name)}
        assert len(matching(tensors, row.name)) == row.num_tensors, "the name of a row is a glob for --tensors"
        assert row.nbytes == sum(each.nbytes for each in matching(tensors, row.name).values())


def test_another_shape_or_dtype_is_another_row_under_its_own_name() -> None:
    tensors = {"model.0.weight": tensor(4, 2), "model.1.weight": tensor(2, 4), "model.2.weight": tensor(4, 2)}
    tensors["model.3.weight"] = tensor(4, 2, dtype="bfloat16")
    assert names(tensors) == {"model.*.weight": 2, "model.1.weight": 1, "model.3.weight": 1}
    assert names(tensors, folded=False) == dict.fromkeys(tensors, 1)


def test_parts_and_files_have_the_bytes_of_every_chunk_once() -> None:
    two = ("__0_0.distcp", "__1_0.distcp")
    contents = Contents(
        "c",
        {"model.a": tensor(4, 3, files=two), "model.b": tensor(2, dtype="int64"), "bare": tensor(6, files=two)},
        {"model.c": StoredObject(1), "lr": StoredObject(item=Item("__2_0.distcp", 0, 9))},
    )
    parts = {
        part.name: (part.num_tensors, part.num_elements, part.nbytes, part.num_objects)
        for part in state_parts(contents)
    }
    assert parts == {"model": (2, 14, 64, 1), "bare": (1, 6, 24, 0), "lr": (0, 0, 0, 1)}
    assert {name: dict(held) for name, held in bytes_by_file(contents).items()} == {
        "__0_0.distcp": {"model": 40, "bare": 12},
        "__1_0.distcp": {"model": 24, "bare": 12},
        "__2_0.distcp": {},
    }
