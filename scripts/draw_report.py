"""Draw a page of `torchtitan-lite report` as PAGE.light.png and PAGE.dark.png, with a browser without a screen.

python scripts/draw_report.py PAGE.html
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCHEMES = {"light": 1, "dark": 0}
"""Each colour scheme, and the number that the browser has for it."""
WIDTH = 1280
_MAX_SECONDS = 120
_MAX_HEIGHT = 16_000
_MEASURE = "<script>document.documentElement.dataset.height = document.documentElement.offsetHeight</script>"


def main() -> None:
    page = Path(sys.argv[1])
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"expected one of {', '.join(BROWSERS)}, found none. On Debian: apt-get install chromium")
    for scheme, picture in pictures(page.read_text(encoding="utf-8"), browser).items():
        page.with_suffix(f".{scheme}.png").write_bytes(picture)


def pictures(page: str, browser: str) -> dict[str, bytes]:
    """Return a PNG of the complete `page` in each colour scheme, `WIDTH` pixels wide."""
    with tempfile.TemporaryDirectory(prefix="report-") as name:
        folder = Path(name)
        measured = folder / "measured.html"
        measured.write_text(page + _MEASURE, encoding="utf-8")
        document = _run_browser(browser, folder, measured, f"--window-size={WIDTH},800", "--dump-dom")
        found = re.search(r'data-height="(\d+)"', document)
        height = min(_MAX_HEIGHT, int(found[1])) if found is not None else 800
        plain = folder / "page.html"
        plain.write_text(page, encoding="utf-8")
        taken = {}
        for scheme, number in SCHEMES.items():
            shot = folder / f"{scheme}.png"
            colours = f"--blink-settings=preferredColorScheme={number}"
            _run_browser(browser, folder, plain, f"--window-size={WIDTH},{height}", colours, f"--screenshot={shot}")
            taken[scheme] = shot.read_bytes()
        return taken


def _run_browser(browser: str, folder: Path, page: Path, *options: str) -> str:
    """Return what the browser prints."""
    command = [browser, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"]
    if os.geteuid() == 0:
        command.append("--no-sandbox")  # Chromium refuses to run as root with it. The page is our own.
    shown = [*command, *options, page.as_uri()]
    return subprocess.run(shown, capture_output=True, text=True, check=True, timeout=_MAX_SECONDS).stdout


if __name__ == "__main__":
    main()
