"""From a command line to a `JobConfig`: command line > TOML > default.

tyro is the only parser. The keys of a TOML file become arguments before those of the command line, so that both follow
the same rules. Of a setting that is overridden only the name and the kind are checked, not the value: a torchtitan TOML
loads once the command line replaces its dataset and tokenizer.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterable, Sequence

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from torchtitan_lite.config.help_texts import LikeStdout, add_help_texts
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.config.keys import KEYS
from torchtitan_lite.config.kinds import split
from torchtitan_lite.config.sources import Setting, find_config_file, named_model, read_command_line, read_toml
from torchtitan_lite.config.torchtitan_values import check_family, with_datasets
from torchtitan_lite.config.unsupported import UNSUPPORTED
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import forget_stdout, logger

_DESCRIPTION = "Train a Llama. Command line > TOML file (--job.config_file) > default."


def parse_config(argv: Sequence[str]) -> JobConfig:
    """Return the configuration of `argv` and its --job.config_file. Raise ConfigError for wrong usage.

    `--help` prints every key and exits with 0.
    """
    if "--help" in argv or "-h" in argv:
        return _parse(["--help"], with_help_texts=True)
    check_family(named_model(argv))  # A TOML of another family has other keys, too.
    given = read_command_line(argv)
    file = {setting.key: setting.text for setting in given}.get("job.config_file")
    in_file = read_toml(find_config_file(file)) if file is not None else []
    last = {setting.key: setting for setting in (*in_file, *given)}
    config = _parse(_arguments(_without_unsupported(with_datasets(last).values())))
    section = config.checkpoint
    exports = section.model_weights_only or section.export_folder or section.last_save_in_hf
    if section.export_dtype != "float32" and not exports:
        logger.warning(
            "checkpoint.export_dtype has no effect without checkpoint.model_weights_only, export_folder or "
            "last_save_in_hf"
        )
    return config


def parse_config_or_exit(argv: Sequence[str]) -> JobConfig:
    """Return as `parse_config` does; for wrong usage print one message on stderr and exit with 2.

    Exit with 1, silently, if the reader of --help has seen enough.
    """
    try:
        return parse_config(argv)
    except BrokenPipeError:
        forget_stdout()
        raise SystemExit(1) from None
    except ConfigError as error:
        sys.stderr.write(f"ConfigError: {error}\n")
        raise SystemExit(2) from None


def config_json(config: JobConfig) -> str:
    """Return the configuration as JSON text, in the order of `JobConfig`, with a newline at the end."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def _without_unsupported(settings: Iterable[Setting]) -> list[Setting]:
    """Return the settings of supported keys. Raise ConfigError if another one turns its feature on; log the rest."""
    supported, ignored = [], []
    for setting in settings:
        if setting.key in KEYS:
            supported.append(setting)
        else:
            UNSUPPORTED[setting.key].check(setting.key, setting.text, setting.where)
            ignored.append(setting.key)
    if ignored:
        logger.info("Ignored keys of unsupported features, which are off: %s", ", ".join(ignored))
    return supported


def _arguments(settings: Iterable[Setting]) -> list[str]:
    """Return `--section.key=value` for each setting: this form also takes a value that begins with a hyphen."""
    arguments = []
    for setting in settings:
        section, _, name = setting.key.partition(".")
        text = KEYS[setting.key].checked(setting.text, setting.key, setting.where)
        if KEYS[setting.key].base is bool:
            arguments.append(f"--{section}.{name}" if text == "true" else f"--{section}.no_{name}")
        else:
            arguments.append(f"--{setting.key}={text}")
    return arguments


def _parse(arguments: list[str], *, with_help_texts: bool = False) -> JobConfig:
    """Return what tyro parses. Raise the `ConfigError` of our own checks in place of tyro's boxed report and exit."""
    report, help_text = io.StringIO(), LikeStdout()
    try:
        with contextlib.redirect_stderr(report), contextlib.redirect_stdout(help_text):
            return tyro.cli(
                JobConfig,
                args=arguments,
                use_underscores=True,
                registry=_registry(with_help_texts=with_help_texts),
                prog="train.py",
                description=_DESCRIPTION,
            )
    except SystemExit as leaving:
        if not leaving.code:
            sys.stdout.write(help_text.getvalue())
            raise
        raise _our_error(leaving) or ConfigError(report.getvalue().strip()) from None


def _our_error(error: BaseException | None) -> ConfigError | None:
    """Return the `ConfigError` that made tyro exit, or None."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return error


def _registry(*, with_help_texts: bool) -> ConstructorRegistry:
    """Return what tyro needs to know of the kinds of values, and for a help of their texts."""
    registry = ConstructorRegistry()
    registry.primitive_rule(_names)
    registry.primitive_rule(_numbers)
    if with_help_texts:
        add_help_texts(registry, _default_in_words)
    return registry


def _default_in_words(default: object) -> str:
    if isinstance(default, bool):
        return f"({'on' if default else 'off'} by default)"
    if default is None:
        return "(unset by default)"
    text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f"(default: {text})" if text else "(empty by default)"


def _names(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[str, ...]] | None:
    """Make tyro read a list of names from one argument, separated by commas or spaces."""
    if info.type != tuple[str, ...]:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B,...",
        instance_from_str=lambda texts: split(texts[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda names: [",".join(names)],
    )


def _numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[int, ...]] | None:
    """Make tyro read a list of whole numbers in the same way."""
    if info.type != tuple[int, ...]:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="1,2,...",
        instance_from_str=lambda texts: tuple(map(int, split(texts[0]))),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda numbers: [",".join(map(str, numbers))],
    )
