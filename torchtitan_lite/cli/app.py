"""The command `torchtitan-lite`: what is in a folder of checkpoints, and what can be done with it.

Only the module of the verb in the arguments is imported, and none of them imports torch before it reads tensors: a
listing must not take seconds. Errors are one sentence on stderr; `exit_codes` has what they exit with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import io
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Protocol, Union, cast

import tyro

from torchtitan_lite.cli.exit_codes import INTERRUPTED, ExitCode, code_of, sentence_of
from torchtitan_lite.cli.parser_texts import default_in_words, finding_in, fitted, unknown_options
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.cli.spelling import as_spelled
from torchtitan_lite.config.help_texts import LikeStdout, add_help_texts
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


class Verb(Protocol):
    """The arguments of one verb, and what it does with them."""

    @property
    def json(self) -> bool: ...

    def run(self, screen: Screen) -> ExitCode:
        """Do it, print the result on `screen`, and return how it ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb in `argv`, by default the command line's; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    spelled = partial(as_spelled, arguments=arguments)
    try:
        verb = parse(arguments)
        screen = Screen(as_json=verb.json, spelled=spelled)
        with screen.noting_warnings():
            return int(verb.run(screen))
    except BrokenPipeError:
        forget_stdout()
        return ExitCode.FAILED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except (TorchtitanLiteError, OSError) as error:
        sys.stderr.write(f"error: {spelled(sentence_of(error))}\n")
        return code_of(error)


def parse(argv: Sequence[str]) -> Verb:
    """Return the verb that `argv` asks for. Raise ConfigError for wrong usage; `--help` prints and exits with 0."""
    config = (tyro.conf.FlagCreatePairsOff,)
    name = argv[0] if argv else ""
    if name in VERBS:
        kind, arguments, registry = _load(name), list(argv[1:]), tyro.constructors.ConstructorRegistry()
        if {"-h", "--help"} & {*arguments}:
            # Reads the sources of the verb.
            add_help_texts(registry, default_in_words)
        prog = f"{PROGRAM} {name}"
        return _quietly(
            name,
            lambda: cast(Verb, tyro.cli(kind, args=arguments, prog=prog, config=config, registry=registry)),
            unknown_options(arguments, _options(kind)),
        )
    if not name.startswith("-"):
        raise ConfigError(_unknown(name))
    verbs: Any = Union[tuple(_with_first_sentence(each) for each in VERBS)]  # noqa: UP007  # made from a list
    return _quietly(
        "",
        lambda: cast(Verb, tyro.cli(verbs, prog=PROGRAM, description=_DESCRIPTION, args=list(argv), config=config)),
    )


def _with_first_sentence(name: str) -> Any:
    """Return the class of the verb, described by the first sentence of its help, for the list of all verbs."""
    kind = _load(name)
    first = (kind.__doc__ or "").partition("\n\n")[0]
    return Annotated[kind, tyro.conf.subcommand(name, description=first)]


def _options(kind: Any) -> list[str]:
    """Return the names of the fields of a verb's class that are options."""
    return [field.name for field in dataclasses.fields(kind) if "Positional" not in str(field.type)]


def _load(name: str) -> Any:
    module, _, kind = VERBS[name].partition(":")
    return getattr(importlib.import_module(module), kind)


def _unknown(name: str) -> str:
    verbs = f"expected one of {', '.join(VERBS)}; see {PROGRAM} --help"
    if not name:
        return f"no verb is given: {verbs}"
    near = difflib.get_close_matches(name, VERBS, n=1)
    return f"there is no verb {name!r}" + (f", did you mean {near[0]}?" if near else f": {verbs}")


def _quietly(name: str, parse: Callable[[], Verb], unknown: str = "") -> Verb:
    """Return what `parse` does; in place of tyro's boxed report and exit, raise ConfigError with one sentence.

    The sentence is about the `unknown` options if there are any: tyro takes what follows one for its value.
    """
    report, help_text = io.StringIO(), LikeStdout()
    try:
        with contextlib.redirect_stderr(report), contextlib.redirect_stdout(help_text):
            return parse()
    except SystemExit as ending:
        if not ending.code:
            columns = shutil.get_terminal_size().columns
            text = fitted(help_text.getvalue(), columns, with_verbs=not name)
            # tyro has bullets also where it draws no boxes.
            sys.stdout.write(text if "─" in text else text.replace("•", "*"))
            raise
        finding = unknown or finding_in(report.getvalue())
        raise ConfigError(f"{finding}; see {f'{PROGRAM} {name}'.strip()} --help") from None
