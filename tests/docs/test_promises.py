"""Every promise about checkpoints names the tests that check it, and these tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "commit_protocol.md"
HELD_BY = re.compile(r"\[(test_\w+)\]\((\.\./tests/[\w/]+\.py)\)")


def promises() -> list[str]:
    """Return the items of the lists under the heading Promises."""
    _, _, below = PAGE.read_text(encoding="utf-8").partition("\n## Promises\n")
    section, heading, _ = below.partition("\n## ")
    assert heading, "another section follows the promises"
    return re.findall(r"^- .*(?:\n  .*)*", section, re.MULTILINE)


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise[2:50])
def test_every_promise_is_checked_by_existing_tests(promise: str) -> None:
    links = HELD_BY.findall(promise)
    assert links, "no test is named"
    for name, file in links:
        module = ast.parse((PAGE.parent / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}, f"{file} has no {name}"


def test_every_link_to_a_test_has_the_form_of_a_promise() -> None:
    text = PAGE.read_text(encoding="utf-8")
    in_promises = sum(len(HELD_BY.findall(promise)) for promise in promises())
    assert len(re.findall(r"\]\([^)]*tests/", text)) == in_promises >= 40
