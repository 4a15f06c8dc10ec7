"""Mutants of a module, from its syntax tree.

A mutant replaces one node by another; `ast.unparse` prints the complete module. Not mutated: annotations, decorators,
assertions, strings and f-strings, arguments of logging and printing, `__all__`, and blocks under TYPE_CHECKING. The
mutants of a module are always the same, in the same order.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.MatMult: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_NO_BEHAVIOUR = ("repr", "encoding", "bound")
"""Keywords without behaviour: for display, equal to the system's default, or for the type checker."""
_BOUNDARIES = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    path: str
    """Path of the module, relative to the repository."""
    line: int
    """Line at which the changed node begins."""
    lines: frozenset[int]
    """A test reaches the change only if it executes one of these. Empty: the code runs once, at import or cached."""
    operator: str
    source: str
    """The text of the line, stripped."""
    before: str
    after: str
    nth: int
    """Number, from 1, among the mutants of the file that are equal except for their position."""
    tree: ast.Module = field(repr=False, compare=False)
    site: _Site = field(repr=False, compare=False)
    replacement: ast.AST = field(repr=False, compare=False)

    def text(self) -> str:
        """Return the complete module with the change."""
        self.site.put(self.replacement)
        try:
            return ast.unparse(ast.fix_missing_locations(self.tree)) + "\n"
        finally:
            # All mutants of the module share one tree, and replacements use its nodes.
            self.site.put(self.site.node)

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator}: {_short(self.before)}  ->  {_short(self.after)}"

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Key in the list of equivalents. It does not change when lines move."""
        return self.path, self.source, self.operator, self.after, self.nth


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return all mutants of the module `path`, whose text is `source`."""
    tree, lines = ast.parse(source), source.splitlines()
    mutants: list[Mutant] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for site in _Sites().of(tree):
        before, line = ast.unparse(site.node), site.node.lineno
        for operator, new in site.replacements:
            what = (lines[line - 1].strip(), operator, ast.unparse(new))
            seen[what] += 1
            source, _, after = what
            mutants.append(Mutant(path, line, site.lines, operator, source, before, after, seen[what], tree, site, new))
    return mutants


@dataclass(frozen=True)
class _Site:
    """A node and its possible replacements in its parent."""

    parent: ast.AST
    field: str
    index: int | None
    node: Any
    lines: frozenset[int]
    replacements: list[tuple[str, ast.AST]]

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


class _Sites:
    """Walk a module and yield its sites."""

    def __init__(self) -> None:
        self._functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
        self._statement: Any = None

    def of(self, node: ast.AST) -> Iterator[_Site]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body"
            if inside:
                self._functions.append(node)  # type: ignore[arg-type]  # see the line before
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST) and not _is_skipped(node, child):
                    yield from self._child(node, name, index if isinstance(value, list) else None, child)
            if inside:
                self._functions.pop()

    def _child(self, parent: ast.AST, field: str, index: int | None, node: ast.AST) -> Iterator[_Site]:
        outer = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node
        replacements = [*_replacements(node, self._functions), *_negated(parent, field, node)]
        if replacements:
            yield _Site(parent, field, index, node, self._lines(node), replacements)
        yield from self.of(node)
        self._statement = outer

    def _lines(self, node: Any) -> frozenset[int]:
        # A cached function runs only for the first test that calls it, but affects others.
        if not self._functions or any("cache" in ast.unparse(d) for f in self._functions for d in f.decorator_list):
            return frozenset()
        header = isinstance(node, ast.stmt)
        return frozenset({self._statement.lineno} if header else {self._statement.lineno, *_span(node)})


def _span(node: Any) -> range:
    return range(node.lineno, node.end_lineno + 1)


def _is_skipped(parent: ast.AST, node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr():
            return True
        case ast.keyword() if node.arg in _NO_BEHAVIOUR:
            return True
        case ast.If(test=ast.Name("TYPE_CHECKING")) | ast.Assign(targets=[ast.Name("__all__")]):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name("logger") | ast.Attribute(attr="logger")))):
            return True
        case (
            ast.IfExp(body=ast.Constant(str()) | ast.JoinedStr())
            | ast.IfExp(orelse=ast.Constant(str()) | ast.JoinedStr())
        ):
            return True  # one text or another
    return isinstance(parent, ast.Raise) and not isinstance(node, ast.Call)


def _replacements(node: ast.AST, functions: list[Any]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the replacements of `node`, which is in the innermost of `functions`."""
    match node:
        case ast.Compare():
            for index, op in enumerate(node.ops):
                ops = [*node.ops[:index], _COMPARISONS[type(op)](), *node.ops[index + 1 :]]
                yield "comparison", ast.Compare(node.left, ops, node.comparators)
        case ast.BoolOp():
            yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "not removed", node.operand
        case ast.UnaryOp(op=ast.USub() | ast.Invert()):
            yield "sign removed", node.operand
        case ast.BinOp() if not _is_text(node) and (functions or not isinstance(node.op, ast.BitOr)):
            yield "arithmetic", ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
        case ast.AugAssign() if not _is_text(node.value):
            yield "arithmetic", ast.AugAssign(node.target, _ARITHMETIC[type(node.op)](), node.value)
        case ast.Constant(bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(int()):
            yield "constant", ast.Constant(node.value + 1)
        case ast.Call():
            for index, keyword in enumerate(node.keywords):
                if keyword.arg not in (None, *_NO_BEHAVIOUR):
                    rest = node.keywords[:index] + node.keywords[index + 1 :]
                    yield "keyword dropped", ast.Call(node.func, node.args, rest)
        case ast.Expr(value=ast.Call()):
            yield "call dropped", ast.Pass()
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            yield "return value", _other_return(node, functions[-1])
        case ast.Raise():
            yield "raise removed", ast.Pass()
        case ast.Break():
            yield "break/continue", ast.Continue()
        case ast.Continue():
            yield "break/continue", ast.Break()
        case ast.With() if all(item.optional_vars is None for item in node.items):
            yield "with removed", ast.If(ast.Constant(True), node.body, [])


def _negated(parent: ast.AST, field: str, node: Any) -> Iterator[tuple[str, ast.AST]]:
    """Yield the negation of `node` if it is a condition that no other operator negates."""
    decides = isinstance(parent, ast.If | ast.While | ast.IfExp) and field == "test"
    if not (decides or (isinstance(parent, ast.comprehension) and field == "ifs")):
        return
    match node:
        case ast.Constant() | ast.UnaryOp(op=ast.Not()):
            return
        case ast.Compare(ops=[op]) if not isinstance(op, _BOUNDARIES):
            return
    yield "condition", ast.UnaryOp(ast.Not(), node)


def _other_return(node: ast.Return, function: Any) -> ast.Return:
    """Return a statement with another value: the negated one for functions that return bool, else None."""
    answers = isinstance(function.returns, ast.Name) and function.returns.id == "bool"
    return ast.Return(ast.UnaryOp(ast.Not(), node.value) if answers and node.value else ast.Constant(None))


def _is_text(node: ast.AST) -> bool:
    return any(isinstance(part, ast.JoinedStr | ast.Constant) and _is_string(part) for part in ast.walk(node))


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _short(text: str) -> str:
    first, *more = text.splitlines()
    return first if len(first) <= 100 and not more else first[:100] + " ..."
