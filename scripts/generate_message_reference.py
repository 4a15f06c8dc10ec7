"""Write the tables of warnings and errors in docs/messages.md from the calls that make them.

    python scripts/generate_message_reference.py

The calls are read from the syntax of the package: none of its modules is imported. A message becomes a template:
`{name}` stands for what varies, and `[one / other]` for what depends on the case.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchtitan_lite"
PAGE = ROOT / "docs" / "messages.md"
BEGIN, END = "<!-- messages: written by scripts/generate_message_reference.py -->\n\n", "\n<!-- end of messages -->"
LEVELS = frozenset({"warning", "error", "exception", "critical"})
"""Methods of the logger whose lines are listed."""
BUILTINS = frozenset({"OSError", "RuntimeError", "SystemExit", "TypeError", "ValueError"})
"""The classes of errors that are listed along with those of errors.py."""
OF_A_PLACE = frozenset({"AllCheckpointsDamaged", "FolderUnusable", "PinsUnreadable", "UploadRefused"})
OF_A_PLACE |= {f"Checkpoint{what}" for what in ("Damaged", "Mismatch", "NotFound", "Unreadable", "Unsafe")}
"""The classes whose first argument is a path, and no text."""
OPEN, OR, CLOSE = "\ue000", "\ue001", "\ue002"
"""Around and between the texts of a choice, until it is known whether they become lines of their own."""
LONG = 150
"""The least letters of a choice of which each text has its own line."""
TRANSPARENT = frozenset({"str", "len", "repr", "iter", "list", "tuple", "sorted", "min", "max", "sum", "round", "int"})
TRANSPARENT |= {"clause", "in_one_line", "in_words", "listed", "shown_key"}
"""Functions whose argument names the placeholder."""
DEPTH = 4
"""How far names and functions are followed."""
_FORMAT = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[srdgfeix])")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Message(NamedTuple):
    """The `text` of a `kind`, "warning" or the class of an error, that `module` logs or raises."""

    package: str
    text: str
    kind: str
    module: str


@dataclass
class Scope:
    """What the names in a function of a module stand for."""

    constants: Mapping[str, ast.expr]
    functions: Mapping[str, _Function]
    values: Mapping[str, list[ast.expr]] = field(default_factory=dict)

    def inside(self, function: _Function) -> Scope:
        """Return the scope of `function`: with each value that it assigns to a name."""
        values: defaultdict[str, list[ast.expr]] = defaultdict(list, self.values)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    for name, value in _pairs(target, node.value):
                        values[name] = [*values[name], value]
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and values[node.target.id]:
                *others, last = values[node.target.id]
                added = ast.BoolOp(ast.And(), [node.target, node.value])
                values[node.target.id] = [*others, ast.BinOp(last, ast.Add(), added)]
        return Scope(self.constants, self.functions, values)


def messages() -> list[Message]:
    """Return the messages of all modules, sorted by package and text."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    kinds = BUILTINS | {node.name for node in trees[PACKAGE / "errors.py"].body if isinstance(node, ast.ClassDef)}
    texts = _shared_constants(trees.values())
    found = {
        message
        for path, tree in trees.items()
        for message in messages_of(tree, path.relative_to(PACKAGE).with_suffix("").as_posix(), kinds, texts)
    }
    return sorted(found, key=lambda message: (message.package, message.text.casefold(), *message))


def render(page: str) -> str:
    """Return `page` with new tables between the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks {BEGIN.strip()} or {END.strip()}")
    return before + BEGIN + "\n".join(_lines()) + "\n" + END + after


def _lines() -> Iterator[str]:
    by_package: defaultdict[str, list[Message]] = defaultdict(list)
    for message in messages():
        by_package[message.package].append(message)
    for number, (package, rows) in enumerate(by_package.items()):
        yield from ([""] if number else [])
        yield from (f"### {package}", "", "| message | kind | module |", "| --- | --- | --- |")
        yield from (f"| {_code(row.text)} | {row.kind} | {row.module} |" for row in rows)


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}" if fence == "`" else f"{fence} {text} {fence}"


def _shared_constants(trees: Iterable[ast.Module]) -> dict[str, ast.expr]:
    """Return the constants of all modules that are texts, without the names that two modules have."""
    found: defaultdict[str, list[ast.expr]] = defaultdict(list)
    for tree in trees:
        for name, value in _constants(tree):
            found[name].append(value)
    return {name: values[0] for name, values in found.items() if len(values) == 1 and _is_plain(values[0])}


def _is_plain(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and node.value:
            yield from _pairs(node.target, node.value)
        for target in node.targets if isinstance(node, ast.Assign) else []:
            yield from _pairs(target, node.value)


def messages_of(
    tree: ast.Module, module: str, kinds: frozenset[str], texts: Mapping[str, ast.expr] | None = None
) -> Iterator[Message]:
    """Yield the messages of the module `tree`: warnings, and errors of `kinds`; `texts` has constants of others."""
    package = module.partition("/")[0] if "/" in module else "torchtitan_lite"
    constants = {**(texts or {}), **dict(_constants(tree))}
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, _Function)}
    for kind, expression, arguments, scope in _found_in(tree, Scope(constants, functions), kinds):
        for way in _ways(_filled(expression, arguments, scope)):
            text = _shown(way)
            if re.search(r"[^\W\d_]{2}.* |^\S+ .*[^\W\d_]{2}", re.sub(r"\{[^}]*\}", "", text)):
                yield Message(package, text, kind, module)


def _ways(text: str) -> Iterator[str]:
    """Yield the messages that `text` stands for: apart where the cases share little."""
    for begin, end in _choices(text):
        if end - begin > LONG or (begin, end) == (0, len(text)):
            for way in _split(text[begin + 1 : end - 1]):
                yield from _ways(text[:begin] + way + text[end:])
            return
    yield text


def _choices(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each outermost choice of `text` begins and ends."""
    depth = first = 0
    for at, letter in enumerate(text):
        if letter == OPEN:
            first, depth = (first, depth + 1) if depth else (at, 1)
        elif letter == CLOSE:
            depth -= 1
            if not depth:
                yield first, at + 1


def _split(inside: str) -> Iterator[str]:
    depth = first = 0
    for at, letter in enumerate(inside):
        depth += (letter == OPEN) - (letter == CLOSE)
        if letter == OR and not depth:
            yield inside[first:at]
            first = at + 1
    yield inside[first:]


_Found = tuple[str, ast.expr, list[ast.expr], Scope]


def _found_in(node: ast.AST, scope: Scope, kinds: frozenset[str]) -> Iterator[_Found]:
    for child in ast.iter_child_nodes(node):
        inner = scope.inside(child) if isinstance(child, _Function) else scope
        if isinstance(child, ast.ClassDef) and child.name in kinds:
            kinds_inside = kinds - {child.name}
            yield from _of_class(child, scope)
            yield from _found_in(child, inner, kinds_inside)
            continue
        if isinstance(child, ast.Call):
            yield from ((*found, inner) for found in _of_call(child, kinds, scope))
        yield from _found_in(child, inner, kinds)


def _of_class(node: ast.ClassDef, scope: Scope) -> Iterator[_Found]:
    """Yield the text that the constructor of an error puts around its arguments."""
    for function in node.body:
        if isinstance(function, _Function) and function.name == "__init__":
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
                    yield node.name, call.args[0], [], scope.inside(function)
                elif isinstance(call, ast.Call) and ast.unparse(call.func) == "self._say":
                    fact, advice = call.args
                    text = ast.BinOp(ast.BinOp(fact, ast.Add(), ast.Constant(". ")), ast.Add(), advice)
                    whole = ast.BinOp(text, ast.Add(), ast.Constant("."))
                    yield node.name, whole, [], scope.inside(function)


def _of_call(node: ast.Call, kinds: frozenset[str], scope: Scope) -> Iterator[tuple[str, ast.expr, list[ast.expr]]]:
    method = _method(node.func)
    called = scope.functions.get(ast.unparse(node.func).removeprefix("self."))
    if called and node.args and _passes_on(called):
        yield "warning", node.args[0], node.args[1:]
    elif method in LEVELS and node.args:
        yield ("warning" if method == "warning" else "error"), node.args[0], node.args[1:]
    elif method == "warn" and node.args:
        yield "warning", node.args[0], []
    elif method in kinds:
        for argument in [*node.args[method in OF_A_PLACE :], *(keyword.value for keyword in node.keywords)]:
            yield method, argument, []
    elif ast.unparse(node.func) == "threading.Timer" and _method(node.args[1]) in LEVELS:
        (text, *arguments) = node.args[2].elts if isinstance(node.args[2], ast.Tuple) else [node.args[2]]
        yield "warning", text, arguments


def _passes_on(function: _Function) -> bool:
    """Return whether `function` gives its arguments to the logger, as a format and its figures."""
    return any(
        isinstance(node, ast.Call) and _method(node.func) == "warning" and isinstance(node.args[-1], ast.Starred)
        for node in ast.walk(function)
    )


def _method(function: ast.expr) -> str:
    """Return which method of a logger, or which class, `function` is; empty for others."""
    if isinstance(function, ast.IfExp):
        return _method(function.body)
    name = ast.unparse(function)
    if (before := name.rpartition(".")[0]) and name.rpartition(".")[2] in LEVELS:
        return name.rpartition(".")[2] if before.rpartition(".")[2] == "logger" else ""
    return "warn" if name == "warnings.warn" else name


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name of `target` with its value."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for name, part in zip(target.elts, value.elts, strict=True):
            yield from _pairs(name, part)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.IfExp):
        yield from _pairs(target, value.body)
        yield from _pairs(target, value.orelse)


def _filled(expression: ast.expr, arguments: list[ast.expr], scope: Scope) -> str:
    """Return the template of `expression`, a format in the manner of % if it has arguments."""
    text = _text(expression, scope, DEPTH)
    remaining = iter(arguments)

    def fill(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        argument = next(remaining, None)
        return match[0] if argument is None else _value(argument, scope, DEPTH)

    return _FORMAT.sub(fill, text) if arguments else text


def _value(node: ast.expr, scope: Scope, depth: int) -> str:
    return _text(node, scope, depth) if _is_text(node, scope, depth) else _name(node)


def _text(node: ast.expr, scope: Scope, depth: int) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Constant(value=None):
            return ""
        case ast.JoinedStr():
            return "".join(_text(part, scope, depth) for part in node.values)
        case ast.FormattedValue():
            return _value(node.value, scope, depth)
        case ast.BinOp(op=ast.Add()):
            return _text(node.left, scope, depth) + _text(node.right, scope, depth)
        case ast.BinOp(op=ast.Mod()):
            right = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
            return _filled(node.left, right, scope)
        case ast.IfExp():
            return _choice([_value(node.body, scope, depth), _value(node.orelse, scope, depth)])
        case ast.BoolOp(op=ast.And()):
            return _choice([_value(node.values[-1], scope, depth), ""])
        case ast.BoolOp(op=ast.Or()):
            return _choice([_value(value, scope, depth) for value in node.values])
        case ast.Attribute(value=ast.Name(id=module), attr=name) if depth and _is_module_constant(module, name, scope):
            return _text(scope.constants[name], scope, depth - 1)
        case ast.Name() if depth and _values(node.id, scope):
            return _choice([_value(value, _without(scope, node.id), depth - 1) for value in _values(node.id, scope)])
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(joint)), attr="join"), args=[listed]):
            if isinstance(listed, ast.List | ast.Tuple):
                return joint.join(_value(part, scope, depth) for part in listed.elts)
        case ast.Call(func=ast.Attribute(value=value, attr="removesuffix" | "removeprefix" | "strip" | "rstrip")):
            return _value(value, scope, depth)
        case ast.Call(func=ast.Name(id="_clause" | "str"), args=[value, *_]):
            return _value(value, scope, depth)
        case ast.Call(func=ast.Name(id="counted"), args=[number, ast.Constant(value=noun), *_]):
            return f"{_name(number)} {noun}{'es' if str(noun).endswith(('s', 'ch')) else 's'}"
        case ast.Call() if depth and (function := _called(node, scope)):
            inner = scope.inside(function)
            returned = [part.value for part in ast.walk(function) if isinstance(part, ast.Return) and part.value]
            return _choice([_value(value, inner, depth - 1) for value in returned])
    return _name(node)


def _is_text(node: ast.expr, scope: Scope, depth: int) -> bool:
    """Return whether `node` has words of its own."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, str)
        case ast.JoinedStr() | ast.BinOp(op=ast.Mod(), left=ast.Constant(value=str())):
            return True
        case ast.BinOp(op=ast.Add()):
            return _is_text(node.left, scope, depth) or _is_text(node.right, scope, depth)
        case ast.IfExp():
            return _is_text(node.body, scope, depth) or _is_text(node.orelse, scope, depth)
        case ast.BoolOp():
            return any(_is_text(value, scope, depth) for value in node.values)
        case ast.Attribute(value=ast.Name(id=module), attr=name) if depth:
            return _is_module_constant(module, name, scope)
        case ast.Name() if depth and (values := _values(node.id, scope)):
            return all(_is_text(value, _without(scope, node.id), depth - 1) for value in values)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str()), attr="join"), args=[listed]):
            return isinstance(listed, ast.List | ast.Tuple)
        case ast.Call(func=ast.Attribute(value=value, attr="removesuffix" | "removeprefix" | "strip" | "rstrip")):
            return _is_text(value, scope, depth)
        case ast.Call(func=ast.Name(id="_clause" | "str"), args=[value, *_]):
            return _is_text(value, scope, depth)
        case ast.Call(func=ast.Name(id="counted"), args=[_, ast.Constant(), *_]):
            return True
        case ast.Call() if depth and (function := _called(node, scope)):
            returned = [part.value for part in ast.walk(function) if isinstance(part, ast.Return) and part.value]
            inner = scope.inside(function)
            return bool(returned) and all(_is_text(value, inner, depth - 1) for value in returned)
    return False


def _is_module_constant(module: str, name: str, scope: Scope) -> bool:
    return module.islower() and name.isupper() and name in scope.constants and _is_plain(scope.constants[name])


def _values(name: str, scope: Scope) -> list[ast.expr]:
    return scope.values.get(name) or ([scope.constants[name]] if name in scope.constants else [])


def _without(scope: Scope, name: str) -> Scope:
    return Scope(scope.constants, scope.functions, {**scope.values, name: []})


def _called(node: ast.Call, scope: Scope) -> _Function | None:
    """Return the function of this module that `node` calls, if it returns text."""
    name = ast.unparse(node.func).removeprefix("self.")
    function = scope.functions.get(name)
    return function if function and function.returns and ast.unparse(function.returns) == "str" else None


def _choice(texts: list[str]) -> str:
    ways = [*dict.fromkeys(texts)]
    if len(ways) == 1:
        return ways[0]
    return f"{OPEN}{OR.join(sorted(ways, key=lambda way: not way))}{CLOSE}"


def _name(node: ast.expr) -> str:
    """Return the placeholder of what varies."""
    return "{" + (_word(node).strip("_") or "value").replace("_", " ") + "}"


def _word(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(attr="__name__" | "__qualname__"):
            return "class"
        case ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value) | ast.Starred(value=value) | ast.FormattedValue(value=value):
            return _word(value)
        case ast.UnaryOp(operand=value) | ast.BinOp(left=value) | ast.IfExp(body=value) | ast.NamedExpr(target=value):
            return _word(value)
        case ast.GeneratorExp(elt=value) | ast.ListComp(elt=value):
            return _word(value) or _word(node.generators[0].iter)
        case ast.JoinedStr(values=values):
            return next((word for value in values if (word := _word(value))), "")
        case ast.Call(func=ast.Attribute(value=ast.Constant()), args=[value, *_]):  # ", ".join(...)
            return _word(value)
        case ast.Call(func=ast.Name(id="map"), args=[_, value, *_]):
            return _word(value)
        case ast.Call(func=ast.Name(id=name), args=[value, *_]) if name.strip("_") in TRANSPARENT:
            return _word(value)
        case ast.Call(func=ast.Attribute(value=value, attr="removesuffix" | "removeprefix" | "strip" | "lstrip")):
            return _word(value)
        case ast.Call(func=function, args=args):
            return _word(function) if isinstance(function, ast.Name) or not args else _word(args[0]) or _word(function)
    return ""


def _shown(text: str) -> str:
    """Return `text` in one line, with the marks of choices as they are on the page."""
    for mark, shown in ((OR + CLOSE, "]"), (OPEN, "["), (OR, " / "), (CLOSE, "]")):
        text = text.replace(mark, shown)
    return re.sub(r"\s*\n\s*", " ", text).strip()


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
