"""Checkpoints made to do harm, and the outcome for a run that loads one.

`CASES` maps each name to a function that changes the folder of a sound checkpoint of step 4. `probe` runs in a process
of its own, because a case may hang or take all memory; it writes a line before each case, so that a hang has a name.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.checkpoint.reading.memory import peak_above_before
from tests.checkpoint.small_run import SmallRun
from tests.store.filled import rewrite
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.store.manifest import seal

Make = Callable[[Path], object]
DATA, METADATA, MANIFEST = "__0_0.distcp", ".metadata", "manifest.json"
OUTSIDE = "outside"
KEY, OBJECT = "model.first.weight", "dataloader.position"
WARMING = "sound"
MANY = 1_000_000


def deep(depth: int) -> Any:
    """Return an empty list inside `depth` lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def set_to(value: Any, *path: str) -> Make:
    """Return a case that sets the field at `path` to `value`."""

    def change(document: dict[str, Any]) -> None:
        *above, last = path
        for name in above:
            document = document[name]
        document[last] = value

    return lambda folder: rewrite(folder, change)


def renamed(name: str) -> Make:
    """Return a case that gives the data file another name in the table of files."""

    def change(document: dict[str, Any]) -> None:
        of_ranks = document["files_of_ranks"]
        document["files"][name] = {"size": of_ranks["sizes"][0], "blocks": of_ranks["digests"]}
        document["files_of_ranks"] = {"sizes": [], "record_sizes": [], "digests": ""}

    return lambda folder: rewrite(folder, change)


def converted(path: Any) -> Make:
    """Return a case as conversions of DCP's own are: every entry has a path; the path of one tensor is `path`."""

    def change(document: dict[str, Any]) -> None:
        document["structure"] = {}
        for table in ("tensors", "objects"):
            for key, entry in document[table].items():
                entry["path"] = path if key == KEY else key.split(".", 1)

    return lambda folder: rewrite(folder, change)


WRONG: dict[str, tuple[tuple[str, ...], Sequence[Any]]] = {
    "format_version": (("format_version",), [None, "3", -1, 0, 1.5, True, [], {}]),
    "oldest_reader": (("oldest_reader",), [None, "3", -1, 0, 1.5, True, [], {}, 1 << 70]),
    "step": (("step",), [None, "4", -1, 4.5, 1 << 70, True, 2, []]),
    "kind": (("kind",), [None, 5, "half", "x" * 5000, "\ud800", []]),
    "created_at": (("created_at",), [None, "now", 5, [], {}, float("inf")]),
    "world_size": (("world_size",), [None, 0, -1, "2", 1 << 70]),
    "versions": (("versions",), [None, [], "x", {"torch": 5}]),
    "lineage": (("lineage",), [None, [], "x", {}]),
    "run_id": (("lineage", "run_id"), [None, 5, "", "../up", "x" * 5000, "\ud800", "\u00e9" * 40, []]),
    "parent_step": (("lineage", "parent_step"), [-1, "x", 1 << 70, []]),
    "branch_point": (("lineage", "branch_point"), [-1, "x", 1 << 70, []]),
    "abandons": (
        ("lineage", "abandons"),
        [5, "x", {}, [[1]], [["1", "a"]], [[-1, "a"]], [[1, "../x"]], [[1, "a" * 5000]], deep(50)],
    ),
    "files": (("files",), [None, [], "x"]),
    "record": (("files", ".metadata"), [None, 5, [], {}]),
    "size": (("files", ".metadata", "size"), [None, "5", -1, 1.5, 1 << 70, 1 << 62, 0, True]),
    "blocks": (("files", ".metadata", "blocks"), [5, None, [], "zz", "a" * 15, "ab" * 5000]),
    "files_of_ranks": (("files_of_ranks",), [None, [], "x", {}]),
    "sizes": (
        ("files_of_ranks", "sizes"),
        [None, "5", *([size] for size in ("5", -1, 1.5, 1 << 70, 1 << 62, 0, True, None)), [5] * 5000, deep(50)],
    ),
    "record_sizes": (("files_of_ranks", "record_sizes"), [None, "5", [5], [None], [1 << 62], deep(50)]),
    "digests of files": (("files_of_ranks", "digests"), [5, None, [], "zz", "a" * 15, "ab" * 5000]),
    "extra": (("extra",), [None, [], "x"]),
    "config": (
        ("extra", "config"),
        [None, 5, "x", [], {"training": 5}, {"training": []}, {"training": "x"}, {"training": {"a": deep(300)}}],
    ),
    "topology": (("extra", "topology"), [None, 5, [], {}]),
    "digests": (("extra", "tensor_digests"), [None, 5, [], "x", {"a": 5}, {"\ud800": "x"}]),
    "nan_in": (("extra", "nan_in"), [None, 5, "x", {}]),
    "ranks_differ": (("extra", "ranks_differ"), [None, 5, "x", {}]),
    "tensors": (("tensors",), [None, [], "x", {"w": 5}, {"w": []}, {"\ud800": {}}]),
    "tensor": (("tensors", KEY), [None, {}, []]),
    "dtype": (("tensors", KEY, "dtype"), [None, "load", 5, []]),
    "shape": (("tensors", KEY, "shape"), [None, "84", [-8, -4], [1.5], [True], [1 << 62], [1 << 70], [[8]], []]),
    "chunks": (
        ("tensors", KEY, "chunks"),
        [
            *(None, 5, "x", [], [5], [[]], [["a"]], ["abcd"], [{"a": 1, "b": 2, "c": 3, "d": 4}]),
            [[DATA, 0, [0, 0], [8, 4]]] * 2,
            *([[DATA, at, [0, 0], [8, 4]]] for at in (-5, 1 << 62, "0", 1.5, None)),
            *([[name, 0, [0, 0], [8, 4]]] for name in (5, "../outside", "x" * 5000, "\ud800", "", "a\0b", "nowhere")),
            *([[DATA, 0, offsets, [8, 4]]] for offsets in ([0], [-1, 0], [1 << 70, 0], "00", [[0], 0])),
        ],
    ),
    "runs": (
        ("tensors", KEY, "runs"),
        [
            *(None, 5, "x", [], [5], [[]], [[1, [0, 1], 0, 0, [0, 0]]], {"a": 1}),
            *([[1, [0, 1], at, 0, [0, 0], [8, 4]]] for at in (-5, 1 << 62, "0", 1.5, None)),
            *([[1, ranks, 0, 0, [0, 0], [8, 4]]] for ranks in ([7, 1], [-1, 1], [0, 0], [1 << 70, 1], 0, ["0", 1])),
            *([[count, [0, 1], 0, 0, [0, 0], [8, 4]]] for count in (0, -1, 2, 1 << 70, "1", True)),
            *([[1, [0, 1], 0, 0, offsets, [8, 4]]] for offsets in ([0], [-1, 0], [1 << 70, 0], "00", [[0], 0])),
            *([[1, [0, 1], 0, 0, [0, 0], sizes]] for sizes in ([8], [8, 5], [-8, -4], [1 << 70, 1], [0, 4])),
        ],
    ),
    "object": (
        ("objects", OBJECT),
        [
            *(None, {}, [], {"item": 5}, {"item": [DATA, 0]}, {"item": [DATA, -1, 10]}, {"item": [DATA, 0, 1 << 60]}),
            *({"item": [name, 0, 10]} for name in ("../outside", "x" * 5000, "\ud800", "")),
            *({"value": {"$int": 5}}, {"value": {"$eval": "1"}}, {"value": deep(300)}, {"value": {"$dict": [[{}, 1]]}}),
        ],
    ),
    "structure": (
        ("structure",),
        [
            *(None, [], {}, {"root": 5}, {"root": {}}, {"root": {"kind": "eval", "keys": []}}),
            *({"root": {"kind": "dict", "keys": keys}} for keys in (5, ["a", "a"], ["a"], [[]], [{"$tuple": [[]]}])),
            *({"root": {"kind": "list", "children": children}} for children in (5, [5], [None])),
        ],
    ),
}
"""Name to the path of a field and the values that it cannot have."""


def instead(name: str, make: Make) -> Make:
    """Return a case that replaces the file `name` by what `make` makes, and moves its bytes to a file outside."""

    def change(folder: Path) -> None:
        path = folder / name
        path.rename(folder.parent.parent / OUTSIDE)
        make(path)

    return change


def a_socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as listener:  # Its name has to be short.
        listener.bind(path.name)


def a_device(path: Path) -> None:
    os.mknod(path, 0o20666, os.makedev(1, 5))


def of_size(num_bytes: int) -> Make:
    """Return a function that makes a sparse file of `num_bytes` zeros."""

    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, num_bytes)

    return make


INSTEAD: dict[str, Make] = {
    "link": lambda path: path.symlink_to(path.parents[2] / OUTSIDE),
    "relative link": lambda path: path.symlink_to(f"../../{OUTSIDE}"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to zeros": lambda path: path.symlink_to("/dev/zero"),
    "link to a terminal": lambda path: path.symlink_to("/dev/tty"),
    "link to a folder": lambda path: path.symlink_to(".."),
    "pipe": lambda path: os.mkfifo(path),
    "socket": a_socket,
    "folder": lambda path: path.mkdir(),
    "device": a_device,
    "empty": of_size(0),
    "3 GiB": of_size(3 << 30),
    "1 TiB": of_size(1 << 40),
    "zeros": of_size(4000),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "text": lambda path: path.write_bytes(b'{"step": 4}'),
    "lines": lambda path: path.write_bytes(b"\n" * MANY),
}


def many(field: str, item: str, count: int = MANY, opening: str = "[", closing: str = "]") -> Make:
    """Return a case whose manifest has a `field` with `count` items."""

    def make(folder: Path) -> None:
        document = json.loads((folder / MANIFEST).read_bytes())
        fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in document.items() if name != "digest"]
        fields = [line for line in fields if not line.startswith(f'"{field}": ')]
        items = ",".join(item.replace("%", str(number)) for number in range(count))
        fields.insert(0, f'"{field}": {opening}{items}{closing}')
        (folder / MANIFEST).write_bytes(seal(b"{\n" + ",\n".join(fields).encode()))

    return make


_ABANDONS = {"opening": '{"run_id":"a","abandons":[', "closing": "]}"}
_CHUNK = f'["{DATA}",%,[0],[1]]'
_TENSOR = {"opening": '{"w":{"dtype":"uint8","shape":[1000000],"chunks":[', "closing": "]}}"}
_RUNS = {"opening": '{"w":{"dtype":"uint8","shape":[1000000],"runs":[', "closing": "]}}"}
_OBJECT = {"opening": "{", "closing": "}"}
COUNTS: dict[str, Make] = {
    "abandons": many("lineage", '[%,"aa"]', **_ABANDONS),
    "abandons of one step": many("lineage", '[2,"r%"]', 30_000, **_ABANDONS),
    "as many abandons as fit": many("lineage", '[%,"a"]', 30_000, **_ABANDONS),
    "chunks": many("tensors", _CHUNK, **_TENSOR),
    "as many chunks as fit": many("tensors", _CHUNK, 14_000, **_TENSOR),
    "chunks that overlap": many("tensors", f'["{DATA}",0,[0],[1000000]]', 10_000, **_TENSOR),
    "runs": many("tensors", "[1,[0,1],0,0,[%],[1]]", **_RUNS),
    "as many runs as fit": many("tensors", "[1,[0,1],0,0,[%],[1]]", 20_000, **_RUNS),
    "runs that overlap": many("tensors", "[1,[0,1],0,0,[0],[1000000]]", 10_000, **_RUNS),
    "a run of all ranks there are": many("tensors", f"[{10**18},[0,1],0,0,[0],[1]]", 1, **_RUNS),
    "tensors": many("tensors", f'"w%":{{"dtype":"uint8","shape":[1],"chunks":[["{DATA}",0,[0],[1]]]}}', **_OBJECT),
    "objects": many("objects", '"o%":{"value":{}}', **_OBJECT),
    "as many objects as fit": many("objects", '"o%":{"value":{}}', 18_000, **_OBJECT),
    "files": many("files", '"f%":{"size":0}', **_OBJECT),
    "as many files as fit": many("files", '"f%":{"size":0}', 20_000, **_OBJECT),
    "versions": many("versions", '"v%":""', **_OBJECT),
    "lists": many("extra", "[]", opening='{"a":[', closing="]}"),
    "as many lists as fit": many("extra", "[]", 160_000, opening='{"a":[', closing="]}"),
    "as many lists as fit in a config": many("extra", "{}", 160_000, opening='{"config":{"a":5,"b":[', closing="]}}"),
    "brackets": many("extra", "", 1, opening='{"a":' + "[" * 100_000, closing="]" * 100_000 + "}"),
    "digits": many("step", "9" * 5000, 1, opening="", closing=""),
    "keys of a structure": many("structure", '"k%"', 50_000, opening='{"root":{"kind":"dict","keys":[', closing="]}}"),
    "containers": many(
        "structure",
        '{"kind":"list","children":[]}',
        16_000,
        opening='{"root":{"kind":"list","children":[',
        closing="]}}",
    ),
    "a long name": many("kind", "x" * (50 << 20), 1, opening='"', closing='"'),
    "values in one": many("objects", "{}", 150_000, opening='{"o":{"value":[', closing="]}}"),
}


def of_another_tool(make: Make) -> Make:
    """Return the case `make` for a checkpoint without our manifest."""

    def change(folder: Path) -> None:
        (folder / MANIFEST).unlink()
        make(folder)

    return change


def metadata(change: Callable[[Any], object]) -> Make:
    """Return a case that changes DCP's metadata."""

    def make(folder: Path) -> None:
        described = FileSystemReader(folder).read_metadata()
        change(described)
        (folder / METADATA).write_bytes(pickle.dumps(described))

    return of_another_tool(make)


def pickled(data: bytes) -> Make:
    return of_another_tool(lambda folder: (folder / METADATA).write_bytes(data))


def place(**fields: Any) -> Callable[[Any], None]:
    """Return a change that sets these fields of the place of every chunk."""

    def change(described: Any) -> None:
        for info in described.storage_data.values():
            for name, value in fields.items():
                setattr(info, name, value)

    return change


PICKLES: dict[str, Make] = {
    "empty dicts": pickled(b"}" * MANY + b"."),
    "as many empty dicts as fit": pickled(b"}" * 500_000 + b"."),
    "as many lists in lists as fit": pickled(b"]" * 250_000 + b"a" * 249_999 + b"."),
    "as many marks as fit": pickled(b"(" * 500_000 + b"."),
    "as many tuples as fit": pickled(b")" + b"\x85" * 500_000 + b"."),
    "a list, twice in a list, twice": pickled(b"]" + b"\x94h\x00h\x00\x86" * 30 + b"."),
    "a name of 2 GiB": pickled(b"X\xff\xff\xff\x7fabc."),
    "frames": pickled((b"\x95" + bytes(8)) * 50_000 + b"N."),
    "nothing": pickled(b"N."),
    "no properties": metadata(lambda d: setattr(d.state_dict_metadata[KEY].properties, "dtype", None)),
    "names that lead out": metadata(place(relative_path=f"../../{OUTSIDE}")),
    "long names": metadata(place(relative_path="x" * 5000)),
    "half a name": metadata(place(relative_path="\ud800")),
    "an empty name": metadata(place(relative_path="")),
    "no names": metadata(place(relative_path=5)),
    "before the file": metadata(place(offset=-5)),
    "beyond the file": metadata(place(offset=1 << 62)),
    "beyond all numbers": metadata(place(offset=1 << 200)),
    "large": metadata(place(length=1 << 60)),
    "of no length": metadata(place(length=None)),
    "empty paths": metadata(lambda d: setattr(d, "planner_data", dict.fromkeys(d.planner_data, ()))),
    "no chunks": metadata(lambda d: setattr(d.state_dict_metadata[KEY], "chunks", [])),
    "chunks twice": metadata(lambda d: d.state_dict_metadata[KEY].chunks.extend(d.state_dict_metadata[KEY].chunks)),
    "other states": metadata(lambda d: setattr(d, "state_dict_metadata", [])),
    "no places": metadata(lambda d: setattr(d, "storage_data", {})),
}


def linked_findings(folder: Path) -> None:
    """Damage the manifest, and make the file for the findings a link to a file outside."""
    (folder.parent.parent / OUTSIDE).write_bytes(b"precious")
    (folder / "findings.json").symlink_to(folder.parent.parent / OUTSIDE)
    (folder / MANIFEST).write_bytes(b"{")


def piped_findings(folder: Path) -> None:
    os.mkfifo(folder / "findings.json")
    (folder / MANIFEST).write_bytes(b"{")


def crowd(folder: Path) -> None:
    """Make a folder of many names, with a manifest so large that a load counts them for its limit."""
    for number in range(5000):
        (folder / f"name{number}").touch()
    many("extra", "[]", 400_000, opening='{"a":[', closing="]}")(folder)


CASES: dict[str, Make] = {
    WARMING: lambda folder: None,
    **{f"{n} as {what}": instead(n, make) for n in (MANIFEST, METADATA, DATA) for what, make in INSTEAD.items()},
    **{
        f"{name} = {value!r:.40} ({number})": set_to(value, *path)
        for name, (path, values) in WRONG.items()
        for number, value in enumerate(values)
    },
    **{f"file {n!r:.20}": renamed(n) for n in ("", ".", "..", "../x", "/x", "a\0b", "a\\b", "x" * 5000, "\ud800")},
    **{f"path {path!r}": converted(path) for path in ([], None, [["a"]], [1.5], "ab", {})},
    **{f"many: {name}": make for name, make in COUNTS.items()},
    "findings as a link": linked_findings,
    "findings as a pipe": piped_findings,
    "a crowd": crowd,
}
"""Cases for checkpoints of our own."""

PLAIN_CASES: dict[str, Make] = {
    **{f"pickle: {name}": make for name, make in PICKLES.items()},
    **{f"{METADATA} alone as {what}": of_another_tool(instead(METADATA, make)) for what, make in INSTEAD.items()},
}
"""Cases for checkpoints of other tools, which are loaded only by their path."""


def probe(names: Sequence[str], template: str, folder: str, report: str) -> None:
    """Write to `report` the outcome for a run that loads each of `names`, from its own folder and by path."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # Otherwise every load would collect over all objects that were loaded before.
    with Path(report).open("a", buffering=1) as lines:

        def report_on(name: str, way: str, meet: Callable[[], str]) -> None:
            line = {"name": name, "way": way, "outcome": "it hangs, or ended the process", "peak": 0}
            lines.write(json.dumps(line) + "\n")
            outcome, began = [], time.monotonic()
            line["peak"] = peak_above_before(lambda: outcome.append(meet()))
            lines.write(json.dumps(line | {"outcome": outcome[0], "seconds": time.monotonic() - began}) + "\n")

        for number, name in enumerate((WARMING, *names)):
            for way, meet in _ways(name, Path(template), Path(folder) / str(number)):
                report_on(name, way, meet)
            shutil.rmtree(Path(folder) / str(number), ignore_errors=True)


def _ways(name: str, template: Path, folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    if name in CASES:
        hostile = folder / "own" / "checkpoint" / "step-4"
        shutil.copytree(template, hostile.parent)
        CASES[name](hostile)
        yield "listing", lambda: _in_its_own_folder(folder / "own")
    hostile = folder / "another" / "checkpoint" / "step-4"
    shutil.copytree(template, hostile.parent)
    (CASES.get(name) or PLAIN_CASES[name])(hostile)
    yield "initial_load_path", lambda: _by_its_path(folder / "new", hostile)


def _in_its_own_folder(folder: Path) -> str:
    try:
        with SmallRun(folder, interval=100) as run:
            found = run.manager.load()
            step, events = run.manager.loaded_step, run.events
    except Exception as error:
        return f"raised {type(error).__name__}: {error!s:.300}"
    if (folder / OUTSIDE).exists() and (folder / "checkpoint" / "step-4.corrupt" / "findings.json").is_symlink():
        return "wrote outside"
    if not found or step != 2:
        return f"loaded {step}"
    if not events.steps("fallback"):
        return "skipped"
    finding = events.figures("fallback")["finding"]
    return f"fell back: {finding:.300}"


def _by_its_path(folder: Path, hostile: Path) -> str:
    try:
        with SmallRun(folder, interval=100, initial_load_path=str(hostile), initial_load_model_only=False) as run:
            run.manager.load()
            return "loaded"
    except CheckpointError as error:
        return f"refused: {type(error).__name__}: {error!s:.600}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error!s:.300}"
