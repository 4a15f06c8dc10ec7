"""Count the words of the documentation that people wrote.

    python scripts/count_words.py

Left out are generated pages, what stands between marks that name the program that writes it, and blocks of output.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED_PAGES = frozenset({"api.md", "config.md", "what_resumes.md"})
"""By scripts/generate_api_reference.py, scripts/generate_config_reference.py and `python -m tests.zoo`."""
_GENERATED = re.compile(r"<!-- (\w+): .*? -->.*?<!-- end of \1 -->|^```text$.*?^```$", re.DOTALL | re.MULTILINE)


def words_of(page: str) -> tuple[int, int]:
    """Return how many words the text `page` has, and how many of these were written by hand."""
    return len(page.split()), len(_GENERATED.sub("", page).split())


def main() -> None:
    """Print a line for each page, and the sums."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    sums = [0, 0]
    print(f"{'page':<24}{'words':>8}{'by hand':>9}")
    for page in pages:
        total, by_hand = words_of(page.read_text(encoding="utf-8"))
        by_hand = 0 if page.name in GENERATED_PAGES else by_hand
        sums = [sums[0] + total, sums[1] + by_hand]
        print(f"{page.name:<24}{total:>8,}{by_hand:>9,}")
    print(f"{f'{len(pages)} pages':<24}{sums[0]:>8,}{sums[1]:>9,}")


if __name__ == "__main__":
    main()
