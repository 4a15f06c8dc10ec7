"""What `--help` says of each option: the doc string under its field, and its default in words.

tyro keeps the line breaks of such a doc string, and prints a default as Python spells it. So a help, and only a help,
is made with these rules.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import sys
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, get_origin, get_type_hints

import tyro
from tyro.constructors import (
    MISSING_NONPROP,
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from torchtitan_lite.config.kinds import ValueKind

Hint = Callable[[object], str]
"""From the default of an option to what its help ends in, as "(default: 3)"; the empty string for nothing."""


def doc_strings(cls: type) -> dict[str, str]:
    """Return the doc string under each field of a dataclass, on one line; fields without one are left out."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            text = ast.literal_eval(following.value)
            docs[ast.unparse(statement.target)] = " ".join(text.split())
    return docs


def add_help_texts(registry: ConstructorRegistry, hint: Hint) -> None:
    """Make `registry` describe the fields of every dataclass with their doc strings, and their defaults by `hint`."""

    @registry.struct_rule
    def _described(info: StructTypeInfo) -> StructConstructorSpec | None:
        if not dataclasses.is_dataclass(info.type):
            return None
        docs, types = doc_strings(info.type), get_type_hints(info.type, include_extras=True)
        fields = [_field(each, types[each.name], docs.get(each.name), hint) for each in dataclasses.fields(info.type)]
        return StructConstructorSpec(instantiate=info.type, fields=tuple(fields))


def _field(field: dataclasses.Field[Any], kind: Any, doc: str | None, hint: Hint) -> StructFieldSpec:
    if field.default is dataclasses.MISSING:  # A section, or an argument that must be given.
        return StructFieldSpec(field.name, kind, MISSING_NONPROP, helptext=doc)
    metavar = f"{ValueKind.of(kind).base.__name__.upper()}|None" if get_origin(kind) is UnionType else None
    described: Any = Annotated[kind, tyro.conf.arg(help_behavior_hint=hint(field.default), metavar=metavar)]
    return StructFieldSpec(field.name, described, field.default, helptext=doc)


class LikeStdout(io.StringIO):
    """A text that gets the same colours and characters as stdout; none with NO_COLOR, which tyro does not know."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # of a text without one
        return sys.stdout.encoding if sys.__stdout__ is None else sys.__stdout__.encoding

    def isatty(self) -> bool:
        if sys.__stdout__ is None or not sys.__stdout__.isatty():
            return False
        from rich.console import Console

        return not Console(file=sys.__stdout__).no_color  # It reads NO_COLOR.
