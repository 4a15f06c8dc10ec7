"""Every promise about checkpoints is on its page, with the tests that are marked to hold it."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from scripts import generate_promises

PAGE = generate_promises.PAGE.read_text(encoding="utf-8")
LINK = re.compile(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\)")


def promises() -> list[str]:
    """Return the items of the lists between the marks."""
    listed = PAGE.partition(generate_promises.BEGIN)[2].partition(generate_promises.END)[0]
    return re.findall(r"^- .*(?:\n  .*)*", listed, re.MULTILINE)


def test_the_page_has_what_the_marks_say() -> None:
    assert generate_promises.render(PAGE) == PAGE, "run: python scripts/generate_promises.py"


def test_a_page_without_the_place_for_promises_is_refused() -> None:
    begin, end = generate_promises.BEGIN, generate_promises.END
    for page in ("", begin, end, PAGE.replace(begin, "")):
        with pytest.raises(ValueError, match="the page lacks"):
            generate_promises.render(page)


def test_every_promise_is_held_by_a_test_and_is_there_once() -> None:
    sentences = Counter(promise.partition("\n")[0] for promise in promises())
    assert {*sentences.values()} == {1}
    assert all(LINK.search(promise) for promise in promises())


def test_every_mark_is_a_sentence_with_a_section_and_leads_to_a_link() -> None:
    marks = generate_promises.marks()
    linked = [link for promise in promises() for link in LINK.findall(promise)]
    assert sorted(linked) == sorted((held.name, held.file) for held in marks)
    assert len(linked) >= 40 and len(re.findall(r"\]\([^)]*tests/", PAGE)) == len(linked)
    assert {held.section for held in marks} == generate_promises.SECTIONS.keys()
    assert all(re.fullmatch(r"[A-Z].*\.", held.promise) for held in marks)
