"""Every warning and error is on its page, as a template of what the code makes."""

from __future__ import annotations

import ast
import re

import pytest

from scripts import generate_message_reference
from scripts.generate_message_reference import PACKAGE, PAGE, Message, messages

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_has_what_the_code_says() -> None:
    assert generate_message_reference.render(TEXT) == TEXT, "run: python scripts/generate_message_reference.py"


def test_a_page_without_the_place_for_messages_is_refused() -> None:
    begin, end = generate_message_reference.BEGIN, generate_message_reference.END
    for page in ("", begin, end, TEXT.replace(begin, "")):
        with pytest.raises(ValueError, match="the page lacks"):
            generate_message_reference.render(page)


def test_every_module_that_warns_and_every_class_of_errors_with_a_text_is_there() -> None:
    warning = re.compile(r"logger\.warning\(\s*f?\"\w")
    warns = {path for path in PACKAGE.rglob("*.py") if warning.search(path.read_text(encoding="utf-8"))}
    modules = {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in warns}
    assert len(modules) > 50 and modules <= {message.module for message in messages() if message.kind == "warning"}
    tree = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    says = re.compile(r"super\(\).__init__\(|self\._say\(")
    framed = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and says.search(ast.unparse(node)) and node.name != "TorchtitanLiteError"
    }
    assert framed == {message.kind for message in messages() if message.module == "errors"}


def test_a_message_is_a_template() -> None:
    source = """
LIMIT = "at most 3"

def check(name, size, is_new):
    finding = "is missing" if size is None else f"has {size} bytes"
    if is_new:
        raise ConfigError(f"{name.path} {finding}. Expected {LIMIT}, " + "found more.")
    logger.warning("Could not write %s after %.0f s: %r", name.path, len(size), is_new)
    raise ValueError(name)
"""
    found = generate_message_reference.messages_of(ast.parse(source), "store/limits", frozenset({"ConfigError"}))
    assert {*found} == {
        Message("store", "Could not write {path} after {size} s: {is new}", "warning", "store/limits"),
        Message(
            "store",
            "{path} [is missing / has {size} bytes]. Expected at most 3, found more.",
            "ConfigError",
            "store/limits",
        ),
    }
