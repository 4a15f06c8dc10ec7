"""What is counted on the syntax: lines, lengths, names that stand twice, large records, and what asks for what."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median, quantiles

from scripts.structure.forms import HELPERS, PROTOCOLS, RECORDS
from scripts.structure.source import FLATS, KINDS, Source, imports_of

MOST_LINES, MOST_FIELDS = 60, 12
COMPANIONS = {
    "images": re.compile(r"images?|tiers?"),
    "uploads": re.compile(r"uploads?|uploading|uploaders?"),
    "peer copies": re.compile(r"replicas?"),
    "hang watch": re.compile(r"hangs?|watchers?"),
    "rank checks": re.compile(r"rank_checks?|replica_checks?"),
}
"""The words of a name that name what may accompany a run."""
SEAM = ("store", "bucket", "disk")
"""The rooms that know what a folder is."""
FOLDER_TYPES = frozenset({"Path", "BucketStore", "BucketFolder", "ObjectFolder", "CheckpointStore"})
STARTS = frozenset({"Popen", "fork", "Process", "get_context", "forkserver"})
SOCKETS = frozenset({"socket", "socketpair", "create_connection", "Listener", "Client"})
READERS, WRITERS = frozenset({"loads", "load"}), frozenset({"dumps", "dump"})
OWN_WRITERS = frozenset({"json_bytes", "compact_json"})
"""Functions of ours that write JSON for others."""
CODECS = frozenset({"json", "pickle", "tomllib", "tomli"})

Row = tuple[str, object]


def rows(sources: Sequence[Source]) -> Iterator[Row]:
    """Yield what is counted, by its name."""
    yield "files", len(sources)
    total = {kind: sum(each.lines[kind] for each in sources) for kind in KINDS}
    every = sum(total.values())
    yield "lines", every
    for kind, count in total.items():
        yield f"  {kind}, % of the lines", f"{count} ({100 * count / every:.1f})"
    for flat in FLATS:
        own = [each for each in sources if each.flat == flat]
        yield f"  {flat}: files, lines", f"{len(own)}, {sum(each.lines.total() for each in own)}"
    yield "  imports of modules in a higher flat", len(imports_up(sources))
    lengths = [(end, name) for each in sources for name, end in functions(each)]
    yield "functions: lines, median / p90 / max", _spread([length for length, _ in lengths])
    yield f"  longer than {MOST_LINES}", _listed(name for length, name in lengths if length > MOST_LINES)
    yield "files: lines, median / p90 / max", _spread([each.lines.total() for each in sources])
    for what, found in names_twice(sources).items():
        yield f"{what} with one name in two places", len(found)
    yield f"constructors and records of more than {MOST_FIELDS}", _listed(large(sources))
    yield "null objects", _listed(null_objects(sources))
    yield "isinstance on types of folders, above the seam", len(folder_questions(sources))
    for companion, rooms in rooms_that_name(sources).items():
        yield f"rooms of the core that name {companion}", f"{len(rooms)} {', '.join(sorted(rooms))}".strip()
    for what, names in (("processes are started", STARTS), ("sockets are opened", SOCKETS)):
        yield f"modules where {what}", len(calling(sources, names))
    yield "kinds of helper processes, by the registry", len(HELPERS)
    yield "protocols between processes, by the registry", len(PROTOCOLS)
    yield "forms of records, by the registry", len(RECORDS)
    yield "modules that read JSON, TOML or pickles", len(calling(sources, READERS, CODECS))
    yield "modules that write them", len(writing(sources))


def imports_up(sources: Sequence[Source]) -> list[str]:
    """Return the imports of modules in a higher flat."""
    flats, floors = {each.name: each.flat for each in sources}, [*FLATS]
    return [
        f"{each.name} -> {other}"
        for each in sources
        for other in sorted(imports_of(each, flats))
        if floors.index(flats[other]) > floors.index(each.flat)
    ]


def functions(source: Source) -> Iterator[tuple[str, int]]:
    """Yield the name and the lines of each function, without its docstring."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            text = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - text


def names_twice(sources: Sequence[Source]) -> dict[str, list[str]]:
    """Return the names of classes, modules and functions at the top of modules that stand in several."""
    found: dict[str, dict[str, set[str]]] = {what: defaultdict(set) for what in ("classes", "modules", "functions")}
    for each in sources:
        found["modules"][each.name.rpartition(".")[2]].add(each.name)
        for node in each.tree.body:
            if isinstance(node, ast.ClassDef):
                found["classes"][node.name].add(each.name)
            elif isinstance(node, ast.FunctionDef):
                found["functions"][node.name].add(each.name)
    found["modules"].pop("__init__", None)
    return {what: sorted(name for name, where in names.items() if len(where) > 1) for what, names in found.items()}


def large(sources: Sequence[Source]) -> Iterator[str]:
    """Yield each class that has too many fields, or is made of too many arguments, and how many."""
    for each in sources:
        for node in ast.walk(each.tree):
            if isinstance(node, ast.ClassDef):
                fields = sum(
                    isinstance(part, ast.AnnAssign) and not ast.unparse(part.annotation).startswith("ClassVar")
                    for part in node.body
                )
                made_of = [
                    len(part.args.args) + len(part.args.kwonlyargs) - 1
                    for part in node.body
                    if isinstance(part, ast.FunctionDef) and part.name == "__init__"
                ]
                if (most := max([fields, *made_of])) > MOST_FIELDS:
                    yield f"{node.name} {most}"


def null_objects(sources: Sequence[Source]) -> Iterator[str]:
    """Yield each class that is called after what it stands in for, as NoImages; an exception is none."""
    for each in sources:
        yield from (
            node.name
            for node in ast.walk(each.tree)
            if isinstance(node, ast.ClassDef)
            and re.match(r"_?No[A-Z]", node.name)
            and not {"Exception"} & {base.id for base in node.bases if isinstance(base, ast.Name)}
        )


def folder_questions(sources: Sequence[Source]) -> list[str]:
    """Return the calls of isinstance above the seam that ask which kind of folder there is."""
    return [
        f"{each.name}:{node.lineno}"
        for each in sources
        if each.name.partition(".")[0] not in SEAM
        for node in ast.walk(each.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and FOLDER_TYPES & {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
    ]


def rooms_that_name(sources: Sequence[Source]) -> dict[str, set[str]]:
    """Return the rooms of the core whose modules name each companion, in an import, an attribute or a name."""
    found: dict[str, set[str]] = {companion: set() for companion in COMPANIONS}
    for each in (each for each in sources if each.flat == "core"):
        named = {part for name in _names(each.tree) for part in re.split(r"\W", name)}
        for companion, word in COMPANIONS.items():
            if any(word.fullmatch(part) for name in named for part in (name, *name.split("_"))):
                found[companion].add(each.room or each.name)
    return found


def calling(sources: Sequence[Source], names: frozenset[str], owners: frozenset[str] | None = None) -> list[str]:
    """Return the modules that call one of `names`, of `owners` if there are some."""
    return [
        each.name
        for each in sources
        if any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in names
            and (owners is None or ast.unparse(node.func.value) in owners)
            for node in ast.walk(each.tree)
        )
    ]


def writing(sources: Sequence[Source]) -> set[str]:
    """Return the modules that write JSON or pickles, by a codec or by a function of ours."""
    return {*calling(sources, WRITERS, CODECS)} | {
        each.name
        for each in sources
        if any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OWN_WRITERS
            for node in ast.walk(each.tree)
        )
    }


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(alias.name for alias in node.names))
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""


def _spread(values: Sequence[int]) -> str:
    return f"{median(values):g} / {quantiles(values, n=10)[-1]:.0f} / {max(values)}"


def _listed(names: Iterator[str]) -> str:
    found = sorted(names)
    return f"{len(found)} {', '.join(found)}".strip()
