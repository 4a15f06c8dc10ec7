"""Write docs/config.md from the dataclasses of the configuration."""

from __future__ import annotations

from pathlib import Path

from torchtitan_lite.config.reference import render_reference

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"

if __name__ == "__main__":
    PAGE.write_text(render_reference(), encoding="utf-8")
