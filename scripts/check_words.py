"""Find words that this project does not use, and print what it says instead.

    python scripts/check_words.py [FILE ...]        without arguments: every text file that git tracks

One meaning has one word, and it is the one that the field uses. Exits with 1 if any line has another. A line that
must keep such a word, a quotation for one, ends in `words: kept`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

INSTEAD = {
    r"mend(s|ed|ing)?": "fix",
    r"leavings": "leftovers",
    r"tell(s|ing)?|told": "report, log, print, say",
    r"(is|are|was|were|be|been|being) asked": "name who asks whom",
    r"anew|afresh": "again, from scratch",
    r"nobody|somebody": "no process, no rank; another job",
    r"(stands?|stood|standing) still": "blocked, blocks",
    r"pass(es|ed|ing)? over": "skip",
    r"(go|goes|going|went) back": "roll back",
    r"upkeep": "housekeeping, cleanup",
    r"restless": "volatile",
    r"newest": "latest",
    r"patiently": "with retries",
    r"foreign (key|section|feature)s?": "unsupported",
    r"called so|so called": "name it",
    r"beside": "next to, alongside, while",
    r"(go|goes|going|went) on": "continue",
    r"so many": "that many, N",
    r"of before": "earlier, previous, same",
    r"gets? on|got on|getting on": "progress, continue",
    r"(gets?|got|on its way) back to there|is on its way back": "finish the rollback",
}
SUFFIXES = {".md", ".py", ".sh", ".toml", ".yaml"}
KEPT = "words: kept"


def main(paths: list[str]) -> int:
    found = [line for path in (paths or _tracked()) for line in _findings(Path(path))]
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True)
    return [path for path in listed.stdout.splitlines() if Path(path).suffix in SUFFIXES and Path(path).exists()]


def _findings(path: Path) -> Iterator[str]:
    if path.name == Path(__file__).name:
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.rstrip().endswith((KEPT, f"{KEPT} -->")):
            continue
        for words, instead in INSTEAD.items():
            # Names of tests are sentences, so an underscore parts words, too.
            for match in re.finditer(rf"(?<![^\W_])({words})(?![^\W_])", line.replace("_", " "), re.IGNORECASE):
                yield f"{path}:{number}: {match.group(1)!r}: say {instead}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
