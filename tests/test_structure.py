"""How the package is built: what `scripts/measure_structure.py` counts and what must not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import cache

import pytest

from scripts.measure_structure import PACKAGE, bare_events, constructors, defines, guards_in, twice
from scripts.structure import counts, forms
from scripts.structure.source import Source, sources_of
from tests.source_modules import ROOT, modules_of


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax of each module of the package by name."""
    return {f"{PACKAGE}.{module.name}": module.tree for module in modules_of(ROOT / PACKAGE)}


@pytest.mark.parametrize("room", ["saving", "resume", "planning", "staging"])
def test_a_room_of_saves_and_loads_does_not_ask_whether_there_are_images(room: str) -> None:
    """What keeps copies in memory listens to saves and offers sources to loads; without it there are defaults."""
    found = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in trees().items()
        if name.startswith(f"{PACKAGE}.checkpoint.{room}.")
        for node in guards_in(tree)
    ]
    assert not found, "\n" + "\n".join(found)


def test_a_guard_is_found() -> None:
    source = "if self._images is not None and run.tier is None and x is None and self.memory.images is None: pass"
    assert [ast.unparse(node) for node in guards_in(ast.parse(source))] == [
        "self._images is not None",
        "run.tier is None",
        "self.memory.images is None",
    ]


def own_trees() -> dict[str, ast.Module]:
    """Return those but for classes that have the names and arguments of other libraries, to stand in for theirs."""
    return {name: tree for name, tree in trees().items() if not name.startswith(f"{PACKAGE}.integrations.")}


def test_no_two_folders_define_one_public_class_name() -> None:
    assert twice(own_trees()) == []


def test_only_the_manager_is_made_of_eight_parts_or_more() -> None:
    assert [name for name, _ in constructors(own_trees())] == ["CheckpointManager"]


def test_a_state_is_defined_once() -> None:
    assert [name for name, tree in trees().items() if defines(tree, "State")] == [
        f"{PACKAGE}.checkpoint.format.flattening"
    ]


def test_no_event_is_a_bare_string() -> None:
    assert bare_events(trees()) == 0


def importers_of(room: str) -> set[str]:
    """Return the rooms that import from `room` as soon as they are imported."""
    return {
        name.rpartition(".")[0]
        for name, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(room)
    }


def test_images_are_in_one_room_and_without_them_none_of_it_is_imported() -> None:
    images = f"{PACKAGE}.memory.images"
    assert importers_of(images) == {images, f"{PACKAGE}.cli"}, "the tool shows what is kept"


def test_each_module_stands_in_a_flat_and_its_lines_are_counted_once() -> None:
    for each in sources_of(ROOT):
        assert each.lines.total() == len(each.text.splitlines())
        assert each.flat


def test_lines_names_and_records_are_counted() -> None:
    text = (
        '"""Text."""\n\nimport os  # comment\n\nclass NoImages:\n    """Two\n    lines."""\n\ndef f(x):\n    return x\n'
    )
    one, other = Source("memory.keeper.one", text), Source("store.one", text)
    assert one.lines == {"docstring": 3, "blank": 3, "import": 1, "code": 3}
    assert (one.flat, other.flat) == ("extras", "core")
    assert counts.names_twice([one, other]) == {"classes": ["NoImages"], "modules": ["one"], "functions": ["f"]}
    assert [*counts.null_objects([one])] == ["NoImages"] and [*counts.functions(one)] == [("f", 2)]
    up = Source("store.two", "from torchtitan_lite.memory.keeper.one import f\n")
    assert counts.imports_up([one, up]) == ["store.two -> memory.keeper.one"]


def test_a_save_and_a_load_are_read_in_an_hour() -> None:
    """The walk at the top of the design: its files are there, with what it names in them, and they are few."""
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    walk = design.partition("## Read a save and a load\n")[2].partition("\n## ")[0]
    stops = re.findall(r"^\d+\. `([\w/]+\.py)`: (.*)$", walk, re.MULTILINE)
    texts = [(ROOT / path).read_text(encoding="utf-8") for path, _ in stops]
    assert 0 < len(stops) <= 12
    assert sum(len(text.splitlines()) for text in texts) <= 2500
    for (path, words), text in zip(stops, texts, strict=True):
        for name in re.findall(r"`([\w.]+)`", words):
            found = [re.search(rf"^ *(class|def) {part}\b", text, re.MULTILINE) for part in name.split(".")]
            assert all(found), f"{path} has no {name}"


def test_whatever_leaves_a_process_is_in_the_registry() -> None:
    """A helper process, a protocol between processes, or a form of what is written."""
    sources = sources_of(ROOT)
    assert {*counts.calling(sources, counts.STARTS)} == modules_in(forms.HELPERS)
    opening = {*counts.calling(sources, counts.SOCKETS)} - {"checkpoint.schedule.preemption"}  # Of one process alone.
    writing = counts.writing(sources)
    assert opening <= modules_in(forms.PROTOCOLS)
    named = modules_in(forms.PROTOCOLS) | modules_in(forms.RECORDS) | modules_in(forms.INSIDE)
    assert opening | writing == named


def modules_in(table: Mapping[str, Sequence[str]]) -> set[str]:
    found = [name for modules in table.values() for name in modules]
    assert len(found) == len({*found}), "a module stands twice"
    return {*found}
