"""The page in a real browser: no errors, the numbers of the files, and nothing cut off, on a wide and a narrow screen.

The browser is Debian's chromium (`apt-get install chromium`). It measures a copy of the page, framed at each width by a
script of the test; the page itself has none.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.draw_report import BROWSERS
from tests.cli.command import command
from tests.report.histories import CONFIG, copy_of, killed_and_resumed
from torchtitan_lite.report.page import render_page
from torchtitan_lite.report.run import read_run

CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = [
    pytest.mark.slow,  # Seven starts of a browser: about 10 s.
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; on Debian: apt-get install chromium"),
]
ROOT = Path(__file__).parents[2]
WIDTHS = (1280, 400)
MEASURE = """
<script>
const results = [];
addEventListener('load', () => {
 for (const frame of document.querySelectorAll('iframe')) {
  const page = frame.contentDocument, width = page.documentElement.clientWidth;
  const seen = [...page.querySelectorAll('svg text, h1, h2, .tiles dd, .status, figcaption span')]
    .filter(each => !each.closest('.wide') && getComputedStyle(each).display !== 'none');
  const outside = seen.filter(each => {
    const box = each.getBoundingClientRect();
    return box.width > 0 && (box.left < 0 || box.right > width + 0.5);
  });
  const ticks = [...page.querySelectorAll('svg.fluid')].flatMap(svg => {
    const found = [...svg.querySelectorAll('text.tick')].map(each => each.getBoundingClientRect());
    const boxes = found.filter(box => box.width);
    return boxes.filter((box, index) => boxes.some((other, at) => at > index && box.left < other.right - 1 &&
      other.left < box.right - 1 && box.top < other.bottom - 3 && other.top < box.bottom - 3));
  });
  results.push({
    width, scrolls: page.documentElement.scrollWidth > width,
    outside: outside.map(each => each.textContent), covered: ticks.length, texts: seen.length,
    colour: getComputedStyle(page.body).backgroundColor,
    values: Object.fromEntries([...page.querySelectorAll('.tiles data')].map(each => [each.className, each.value])),
    bytes: [...page.querySelectorAll('.saves data.bytes')].map(each => each.value),
  });
 }
 document.getElementById('results').textContent = JSON.stringify(results);
});
</script>
"""


def browse(path: Path, *options: str) -> tuple[str, str]:
    """Return the document as the browser has it in the end, and its log."""
    assert CHROMIUM is not None
    profile = path.parent / f"profile{len(list(path.parent.iterdir()))}"
    done = subprocess.run(
        [
            *(
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--enable-logging=stderr",
                "--v=0",
            ),
            *(f"--user-data-dir={profile}", *options, "--dump-dom", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout, done.stderr


def measured(pages: list[str], folder: Path, *options: str) -> list[dict[str, Any]]:
    """Return what the browser measures of each page at each width; no console may have a line."""
    frames = "".join(
        f'<iframe width="{width}" height="900" srcdoc="{html.escape(page)}"></iframe>'
        for page in pages
        for width in WIDTHS
    )
    path = folder / "framed.html"
    path.write_text(f'<!DOCTYPE html><meta charset="utf-8"><pre id="results"></pre>{frames}{MEASURE}', encoding="utf-8")
    document, log = browse(path, *options)
    assert "CONSOLE" not in log, log
    found = re.search(r'<pre id="results">(.*?)</pre>', document, re.DOTALL)
    assert found is not None and found[1], document[:2000]
    results: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed_and_resumed(tmp_path_factory.mktemp("runs") / "resumed")


def test_the_console_stays_empty_and_the_numbers_are_those_of_the_files(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(render_page([read_run(str(folder))]), encoding="utf-8")
    document, log = browse(path)
    assert "CONSOLE" not in log, log
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    committed = [event for event in events if event["event"] == "committed"]
    assert f'<data class="loss" value="{last["loss_metrics/global_avg_loss"]}">' in document
    assert re.findall(r'<data class="blocked" value="([^"]+)"', document) == [
        str(event["stall_seconds"]) for event in committed
    ]


def test_nothing_is_cut_off_or_covered_on_a_wide_and_a_narrow_screen(folder: Path, tmp_path: Path) -> None:
    other = copy_of(folder, tmp_path / "a_run_with_quite_a_long_name_as_sweeps_give_them")
    (other / "config.json").write_text(json.dumps(CONFIG | {"optimizer": {"lr": 1e-3}}))
    runs = [read_run(str(folder)), read_run(str(other))]
    results = measured([render_page(runs[:1]), render_page(runs)], tmp_path)
    assert sorted(result["width"] for result in results) == [400, 400, 1280, 1280]
    for result in results:
        assert result["texts"] > 40
        assert (result["scrolls"], result["outside"], result["covered"]) == (False, [], 0), result


def test_a_dark_screen_has_a_dark_page(folder: Path, tmp_path: Path) -> None:
    page = render_page([read_run(str(folder))])
    (tmp_path / "light").mkdir()
    (tmp_path / "dark").mkdir()
    light = measured([page], tmp_path / "light", "--blink-settings=preferredColorScheme=1")
    dark = measured([page], tmp_path / "dark", "--blink-settings=preferredColorScheme=0")
    assert {result["colour"] for result in light} == {"rgb(246, 247, 248)"}
    assert {result["colour"] for result in dark} == {"rgb(14, 17, 20)"}
    assert light[0]["values"] == dark[0]["values"]


def test_pictures_show_the_complete_page_in_both_schemes(folder: Path, tmp_path: Path) -> None:
    assert command("report", folder, tmp_path / "r.html").code == 0
    subprocess.run([sys.executable, ROOT / "scripts" / "draw_report.py", tmp_path / "r.html"], check=True)
    for path in (tmp_path / "r.light.png", tmp_path / "r.dark.png"):
        head = path.read_bytes()[:24]
        width, height = struct.unpack(">II", head[16:24])
        assert head.startswith(b"\x89PNG") and width == 1280 and 1800 < height < 4000
