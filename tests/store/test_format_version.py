"""Which versions of the files of a run are read, also by the versions that come after this one."""

from __future__ import annotations

import pytest

from torchtitan_lite.errors import FormatTooNew, FormatTooOld
from torchtitan_lite.store import format_version
from torchtitan_lite.store.format_version import check_format, unknown_fields

RELEASED = {"format_version": 7, "oldest_reader": 7}


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the running version be one that writes format 9."""
    monkeypatch.setattr(format_version, "FORMAT_VERSION", 9)


def test_a_released_version_is_read_by_later_ones(later: None) -> None:
    check_format(RELEASED, "f")
    assert unknown_fields({**RELEASED, "step": 3}, {"step"}) == {}, "written again, it has the version of the writer"


def test_a_later_version_says_what_is_older_and_newer(later: None) -> None:
    with pytest.raises(FormatTooOld, match="from before the first release, whose format is 7"):
        check_format({"format_version": 6}, "f")
    check_format({"format_version": 12, "oldest_reader": 9}, "f")
    with pytest.raises(FormatTooNew, match="reads up to 9"):
        check_format({"format_version": 12, "oldest_reader": 10}, "f")
