"""Write docs/api.md, the reference of what training loops import, from the signatures and docstrings in the code.

python scripts/generate_api_reference.py
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

MODULES = tuple(
    f"torchtitan_lite.{name}" for name in ("checkpoint", "data", "config", "metrics", "errors", "log", "faults")
)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
FIRST = """\
# API reference

Look up what a training loop imports: every public name, its arguments, what holds after a call and what it raises.
[In your own loop](own_loop.md) shows these names at work; what is not here may change without notice.
A method that is **collective** is called by every rank, at the same step and with the same arguments.

This page is written by `python scripts/generate_api_reference.py` from the docstrings.
"""
_SCOPES = (ast.ClassDef, ast.FunctionDef)


def render() -> str:
    """Return the page."""
    parts = [FIRST]
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        parts.append(f"## {module_name}\n\n{_text(module)}")
        parts += [part for name in module.__all__ for part in _entry(name, getattr(module, name))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _entry(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value) and issubclass(value, Exception):
        yield f"### {name}\n\n{_text(value)}"
        return
    if dataclasses.is_dataclass(value) and value.__module__.startswith("torchtitan_lite.config."):
        yield f"### {name}\n\n{_text(value)}\n\nAll its fields are keywords; the [configuration](config.md) lists them."
        return
    kind = "class" if inspect.isclass(value) else "def"
    yield f"### {name}\n\n{_block(f'{kind} {name}{_signature(value)}')}\n\n{_text(value)}"
    if not inspect.isclass(value):
        return
    for attribute, text in _documented_fields(value):
        yield f"#### {name}.{attribute}\n\n{text}"
    for method, found in vars(value).items():
        if method.startswith("_") or not _is_shown(found):
            continue
        target = inspect.unwrap(found.fget if isinstance(found, property) else getattr(value, method))
        signature = "" if isinstance(found, property) else _block(f"{method}{_signature(target)}") + "\n\n"
        yield f"#### {name}.{method}\n\n{signature}{_text(target)}"


def _is_shown(found: Any) -> bool:
    documented = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    return bool(callable(documented) and documented.__doc__)


def _signature(value: Any) -> str:
    signature = inspect.signature(value)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    bare = signature.replace(parameters=parameters)
    one_line = _short(str(bare))
    if len(one_line) <= 100:
        return one_line
    lines, marked = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not marked:
            lines.append("*")
            marked = True
        lines.append(_short(str(parameter)))
    returns = (
        "" if signature.return_annotation is signature.empty else f" -> {_short(str(signature.return_annotation))}"
    )
    return "(\n" + "".join(f"    {line},\n" for line in lines) + f"){returns}"


def _short(text: str) -> str:
    """Return a signature without the names of modules and quotes around annotations."""
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text).replace("<built-in function monotonic>", "time.monotonic")
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text)
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def _documented_fields(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the attributes of `cls` that have a string literal right under their assignment, with it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    for scope in ast.walk(tree):
        for statement, below in pairwise(getattr(scope, "body", []) if isinstance(scope, _SCOPES) else []):
            if isinstance(statement, ast.AnnAssign | ast.Assign) and _is_text(below):
                target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
                name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "_")
                if not name.startswith("_"):
                    yield name, inspect.cleandoc(below.value.value)


def _is_text(statement: ast.stmt) -> TypeGuard[Any]:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _text(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "")


def _block(code: str) -> str:
    return f"```\n{code}\n```"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
