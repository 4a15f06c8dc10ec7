"""What a person means by an address: a folder of checkpoints in an object store, or one of them.

A step is spelt s3://bucket/run:10, s3://bucket/run/step-10, or with the name that its prefix has there. Nothing is
sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lite.bucket import naming
from torchtitan_lite.config.address import Address, parse_address
from torchtitan_lite.store import layout

LATEST = "latest"


@dataclass(frozen=True)
class SpeltAddress:
    """A folder, and which checkpoint in it; without a step or a name, the latest or all of them."""

    folder: Address
    step: int | None = None
    name: str = ""
    """Of the prefix of one save of a step."""
    is_latest: bool = False

    @property
    def is_step(self) -> bool:
        """Return whether it names one checkpoint, not its folder."""
        return self.step is not None or bool(self.name) or self.is_latest

    @classmethod
    def of(cls, spelling: str) -> SpeltAddress:
        """Return what `spelling` means. Raises ConfigError for what is no address of a folder."""
        folder, colon, number = spelling.rpartition(":")
        # Not in the part with the bucket, where a number would be a port, or a secret.
        if colon and "/" in folder.partition("://")[2]:
            if number == LATEST:
                return cls(parse_address(folder), is_latest=True)
            if number.isascii() and number.isdecimal():
                return cls(parse_address(folder), int(number))
        folder, _, name = spelling.removesuffix("/").rpartition("/")
        if (step := layout.parse_step(name)) is not None:
            return cls(parse_address(folder), step)
        if naming.parse_attempt(name) is not None:
            return cls(parse_address(folder), name=name)
        return cls(parse_address(spelling))
