"""Directories and fsspec's file systems under the contract of places for results."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from cure_ray.testing.storage import StorageContract


class TestDirectory(StorageContract):
    def place(self, directory: Path) -> str:
        return str(directory / "store")


class TestMemory(StorageContract):
    @pytest.fixture(autouse=True)
    def _emptied(self) -> Iterator[None]:
        self.bucket = uuid.uuid4().hex
        yield
        fsspec.filesystem("memory").rm(f"/{self.bucket}", recursive=True)

    def place(self, directory: Path) -> str:
        return f"memory://{self.bucket}/store"
