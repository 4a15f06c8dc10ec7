"""The section [job]: where a job's files are, and its description."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lite.config.field_types import check_types
from torchtitan_lite.config.folders import refuse_address


@dataclass(frozen=True, kw_only=True)
class Job:
    """Where a job reads its configuration and writes its output, and its description."""

    config_file: str | None = None
    """TOML file with these sections; looked up as given, then in train_configs/."""

    dump_folder: str = "./outputs"
    """Folder for everything the run writes, relative to the working directory."""

    description: str = "default job"
    """Free text, logged at start."""

    print_args: bool = False
    """Log the resolved configuration at start."""

    def __post_init__(self) -> None:
        check_types(self, "job")
        refuse_address("job.dump_folder", self.dump_folder, "Name a folder, and copy it when the run is over.")
