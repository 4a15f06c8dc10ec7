"""Pictures of a page, light and dark, taken by a browser without a screen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from torchtitan_lite.errors import ConfigError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCHEMES = {"light": 1, "dark": 0}
"""Each colour scheme, and the number that the browser has for it."""
WIDTH = 1280
_MAX_SECONDS = 120
_MAX_HEIGHT = 16_000
_MEASURE = "<script>document.documentElement.dataset.height = document.documentElement.offsetHeight</script>"


def find_browser() -> str:
    """Return the path of the browser. Raises ConfigError if there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise ConfigError(
            f"--png needs a browser, and found none of {', '.join(BROWSERS)}: install one, on Debian with "
            "apt-get install chromium, or leave --png out"
        )
    return found


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
    """Return what the browser prints. Raises ConfigError if it ends with an error or takes too long."""
    command = [browser, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"]
    if os.geteuid() == 0:
        command.append("--no-sandbox")  # Chromium refuses to run as root with it. The page is our own.
    try:
        done = subprocess.run(
            [*command, *options, page.as_uri()], capture_output=True, text=True, check=True, timeout=_MAX_SECONDS
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise ConfigError(f"--png: {browser} could not show the page: {error}; leave --png out") from error
    return done.stdout
