"""`diff`: what differs between two checkpoints?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

from torchtitan_lite.cli.exit_codes import ExitCode
from torchtitan_lite.cli.named_checkpoint import resolve_any
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.config.argument_parser import Option, Positional
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.examining.difference import Difference, compare_checkpoints
from torchtitan_lite.examining.opened import OpenedCheckpoint, open_checkpoint
from torchtitan_lite.examining.presence import reporting_removal
from torchtitan_lite.log import counted
from torchtitan_lite.store.manifest_fields import topology_in_words

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from torchtitan_lite.examining.value_difference import ValueDifference

_SHOWN = 12
"""Lines under each heading."""
_GAP = 3
"""Columns between two columns."""
_SMALL_BYTES = 64 << 20
"""Read faster than torch is imported, so its progress would mislead."""


@dataclass(frozen=True)
class Diff:
    """Compare two checkpoints, however each of them is sharded.

    Compares names, shapes, dtypes, containers and objects; values by the
    digests in the manifests, if they have some, or with --values by reading
    them. Exits with 0 if the states are equal, with 4 if they differ. Step,
    run, configuration and the clocks of the runs are listed, but do not count.
    """

    a: Annotated[str, Positional("A")]
    """A checkpoint."""
    b: Annotated[str, Positional("B")]
    """Another one."""
    values: bool = False
    """Read the values: largest difference of each tensor."""
    atol: Annotated[float, Option("NUMBER")] = 0.0
    """Largest difference of two values that counts as equal; implies --values."""

    def run(self, screen: Screen) -> ExitCode:
        if not self.atol >= 0 or math.isinf(self.atol):
            raise ConfigError(f"--atol: expected a number of at least 0, found {self.atol}")
        a, b = resolve_any(self.a).folder, resolve_any(self.b).folder
        with reporting_removal(a, b, always=True):
            opened_a, opened_b = open_checkpoint(a), open_checkpoint(b)
            result = _Result(opened_a, opened_b, compare_checkpoints(opened_a, opened_b), self.atol)
            if self.values or self.atol:
                _compare_values(result, screen)
        screen.show(result.to_json(), lambda: _rendered(result))
        return ExitCode.DIFFERENT if result.is_different else ExitCode.FINE


@dataclass
class _Result:
    a: OpenedCheckpoint
    b: OpenedCheckpoint
    difference: Difference
    atol: float
    values: dict[str, ValueDifference] | None = None
    """Of the tensors that were read; None without --values."""
    far: dict[str, ValueDifference] = field(default_factory=dict)
    """Those of them that count as different."""
    clocks: dict[str, ValueDifference] = field(default_factory=dict)
    """Of the clocks, which do not count; empty without --values."""

    @property
    def is_different(self) -> bool:
        if self.values is None:
            return self.difference.has_any
        return self.difference.is_beyond_values or bool(self.far)

    def to_json(self) -> dict[str, Any]:
        found = self.difference
        return {
            "a": str(self.a.folder),
            "b": str(self.b.folder),
            "equal": not self.is_different,
            "only_in_a": list(found.only_in_a),
            "only_in_b": list(found.only_in_b),
            "tensors": _sides(found.tensors),
            "containers": _sides(found.containers),
            "objects": _sides(found.objects),
            "values": {
                "equal_by_digest": len(found.by_digest.equal),
                "different_by_digest": sorted(found.by_digest.different),
                "without_digest": len(found.by_digest.unknown),
                "atol": self.atol,
                "read": None if self.values is None else {key: _value_json(each) for key, each in self.values.items()},
                "different": sorted(self.far),
            },
            "clocks": sorted(name for name, *_ in _clock_rows(self)),
            "origin": _sides(found.origin),
        }


def _compare_values(result: _Result, screen: Screen) -> None:
    from torchtitan_lite.examining.value_difference import compare_values

    keys = [key for key in result.difference.comparable if key not in result.difference.by_digest.equal]
    num_bytes = sum(checkpoint.contents.tensors[key].nbytes for key in keys for checkpoint in (result.a, result.b))
    progress = screen.progress("Comparing", num_bytes) if num_bytes > _SMALL_BYTES else nullcontext(lambda count: None)
    with progress as advance:
        found = dict(compare_values(result.a, result.b, keys, advance))
    result.clocks = {key: found.pop(key) for key in result.difference.clocks if key in found}
    result.values = found
    result.far = {
        key: value
        for key, value in result.values.items()
        # Another dtype is a difference of its own, and cannot have the same bits.
        if key not in result.difference.tensors and value.exceeds(result.atol)
    }


def _sides(pairs: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, str]]:
    return {name: {"a": a, "b": b} for name, (a, b) in pairs.items()}


def _value_json(value: ValueDifference) -> dict[str, Any]:
    # JSON has neither NaN nor infinity.
    largest = value.max_abs if math.isfinite(value.max_abs) else str(value.max_abs)
    return {"bitwise_equal": value.is_bitwise_equal, "max_abs": largest, "num_different": value.num_different}


def _rendered(result: _Result) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    found = result.difference
    parts: list[RenderableType] = [f"A  {result.a.folder}", f"B  {result.b.folder}"]
    sections = (
        ("Only in A", [*found.only_in_a.items()]),
        ("Only in B", [*found.only_in_b.items()]),
        ("Another dtype or shape (A, B)", _form_rows(result)),
        ("Another container (A, B)", _table_rows(found.containers)),
        ("Other objects (A, B)", _table_rows(found.objects)),
        ("Other values", _value_rows(result)),
        ("Clocks of the runs, which do not count", _clock_rows(result)),
        (
            "Where they come from, which does not count (A, B)",
            [(name, *map(topology_in_words, sides)) for name, sides in found.origin.items()],
        ),
    )
    for title, rows in sections:
        if rows:
            parts += ["", Text(f"{title}: {len(rows)}", style="bold"), *_shortened_table(rows)]
    return Group(*parts, "", *_diff_summary(result))


def _table_rows(pairs: Mapping[str, tuple[str, str]]) -> list[tuple[str, ...]]:
    return [(name, *sides) for name, sides in pairs.items()]


def _form_rows(result: _Result) -> list[tuple[str, ...]]:
    values = result.values or {}
    return [
        (*row, _value_difference_text(values[row[0]])[0]) if row[0] in values else row
        for row in _table_rows(result.difference.tensors)
    ]


def _value_rows(result: _Result) -> list[tuple[str, ...]]:
    if result.values is None:
        return [(key, "another digest") for key in sorted(result.difference.by_digest.different)]
    # The largest first; NaN before all.
    order = sorted(result.far.items(), key=lambda item: (not math.isnan(item[1].max_abs), -item[1].max_abs, item[0]))
    return [(key, *_value_difference_text(value)) for key, value in order]


def _clock_rows(result: _Result) -> list[tuple[str, ...]]:
    if result.values is None:
        return [(key, "another digest") for key in sorted(result.difference.by_digest.different_clocks)]
    return [
        (key, f"by {value.max_abs:.3g} s") for key, value in sorted(result.clocks.items()) if not value.is_bitwise_equal
    ]


def _value_difference_text(value: ValueDifference) -> tuple[str, str]:
    if not value.num_different:
        return "the same numbers", "in other bits"
    largest = "NaN on one side" if math.isnan(value.max_abs) else f"by up to {value.max_abs:.3g}"
    return largest, counted(value.num_different, "element")


def _shortened_table(rows: Sequence[tuple[str, ...]]) -> list[RenderableType]:
    from rich.padding import Padding

    parts: list[RenderableType] = [_Columns(rows[:_SHOWN])]
    if len(rows) > _SHOWN:
        parts.append(f"... and {len(rows) - _SHOWN} more; --json has all of them")
    return [Padding(part, (0, 0, 0, 2)) for part in parts]


@dataclass
class _Columns:
    """Rows in columns; on a narrow screen, each name on a line of its own."""

    rows: Sequence[tuple[str, ...]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        columns = zip_longest(*self.rows, fillvalue="")
        if sum(max(map(len, column)) + _GAP for column in columns) - _GAP > options.max_width:
            for name, *cells in self.rows:
                yield Text(name, overflow="fold")
                yield Padding((" " * _GAP).join(cells), (0, 0, 0, 2))
            return
        table = Table.grid(padding=(0, _GAP, 0, 0))
        for row in self.rows:
            table.add_row(*row)
        yield table


def _diff_summary(result: _Result) -> list[str]:
    found, lines = result.difference, list[str]()
    by_digest = found.by_digest
    if result.values is not None:
        same = sum(not value.exceeds(result.atol) for value in result.values.values())
        within = f"within {result.atol:g}" if result.atol else "bit for bit"
        if result.values or not by_digest.equal:
            lines.append(f"Values of {counted(len(result.values), 'tensor')} read: {same} equal {within}.")
        if by_digest.equal:
            lines.append(f"Values of {counted(len(by_digest.equal), 'tensor')} not read: equal by digest.")
    else:
        if by_digest.equal or by_digest.different:
            known = len(by_digest.equal) + len(by_digest.different)
            lines.append(f"Values of {counted(known, 'tensor')} by digest: {len(by_digest.equal)} equal.")
        if by_digest.unknown:
            lines.append(f"Values of {counted(len(by_digest.unknown), 'tensor')} not compared: --values reads them.")
    if not found.has_common_names:
        lines.append("The two have no name in common.")
    equal = "Nothing else differs." if result.values is None and by_digest.unknown else "The states are equal."
    return [*lines, "The states differ." if result.is_different else equal]
