"""`report`: one HTML page about a run, or about two side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torchtitan_lite.cli.named_checkpoint import local
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.config.argument_parser import Option, Positional
from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import counted, readable_bytes
from torchtitan_lite.report.page import render_page
from torchtitan_lite.report.run import read_run


@dataclass(frozen=True)
class Report:
    """Write one HTML page about a run: loss, time, checkpoints, configuration.

    The run may be under way; nothing of it is changed. The page needs no network
    and has no script in it.
    """

    run_folder: Annotated[str, Positional("DUMP_FOLDER")]
    """The dump folder of the run."""
    out: Annotated[str, Positional("OUT.html")] = "report.html"
    """The file to write; a page that is there is replaced."""
    compare_with: Annotated[str, Option("DUMP_FOLDER")] = ""
    """The dump folder of a second run, to show side by side."""

    def run(self, screen: Screen) -> None:
        out = Path(self.out)
        if out.suffix not in (".html", ".htm"):
            raise ConfigError(f"OUT {self.out}: expected a name that ends in .html; --compare-with names a second run")
        if not out.absolute().parent.is_dir():
            raise ConfigError(f"OUT {self.out}: there is no folder {out.parent}")
        runs = [read_run(str(local(folder, "report"))) for folder in (self.run_folder, self.compare_with) if folder]
        page = render_page(runs).encode()
        DISK.write_atomically(out, page)
        num_steps = sum(len(run.logged) for run in runs)
        document = {
            "out": str(out),
            "bytes": len(page),
            "runs": [
                {"folder": str(run.folder), "status": run.status, "last_step": run.last_step, "starts": len(run.starts)}
                for run in runs
            ],
        }
        screen.show(document, lambda: f"{out}: {readable_bytes(len(page))}, {counted(num_steps, 'logged step')}")
