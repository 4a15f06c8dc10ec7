"""The command `torchtitan-lite`: what is in a folder of checkpoints, and what can be done with it.

Only the module of the verb in the arguments is imported, and none of them imports torch before it reads tensors: a
listing must not take seconds. Errors are one sentence on stderr; `exit_codes` has what they exit with.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Protocol, cast

from torchtitan_lite.cli.exit_codes import INTERRUPTED, ExitCode, code_of, sentence_of
from torchtitan_lite.cli.screen import Screen, as_spelled
from torchtitan_lite.config.argument_parser import Option, Parser
from torchtitan_lite.errors import ConfigError, TorchtitanLiteError
from torchtitan_lite.log import forget_stdout

PROGRAM = "torchtitan-lite"
_DESCRIPTION = """List, check, compare, convert and thin out checkpoints, without a job.

STEP is a checkpoint's folder, FOLDER:10 for a step, or FOLDER for its latest; FOLDER may be an address such as
s3://bucket/run."""

VERBS = {
    "ls": "torchtitan_lite.cli.ls:Ls",
    "inspect": "torchtitan_lite.cli.inspect_step:Inspect",
    "verify": "torchtitan_lite.cli.verify:Verify",
    "diff": "torchtitan_lite.cli.diff:Diff",
    "report": "torchtitan_lite.cli.report:Report",
    "export": "torchtitan_lite.cli.export:Export",
    "import-weights": "torchtitan_lite.cli.import_weights:ImportWeights",
    "convert": "torchtitan_lite.cli.convert:Convert",
    "reshard": "torchtitan_lite.cli.convert:Reshard",
    "add-metadata": "torchtitan_lite.cli.convert:AddMetadata",
    "upload": "torchtitan_lite.cli.upload:Upload",
    "prune": "torchtitan_lite.cli.prune:Prune",
    "pin": "torchtitan_lite.cli.pin:Pin",
    "unpin": "torchtitan_lite.cli.pin:Unpin",
    "bring-back": "torchtitan_lite.cli.bring_back:BringBack",
    "memory": "torchtitan_lite.cli.memory:Memory",
    "probe": "torchtitan_lite.cli.probe:Probe",
}
"""Each verb's module and class: a frozen dataclass of its arguments, as `Verb` has it."""


class Verb(Protocol):
    """The arguments of one verb but --json, and what it does with them."""

    def run(self, screen: Screen) -> ExitCode | None:
        """Do it, print the result on `screen`, and return how it ended; None for fine."""


@dataclass(frozen=True)
class _OfEveryVerb:
    json: bool = False
    """Print JSON."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb in `argv`, by default the command line's; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    spelled = partial(as_spelled, arguments=arguments)
    try:
        verb, as_json = parse_verb(arguments)
        screen = Screen(as_json=as_json, spelled=spelled)
        with screen.noting_warnings():
            return int(verb.run(screen) or ExitCode.FINE)
    except BrokenPipeError:
        forget_stdout()
        return ExitCode.FAILED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except (TorchtitanLiteError, OSError) as error:
        sys.stderr.write(f"error: {spelled(sentence_of(error))}\n")
        return code_of(error)


def parse_verb(argv: Sequence[str]) -> tuple[Verb, bool]:
    """Return the verb that `argv` asks for, and whether it prints JSON.

    Raise ConfigError for wrong usage; `--help` prints and exits with 0.
    """
    name = argv[0] if argv else ""
    if name in VERBS:
        kind = _load(name)
        parser = Parser(prog=f"{PROGRAM} {name}", description=inspect.getdoc(kind))
        _add_arguments(parser, kind)
        # --keep_latest is --keep-latest.
        arguments = [re.sub("^--[^=]*", lambda found: found[0].replace("_", "-"), each) for each in argv[1:]]
        values = _given(parser, parser.parse_known_intermixed_args, arguments)
        as_json = values.pop("json")
        return cast(Verb, kind(**values)), as_json
    if not name.startswith("-"):
        raise ConfigError(_unknown_verb(name))
    parser = _parser_of_all()
    shell = _given(parser, parser.parse_known_args, argv)["print_completion"]
    if not shell:
        raise ConfigError(_unknown_verb(""))
    import shtab

    sys.stdout.write(shtab.complete(parser, shell))
    raise SystemExit(0)


@dataclass(frozen=True)
class _WithoutVerb:
    print_completion: Annotated[Literal["", "bash", "zsh"], Option("{bash,zsh}")] = ""
    """Print a script with which the shell completes verbs and options."""


def _parser_of_all() -> Parser:
    """Return the parser of all verbs, each described by the first sentence of its help."""
    parser = Parser(prog=PROGRAM, description=_DESCRIPTION)
    parser.add_fields(parser, _WithoutVerb, _option_default_text)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for name in VERBS:
        kind = _load(name)
        verb = verbs.add_parser(name, help=(inspect.getdoc(kind) or "").partition("\n\n")[0])
        _add_arguments(verb, kind)
    return parser


def _add_arguments(parser: Parser, kind: type) -> None:
    for each in (kind, _OfEveryVerb):
        parser.add_fields(parser, each, _option_default_text)


def _given(
    parser: Parser, parse: Callable[[Sequence[str]], tuple[Namespace, list[str]]], arguments: Sequence[str]
) -> dict[str, Any]:
    """Return what `parse_verb`, a method of `parser`, finds. Raise ConfigError, for unknown options first."""
    try:
        values, rest = parse(arguments)
        if not rest:
            return vars(values)
        finding = f"expected no further argument, found {' '.join(rest)}"
    except ConfigError as error:
        finding = str(error)
    finding = _unknown_options(arguments, parser) or finding
    raise ConfigError(f"{finding}; see {parser.prog} --help")


def _unknown_options(arguments: Sequence[str], parser: Parser) -> str:
    """Return a finding about the options in `arguments` that `parser` does not know, with the fix; empty for none."""
    given = [each.partition("=")[0] for each in arguments if re.match("--?[a-zA-Z]", each)]
    unknown = [option for option in given if option not in parser.known]
    near = difflib.get_close_matches(unknown[0], parser.known, n=1) if len(unknown) == 1 else []
    hint = f"; the nearest is {near[0]}" if near else ""
    return f"unrecognized options: {', '.join(unknown)}{hint}" if unknown else ""


def _option_default_text(default: object) -> str:
    """Return what the help of an option says of its default: nothing of one that switches something off."""
    return f"(default: {default})" if default and default is not dataclasses.MISSING else ""


def _load(name: str) -> Any:
    module, _, kind = VERBS[name].partition(":")
    return getattr(importlib.import_module(module), kind)


def _unknown_verb(name: str) -> str:
    what = f"there is no verb {name!r}" if name else "no verb is given"
    near = difflib.get_close_matches(name, VERBS, n=1)
    fix = f", did you mean {near[0]}?" if near else f": expected one of {', '.join(VERBS)}; see {PROGRAM} --help"
    return what + fix
