"""`inspect`: what one checkpoint is, and what is in it."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

from torchtitan_lite.checkpoint.format.contents import StoredTensor
from torchtitan_lite.cli.named_checkpoint import resolve_any
from torchtitan_lite.cli.screen import Screen, age, count_text, plain_table
from torchtitan_lite.config.argument_parser import Option, Positional
from torchtitan_lite.config.job_config import JobConfig, flat_config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.examining.opened import OpenedCheckpoint, WrittenBy, open_checkpoint
from torchtitan_lite.examining.summary import (
    Row,
    StatePart,
    bytes_by_file,
    matching,
    part_name,
    rows_of,
    state_parts,
)
from torchtitan_lite.log import counted, readable_bytes
from torchtitan_lite.store import layout

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

_MOST_ROWS = 40
"""Of tensors, unless --tensors names them."""
_BAR_COLUMNS = 32


@dataclass(frozen=True)
class Inspect:
    """Show what a checkpoint is and what is in it: origin, configuration, tensors, files."""

    step: Annotated[str, Positional("STEP")]
    """The folder of a checkpoint, FOLDER:10 for a step in a folder of checkpoints, or FOLDER for its latest."""
    tensors: Annotated[str, Option("GLOB")] = ""
    """Show every tensor whose key matches, such as 'model.*'; a * matches dots, too. JSON has all that match."""
    ranks: bool = False
    """Show how many bytes each rank's file has of each part."""

    def run(self, screen: Screen) -> None:
        opened = open_checkpoint(resolve_any(self.step).folder)
        chosen = matching(opened.contents.tensors, self.tensors or "*")
        if not chosen and self.tensors:
            raise ConfigError(f"no tensor of {opened.folder} matches {self.tensors}: inspect shows the keys")
        view = _View(opened, chosen, time.time())
        screen.show(
            view.to_json() if screen.as_json else None,
            lambda: view.render(tensors=bool(self.tensors), ranks=self.ranks),
        )


@dataclass(frozen=True)
class _View:
    opened: OpenedCheckpoint
    chosen: Mapping[str, StoredTensor]
    now: float

    def render(self, *, tensors: bool, ranks: bool) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        blocks: list[tuple[str, RenderableType]] = []
        if not (tensors or ranks):
            if configuration := changed_settings(self.opened.saved_by.config):
                blocks.append(("Configuration that differs from the defaults", _pairs_table(configuration)))
            blocks.append(("Parts", self._parts()))
        if tensors or not ranks:
            rows = rows_of(self.chosen, folded=not tensors)
            if rows:
                blocks.append(("Tensors", _tensors_table(rows if tensors else rows[:_MOST_ROWS])))
            if not tensors and len(rows) > _MOST_ROWS:
                blocks.append(("", f"and {counted(len(rows) - _MOST_ROWS, 'more row')}: --tensors '*' shows all"))
        if ranks or not tensors:
            blocks.append((f"Files{self._legend() if ranks else ''}", self._files(by_part=ranks)))
        shown: list[RenderableType] = [Text(str(self.opened.folder), style="bold"), _pairs_table(self._facts())]
        for title, block in blocks:
            shown += ["", Text(title, style="bold"), block] if title else [block]
        return Group(*shown)

    def to_json(self) -> dict[str, Any]:
        opened, manifest = self.opened, self.opened.manifest
        held = bytes_by_file(opened.contents)
        return {
            "folder": str(opened.folder),
            "origin": opened.origin.value,
            "kind": opened.kind.value,
            "step": opened.step,
            "bytes": opened.nbytes,
            "created_at": opened.created_at,
            "world_size": opened.saved_by.world_size,
            "topology": opened.saved_by.topology,
            "format_version": manifest.format_version if manifest is not None else None,
            "versions": manifest.versions if manifest is not None else {},
            "lineage": manifest.lineage.to_json() if manifest is not None else None,
            "metrics": opened.extra.get("metrics", {}),
            "nan_in": opened.extra.get("nan_in", []),
            "ranks_differ": opened.extra.get("ranks_differ", []),
            "config": opened.saved_by.config,
            "parts": [
                {
                    "name": part.name,
                    "tensors": part.num_tensors,
                    "elements": part.num_elements,
                    "bytes": part.nbytes,
                    "objects": part.num_objects,
                    "dtypes": dict(part.dtypes),
                }
                for part in state_parts(opened.contents)
            ],
            "files": [
                {
                    "name": name,
                    "rank": layout.rank_of(name),
                    "bytes": nbytes,
                    "tensor_bytes": dict(held.get(name, {})),
                    "is_read": name not in self._unread,
                }
                for name, nbytes in opened.sizes.items()
            ],
            "tensors": [
                {
                    "key": key,
                    "part": part_name(key),
                    "dtype": str(tensor.dtype),
                    "shape": list(tensor.shape),
                    "bytes": tensor.nbytes,
                    "chunks": len(tensor.chunks),
                }
                for key, tensor in self.chosen.items()
            ],
        }

    def _facts(self) -> dict[str, str]:
        opened, manifest = self.opened, self.opened.manifest
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(opened.created_at))
        job = opened.saved_by
        by = f" by {counted(job.world_size, 'rank')}" if job.world_size else ""
        mesh = f" ({job.topology})" if job.topology and job.world_size != 1 else ""
        of_step = f" of step {opened.step}" if opened.step is not None else ""
        origin = "" if opened.origin is WrittenBy.OURS else f", by {opened.origin.library}"
        origin += ", without a manifest" if opened.origin in (WrittenBy.TORCHTITAN, WrittenBy.DCP) else ""
        facts = {
            "kind": f"{opened.kind.value.replace('_', '-')} checkpoint{of_step}{origin}",
            "size": f"{readable_bytes(opened.nbytes)} in {counted(len(opened.sizes), 'file')}",
            "saved": f"{saved}, {age(self.now - opened.created_at)} ago{by}{mesh}",
        }
        if manifest is not None:
            lineage = manifest.lineage
            facts["run"] = lineage.run_id
            facts["run"] += f", after step {lineage.parent_step}" if lineage.parent_step is not None else ""
            facts["run"] += f", rolled back to step {lineage.began_at}" if lineage.began_at is not None else ""
            versions = [f"{name} {version}" for name, version in manifest.versions.items()]
            facts["written by"] = ", ".join([*versions, f"format {manifest.format_version}"])
            if metrics := opened.extra.get("metrics"):
                facts["metrics"] = ", ".join(f"{name} {value:g}" for name, value in metrics.items())
            if nan := opened.extra.get("nan_in"):
                facts["NaN in"] = ", ".join(map(str, nan))
            if differing := opened.extra.get("ranks_differ"):
                facts["ranks differ"] = "; ".join(map(str, differing))
        return facts

    def _parts(self) -> Table:
        parts = state_parts(self.opened.contents)
        longest = max((part.nbytes for part in parts), default=0)
        table = plain_table("part", "tensors", "elements", "size", "objects", "", "dtypes")
        for part in parts:
            dtypes = ", ".join(sorted(part.dtypes))
            nbytes = readable_bytes(part.nbytes) if part.num_tensors else ""
            cells = (count_text(part.num_tensors), count_text(part.num_elements), nbytes, count_text(part.num_objects))
            table.add_row(part.name, *cells, bar([part.nbytes], longest, 8), dtypes)
        if len(parts) > 1:
            table.add_row("all", *_totals(parts), "", "")
        return table

    def _files(self, *, by_part: bool) -> Table:
        held, sizes = bytes_by_file(self.opened.contents), self.opened.sizes
        names = self._part_names()
        table = plain_table("rank", "file", "size", "tensors", "")
        longest = max((sum(parts.values()) for parts in held.values()), default=0)
        for alike in _alike(sorted(held, key=lambda name: (layout.rank_of(name) or 0, name)), held, sizes):
            first, ranks = alike[0], [layout.rank_of(name) for name in (alike[0], alike[-1])]
            parts = held[first]
            shown = [parts[name] for name in names[: len(fills()) - 1]] if by_part else []
            lengths = [*shown, sum(parts.values()) - sum(shown)]
            table.add_row(
                "" if None in ranks else " to ".join(map(str, dict.fromkeys(ranks))),
                first if len(alike) == 1 else f"{counted(len(alike), 'file')} of each",
                readable_bytes(sizes.get(first, 0)),
                "not read" if first in self._unread else readable_bytes(sum(parts.values())),
                bar(lengths, longest, _BAR_COLUMNS),
            )
        return table

    @property
    def _unread(self) -> frozenset[str]:
        """The pickles of another library: nothing in them is known."""
        objects = self.opened.contents.objects.values()
        return frozenset(each.item.file for each in objects if each.is_file and each.item is not None)

    def _legend(self) -> str:
        marks = fills()
        names = self._part_names()
        shown = [f"{marks[min(at, len(marks) - 1)]} {name}" for at, name in enumerate(names[: len(marks) - 1])]
        return ": " + ", ".join([*shown, f"{marks[-1]} other"] if len(names) > len(marks) - 1 else shown)

    def _part_names(self) -> list[str]:
        """Return the parts with tensors, the largest first."""
        parts = sorted(state_parts(self.opened.contents), key=lambda part: -part.nbytes)
        return [part.name for part in parts if part.nbytes]


def changed_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings in `config` that are not at their defaults, by "section.key"."""
    defaults = flat_config(json.loads(json.dumps(JobConfig().to_dict())))
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in flat_config(config).items()
        if key not in defaults or defaults[key] != value
    }


def _totals(parts: Sequence[StatePart]) -> Iterator[str]:
    yield count_text(sum(part.num_tensors for part in parts))
    yield count_text(sum(part.num_elements for part in parts))
    yield readable_bytes(sum(part.nbytes for part in parts))
    yield count_text(sum(part.num_objects for part in parts))


def _tensors_table(rows: Sequence[Row]) -> Table:
    counts = any(row.num_tensors > 1 for row in rows)
    table = plain_table("name", *(["count"] if counts else []), "dtype", "shape", "size")
    for row in rows:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        each = readable_bytes(row.nbytes // row.num_tensors)
        table.add_row(KeyCell(row.name), *([str(row.num_tensors)] if counts else []), row.dtype, shape, each)
    return table


def _alike(names: Sequence[str], held: Mapping[str, Counter[str]], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the files, with more than three neighbours of equal sizes as one group."""
    for _, of_one in groupby(names, key=lambda name: (sizes.get(name), sorted(held[name].items()))):
        alike = list(of_one)
        if len(alike) > 3:
            yield alike
        else:
            yield from ([name] for name in alike)


def _pairs_table(facts: Mapping[str, str]) -> Table:
    table = plain_table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    return table


# Cells of tables: bars of lengths whose parts differ without a colour, and long keys, folded after their dots.


_BLOCKS = "█▓▒░"
_LETTERS = "#=+-"


def fills() -> str:
    """Return the characters of the parts of a bar: blocks where stdout's encoding has them, else ASCII."""
    try:
        _BLOCKS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _LETTERS
    return _BLOCKS


def bar(parts: Sequence[int], longest: int, width: int) -> str:
    """Return a bar of the lengths `parts`, each in its own character, in which `longest` would take `width` columns.

    Each part that is not zero takes at least one column; the largest makes up for that.
    """
    total = sum(parts)
    if not total or not longest:
        return ""
    columns = max(1, round(total / longest * width))
    widths = [max(1, int(part / total * columns)) if part else 0 for part in parts]
    largest = parts.index(max(parts))
    widths[largest] = max(1, widths[largest] + columns - sum(widths))
    return "".join(fill(number) * each for number, each in enumerate(widths))


def fill(number: int) -> str:
    """Return the character of part `number` of a bar; the last one stands for all further parts, too."""
    return fills()[min(number, len(_BLOCKS) - 1)]


_INDENT = "  "


@dataclass(frozen=True)
class KeyCell:
    """The key `text`, which takes as many lines as the width asks for."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        words = [len(_INDENT) + len(word) for word in _dotted_words(self.text)]
        return Measurement(min(max(words), options.max_width), min(len(self.text), options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text("\n".join(folded(self.text, options.max_width)), overflow="fold")


def folded(text: str, width: int) -> list[str]:
    """Return `text` in lines of at most `width` columns, cut after dots; a longer word has a line of its own."""
    lines = [""]
    for word in _dotted_words(text):
        if lines[-1].strip() and len(lines[-1]) + len(word) > width:
            lines.append(_INDENT)
        lines[-1] += word
    return lines


def _dotted_words(text: str) -> list[str]:
    words = text.split(".")
    return [f"{word}." for word in words[:-1]] + words[-1:]
