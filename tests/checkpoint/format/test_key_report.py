"""The report of differences between a checkpoint and a run."""

from __future__ import annotations

import torch

from torchtitan_lite.checkpoint.format.chunk_runs import StoredTensor
from torchtitan_lite.checkpoint.format.key_report import SHOWN, KeyReport, compare_tensors

FP32 = torch.zeros(2, 3)


def test_equal_names_shapes_and_dtypes_are_no_difference() -> None:
    report = compare_tensors({"a": FP32, "b": torch.zeros(())}, {"a": torch.ones(2, 3), "b": torch.ones(())})
    assert not report
    assert str(report) == ""


def test_each_kind_of_difference_is_named_with_both_sides() -> None:
    expected = {"gone": FP32, "shape": FP32, "dtype": FP32, "both": FP32}
    found = {"shape": torch.zeros(3, 2), "dtype": FP32.long(), "both": torch.zeros(1).bool(), "new": FP32}
    report = compare_tensors(expected, found)
    assert report.missing == ["gone"]
    assert report.unexpected == ["new"]
    assert report.mismatched == {
        "shape": "shape [3, 2] in the checkpoint, [2, 3] expected",
        "dtype": "dtype torch.int64 in the checkpoint, torch.float32 expected",
        "both": "shape [1] in the checkpoint, [2, 3] expected; "
        "dtype torch.bool in the checkpoint, torch.float32 expected",
    }


def test_a_report_reads_as_three_lists() -> None:
    report = KeyReport(missing=["a", "b"], unexpected=["c"], mismatched={"d": "why"})
    assert str(report).splitlines() == [
        "  missing in the checkpoint (2):",
        "    a",
        "    b",
        "  unexpected in the checkpoint (1):",
        "    c",
        "  different (1):",
        "    d: why",
    ]


def test_a_long_report_is_cut_and_says_how_much_is_not_shown() -> None:
    lines = str(KeyReport(missing=[f"layer.{i}" for i in range(SHOWN + 5)])).splitlines()
    assert len(lines) == SHOWN + 2
    assert lines[-1] == "    ... and 5 more"


def test_cast_allows_another_floating_dtype_and_nothing_else() -> None:
    found = {"a": FP32.bfloat16()}
    assert compare_tensors({"a": FP32}, found)
    assert not compare_tensors({"a": FP32}, found, cast=True)
    assert compare_tensors({"a": FP32.long()}, found, cast=True)
    assert compare_tensors({"a": torch.zeros(3, 2)}, found, cast=True)


def test_a_tensor_that_is_not_in_memory_is_compared_by_shape_and_dtype() -> None:
    assert not compare_tensors({"a": FP32}, {"a": StoredTensor(torch.float32, (2, 3), ())})
    assert compare_tensors({"a": FP32}, {"a": StoredTensor(torch.float64, (2, 3), ())}).mismatched.keys() == {"a"}
