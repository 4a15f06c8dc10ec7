"""From a command line to a `JobConfig`: command line > TOML > default.

tyro is the one parser. What a TOML file says becomes arguments that stand before the command line's, so
that both are held to the same rules. Whoever was overridden is not asked whether it was right, but for
its name and its kind: a torchtitan TOML loads once its data set and tokenizer are replaced.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterable, Sequence

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.config.keys import KEYS
from torchtitan_lite.config.kinds import split
from torchtitan_lite.config.sources import Setting, find_config_file, read_command_line, read_toml
from torchtitan_lite.config.unsupported import UNSUPPORTED
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger

_DESCRIPTION = "Train a Llama. Command line > TOML file (--job.config_file) > default."
_registry = ConstructorRegistry()


def parse_config(argv: Sequence[str]) -> JobConfig:
    """The configuration that `argv` and its --job.config_file ask for. ConfigError says what is wrong with them.

    `--help` prints every key and ends the process with 0.
    """
    if "--help" in argv or "-h" in argv:
        return _parse(["--help"])
    given = read_command_line(argv)
    file = {setting.key: setting.text for setting in given}.get("job.config_file")
    in_file = read_toml(find_config_file(file)) if file is not None else []
    last = {setting.key: setting for setting in (*in_file, *given)}
    config = _parse(_arguments(_without_unsupported(last.values())))
    exports = config.checkpoint.model_weights_only or config.checkpoint.export_folder
    if config.checkpoint.export_dtype != "float32" and not exports:
        logger.warning("checkpoint.export_dtype has no effect without checkpoint.model_weights_only")
    return config


def parse_config_or_exit(argv: Sequence[str]) -> JobConfig:
    """As `parse_config`; wrong usage is one message on stderr and exit code 2."""
    try:
        return parse_config(argv)
    except ConfigError as error:
        sys.stderr.write(f"ConfigError: {error}\n")
        raise SystemExit(2) from None


def config_json(config: JobConfig) -> str:
    """The resolved configuration as JSON text: sections and keys in the order of `JobConfig`, a newline at the end."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def _without_unsupported(settings: Iterable[Setting]) -> list[Setting]:
    """The settings of keys that are here; the others must leave their feature off, and are named in one line."""
    here, ignored = [], []
    for setting in settings:
        if setting.key in KEYS:
            here.append(setting)
        else:
            UNSUPPORTED[setting.key].check(setting.key, setting.text, setting.where)
            ignored.append(setting.key)
    if ignored:
        logger.info("Keys of features that are not here, accepted because they are off: %s", ", ".join(ignored))
    return here


def _arguments(settings: Iterable[Setting]) -> list[str]:
    """`--section.key=value`, the form that keeps a value which begins with a hyphen."""
    arguments = []
    for setting in settings:
        section, _, name = setting.key.partition(".")
        text = KEYS[setting.key].checked(setting.text, setting.key, setting.where)
        if KEYS[setting.key].base is bool:
            arguments.append(f"--{section}.{name}" if text == "true" else f"--{section}.no_{name}")
        else:
            arguments.append(f"--{setting.key}={text}")
    return arguments


def _parse(arguments: list[str]) -> JobConfig:
    """tyro's answer. Its boxed report is kept back: a `ConfigError` of our own rules says the same in one line."""
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            return tyro.cli(
                JobConfig,
                args=arguments,
                use_underscores=True,
                registry=_registry,
                prog="train.py",
                description=_DESCRIPTION,
            )
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise _our_error(leaving) or ConfigError(report.getvalue().strip()) from None


def _our_error(error: BaseException | None) -> ConfigError | None:
    """The `ConfigError` that led to `error`: tyro turns it into a report and an exit."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return error


@_registry.primitive_rule
def _names(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[str, ...]] | None:
    """Lists of names are one argument, separated by commas or spaces."""
    if info.type != tuple[str, ...]:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B,...",
        instance_from_str=lambda texts: split(texts[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda names: [",".join(names)],
    )
