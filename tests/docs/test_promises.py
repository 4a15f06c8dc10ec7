"""Every promise about checkpoints names the tests that hold it, and these are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "commit_protocol.md"
HELD_BY = re.compile(r"\[(test_\w+)\]\((\.\./tests/[\w/]+\.py)\)")


def promises() -> list[str]:
    """The items of the lists under the heading of promises."""
    _, _, below = PAGE.read_text(encoding="utf-8").partition("\n## Promises\n")
    section, heading, _ = below.partition("\n## ")
    assert heading, "the promises are one section of several"
    return re.findall(r"^- .*(?:\n  .*)*", section, re.MULTILINE)


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise[2:50])
def test_every_promise_is_held_by_tests_that_are_there(promise: str) -> None:
    links = HELD_BY.findall(promise)
    assert links, "no test is named"
    for name, file in links:
        module = ast.parse((PAGE.parent / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}, f"{file} has no {name}"


def test_no_link_to_a_test_is_spelt_otherwise() -> None:
    text = PAGE.read_text(encoding="utf-8")
    in_promises = sum(len(HELD_BY.findall(promise)) for promise in promises())
    assert len(re.findall(r"\]\([^)]*tests/", text)) == in_promises >= 40
