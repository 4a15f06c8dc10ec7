"""The command `torchtitan-lite`: what is in a folder of checkpoints, and what can be done with it.

Only the module of the verb in the arguments is imported, and none of them imports torch before it reads tensors: a
listing must not take seconds. Errors are one sentence on stderr; `exit_codes` has what they exit with.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol, Union, cast

import tyro

from torchtitan_lite.cli.exit_codes import INTERRUPTED, ExitCode, code_of, sentence_of
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.errors import ConfigError, TorchtitanLiteError
from torchtitan_lite.log import forget_stdout

PROGRAM = "torchtitan-lite"
_DESCRIPTION = """List, check, compare, convert and thin out checkpoints on disk, without a job.

STEP is a checkpoint's folder, FOLDER:10 for a step, or FOLDER for its latest."""

VERBS = {
    "ls": "torchtitan_lite.cli.ls:Ls",
    "inspect": "torchtitan_lite.cli.inspect_step:Inspect",
    "verify": "torchtitan_lite.cli.verify:Verify",
    "diff": "torchtitan_lite.cli.diff:Diff",
    "report": "torchtitan_lite.cli.report:Report",
    "export": "torchtitan_lite.cli.export:Export",
    "import-weights": "torchtitan_lite.cli.import_weights:ImportWeights",
    "convert": "torchtitan_lite.cli.convert:Convert",
    "reshard": "torchtitan_lite.cli.reshard:Reshard",
    "prune": "torchtitan_lite.cli.prune:Prune",
    "pin": "torchtitan_lite.cli.pin:Pin",
    "unpin": "torchtitan_lite.cli.pin:Unpin",
    "bring-back": "torchtitan_lite.cli.bring_back:BringBack",
    "memory": "torchtitan_lite.cli.memory:Memory",
}
"""Each verb's module and class: a frozen dataclass of its arguments, as `Verb` has it."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_EMPTY_DEFAULT = re.compile(r"\(default:((?:\x1b\[[0-9;]*m)*) ''\)")
_REWORDED = (
    (r"Missing value for argument '([\w-]+)'.*", r"\1: expected a value, found none"),
    (r"Error parsing ([\w-]+): invalid literal for int\(\).*: (.*)", r"\1: expected a whole number, found \2"),
    (r"Error parsing ([\w-]+): could not convert string to float: (.*)", r"\1: expected a number, found \2"),
    (
        r"[Ii]nvalid choice (.*) for argument '([\w-]+)'\. Expected one of \((?:'', )?(.*)\)\.",
        lambda found: f"{found[2]}: expected one of {found[3].replace(chr(39), '')}, found {found[1]}",
    ),
)
"""Findings of tyro, and how this package says them: the option, what was expected, what was found."""


class Verb(Protocol):
    """The arguments of one verb, and what it does with them."""

    @property
    def json(self) -> bool: ...

    def run(self, screen: Screen) -> ExitCode:
        """Do it, print the result on `screen`, and return how it ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb in `argv`, by default the command line's; return the exit code."""
    try:
        verb = parse(sys.argv[1:] if argv is None else argv)
        return int(verb.run(Screen(as_json=verb.json)))
    except BrokenPipeError:
        forget_stdout()
        return ExitCode.FAILED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except (TorchtitanLiteError, OSError) as error:
        sys.stderr.write(f"error: {sentence_of(error)}\n")
        return code_of(error)


def parse(argv: Sequence[str]) -> Verb:
    """Return the verb that `argv` asks for. Raise ConfigError for wrong usage; `--help` prints and exits with 0."""
    config = (tyro.conf.FlagCreatePairsOff,)
    name = argv[0] if argv else ""
    if name in VERBS:
        kind, arguments = _load(name), list(argv[1:])
        return _quietly(
            name, lambda: cast(Verb, tyro.cli(kind, args=arguments, prog=f"{PROGRAM} {name}", config=config))
        )
    if not name.startswith("-"):
        raise ConfigError(_unknown(name))
    verbs: Any = Union[tuple(_with_first_sentence(each) for each in VERBS)]  # noqa: UP007  # made from a list
    return _quietly(
        "",
        lambda: cast(Verb, tyro.cli(verbs, prog=PROGRAM, description=_DESCRIPTION, args=list(argv), config=config)),
    )


class _LikeStdout(io.StringIO):
    """A text that gets the same colours and characters as stdout."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # of a text without one
        return sys.stdout.encoding if sys.__stdout__ is None else sys.__stdout__.encoding

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def _with_first_sentence(name: str) -> Any:
    """Return the class of the verb, described by the first sentence of its help, for the list of all verbs."""
    kind = _load(name)
    first = (kind.__doc__ or "").partition("\n\n")[0]
    return Annotated[kind, tyro.conf.subcommand(name, description=first)]


def _load(name: str) -> Any:
    module, _, kind = VERBS[name].partition(":")
    return getattr(importlib.import_module(module), kind)


def _unknown(name: str) -> str:
    verbs = f"expected one of {', '.join(VERBS)}; see {PROGRAM} --help"
    if not name:
        return f"no verb is given: {verbs}"
    near = difflib.get_close_matches(name, VERBS, n=1)
    return f"there is no verb {name!r}" + (f", did you mean {near[0]}?" if near else f": {verbs}")


def _quietly(name: str, parse: Callable[[], Verb]) -> Verb:
    """Return what `parse` does; in place of tyro's boxed report and exit, raise ConfigError with one sentence."""
    report, help_text = io.StringIO(), _LikeStdout()
    try:
        with contextlib.redirect_stderr(report), contextlib.redirect_stdout(help_text):
            return parse()
    except SystemExit as ending:
        if not ending.code:
            sys.stdout.write(_fitted(help_text.getvalue(), shutil.get_terminal_size().columns))
            raise
        raise ConfigError(_sentence(name, report.getvalue())) from None


def _fitted(help_text: str, columns: int) -> str:
    """Return a help of tyro, which folds the text in its boxes only, with the usage and the description folded too."""
    # Completion scripts are no help; all verbs in one line are wider than a terminal.
    if "usage:" not in help_text:
        return help_text
    short = re.sub(r"\A(.*usage:[^\n{]*)\{[^}\n]*\}", r"\1VERB ...", help_text)
    return "".join(_folded(line, columns) for line in map(_without_empty_default, short.splitlines(True)) if line)


def _without_empty_default(line: str) -> str:
    """Return `line` of a box without the default of an option that has none; "" if nothing else is in it."""
    bare = _EMPTY_DEFAULT.sub(rf"{' ' * 9}\1{' ' * 4}", line)  # As wide as before: the box stays in shape.
    return "" if bare != line and not _COLOURS.sub("", bare).strip(" │|\n") else bare


def _folded(line: str, columns: int) -> str:
    """Return `line` with line feeds in place of spaces, so that what is shown of it fits; a box stays as it is."""
    shown = _COLOURS.sub("", line.rstrip())
    if len(shown) <= columns or shown[0] in "╭│╰+|":
        return line
    lines, length = [""], 0
    for word in line.split(" "):
        width = len(_COLOURS.sub("", word.rstrip()))
        if length and length + width > columns:
            lines.append("")
            length = 0
        lines[-1] += f"{word} "
        length += width + 1
    return "\n".join(each.rstrip(" ") for each in lines)


def _sentence(name: str, report: str) -> str:
    """Return the finding in a report of tyro, which is a box with a title, a finding and remarks below it."""
    lines = [re.sub(r"^[│|]|[│|]$", "", line.rstrip()) for line in report.splitlines()]
    # Blocks, or ASCII where stdout is no UTF-8.
    rules = [at for at, line in enumerate(lines) if line[:1] in ("╭", "╰", "+") or {*line.strip()} <= {"─", "-"}]
    finding = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    # What is indented further is the help text of an argument.
    indented = textwrap.dedent("\n".join(finding)).splitlines()
    text = " ".join(" ".join(line for line in indented if not line.startswith(" " * 8)).split())
    for pattern, reworded in _REWORDED:
        text = re.sub(rf"\A{pattern}\Z", reworded, text)
    return f"{text[:1].lower()}{text[1:]}; see {f'{PROGRAM} {name}'.strip()} --help"
