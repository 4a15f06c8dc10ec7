"""The name of an object, shaped as a path for what takes paths: readers, messages and faults.

Its last part is its name, and its string is the address, of which a path alone would drop a "/".
"""

from __future__ import annotations

from pathlib import PosixPath


class ObjectPath(PosixPath):
    """A path that no file system has: s3://bucket/run/step-5.0123456789abcdef/__0_0.distcp."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)
