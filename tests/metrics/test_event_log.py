import json
import logging
from pathlib import Path

import pytest

from torchtitan_lite.event_lines import Recorded
from torchtitan_lite.events import LoadStarted, Resumed
from torchtitan_lite.json_lines import JsonLines, whole_lines

FULL_DEVICE = Path("/dev/full")


def test_an_event_is_one_line_with_its_time_and_figures(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "events.jsonl")
    for event in (LoadStarted(500, path="outputs/checkpoint/step-500", origin="disk"), Resumed(300)):
        log.append(Recorded(1700000000.25, event).to_record())
    first, second = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert first == {
        "event": "load_started",
        "step": 500,
        "time": 1700000000.25,
        "path": "outputs/checkpoint/step-500",
        "origin": "disk",
    }
    assert second == {"event": "resumed", "step": 300, "time": 1700000000.25}, "a figure that is not known is left out"


def test_events_of_a_restart_follow_those_before(tmp_path: Path) -> None:
    for step in (1, 2):
        log = JsonLines(tmp_path / "events.jsonl")
        log.append(Recorded(1.0, Resumed(step)).to_record())
        log.close()
        log.close()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_an_event_after_a_torn_line_is_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "save_started", "st')
    JsonLines(path).append(Recorded(1.0, Resumed(7)).to_record())
    torn, whole = path.read_text().splitlines()
    assert torn == '{"event": "save_started", "st'
    assert json.loads(whole)["event"] == "resumed"


@pytest.mark.skipif(not FULL_DEVICE.exists(), reason="needs a device that is always full")
def test_a_full_disk_is_a_warning_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("torchtitan_lite").addHandler(caplog.handler)
    lines = JsonLines(FULL_DEVICE)
    lines.append({"step": 1})
    lines.close()
    logging.getLogger("torchtitan_lite").removeHandler(caplog.handler)
    assert "Could not write a line to /dev/full" in caplog.text


def test_only_complete_objects_are_complete_lines() -> None:
    data = b'{"step": 1}\n[2]\nnonsense\n{"step": 3}\n{"step": 4}'
    assert [record for _, record in whole_lines(data)] == [{"step": 1}, {"step": 3}]
