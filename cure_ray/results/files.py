"""Files under one root, local or any fsspec URI: atomic writes that are read back, JSON, listings."""

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from cure_ray.errors import UserError, storage_full


@contextlib.contextmanager
def _sentences(root: str) -> Iterator[None]:
    """What file systems raise about a place that cannot be used, as a sentence. Each has errors of its own; a full disk is told apart."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if storage_full(error):
            raise
        why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise UserError(f"{root} cannot be used for results: {why}. Give a directory, or a URL that fsspec can write to") from error


class Files:
    """Names are relative to the root and use forward slashes."""

    def __init__(self, root: str | Path) -> None:
        self.root = str(root).rstrip("/") or "/"
        with _sentences(self.root):
            self.fs, self.path = fsspec.core.url_to_fs(self.root)

    def prepare(self) -> None:
        """UserError unless files can be written here."""
        with _sentences(self.root):
            if self.fs.exists(self.path) and not self.fs.isdir(self.path):
                raise UserError(f"{self.root} is a file; results need a directory")
            self.write_bytes(".writable", b"")
            self.remove(".writable")

    def exists(self, name: str) -> bool:
        return bool(self.fs.exists(self.at(name)))

    def remove(self, name: str) -> None:
        if self.exists(name):
            self.fs.rm_file(self.at(name))

    def at(self, name: str) -> str:
        return f"{self.path}/{name}"

    def names(self, folder: str, ending: str) -> list[str]:
        path = self.at(folder) if folder else self.path
        if not self.fs.isdir(path):
            return []
        self.fs.invalidate_cache()
        return sorted(n for p in self.fs.ls(path, detail=False) if (n := str(p).rstrip("/").rsplit("/", 1)[-1]).endswith(ending))

    def read_bytes(self, name: str) -> bytes:
        data: bytes = self.fs.cat_file(self.at(name))
        return data

    def write_bytes(self, name: str, data: bytes) -> None:
        """Atomically, and only after the bytes have been read back as they were written."""
        folder, file = name.rsplit("/", 1) if "/" in name else ("", name)
        temporary = f"{folder}/.{file}.{uuid.uuid4().hex[:8]}.partial".lstrip("/")
        self.fs.makedirs(self.at(folder).rstrip("/"), exist_ok=True)
        try:
            self.fs.pipe_file(self.at(temporary), data)
            if self.read_bytes(temporary) != data:
                raise OSError(f"{self.root}/{temporary} reads back differently from what was written: check the disk")
            if isinstance(self.fs, LocalFileSystem):
                os.replace(self.at(temporary), self.at(name))
            else:
                self.fs.mv(self.at(temporary), self.at(name))
        except BaseException:
            if self.fs.exists(self.at(temporary)):
                self.fs.rm_file(self.at(temporary))
            raise

    def read_json(self, name: str) -> dict[str, Any] | None:
        if not self.fs.exists(self.at(name)):
            return None
        try:
            value: Any = json.loads(self.read_bytes(name))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.root}/{name} is damaged: {error}") from error
        if not isinstance(value, dict):
            raise UserError(f"{self.root}/{name} is damaged: it holds {type(value).__name__}, not an object of named values")
        return value

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.write_bytes(name, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())
