"""The journal of a study: one JSON line per change, as Optuna writes it, read without touching it and written so that it heals.

A writer that is killed, or whose disk is full, leaves half a line at the end. It never took effect: readers ignore it, the next writer
cuts it off. Optuna's own file would glue its next line to it, and nobody could open the study any more.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend, JournalFileSymlinkLock

from cure_ray.errors import UserError

Record = dict[str, Any]
OPENING = b'{"op_code":'  # of every record; inside a string its quotes would be escaped


class DamagedJournalError(UserError):
    """A whole line that is no record: no writer of ours leaves that, a disk or an editor may."""

    def __init__(self, path: Path, line: int, content: bytes) -> None:
        super().__init__(
            f"{path}, line {line} is damaged: {content[:60].decode(errors='replace')!r} is no record. Restore the file from a backup, or "
            f"go on with what was noted before that line: cp {path} {path}.damaged && head -n {line - 1} {path}.damaged > {path} "
            "(the study forgets what came later; trained networks stay where they are)"
        )
        self.line = line


class JournalReader(BaseJournalBackend):
    """A journal that is only looked at: its file is opened for reading, and may be in a directory where nothing can be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known = (0, 0)  # lines that were read, and the bytes they take

    def read_logs(self, log_number_from: int) -> Iterator[Record]:
        lines, offset = self.known if self.known[0] <= log_number_from else (0, 0)
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                content = file.read()
        except FileNotFoundError:  # nobody has started it yet
            return
        whole = content[: content.rfind(b"\n") + 1]  # the rest is being written, or its writer is dead
        for line in whole.split(b"\n")[:-1]:
            record = self._record(line, lines + 1)
            lines, offset = lines + 1, offset + len(line) + 1
            if lines > log_number_from:
                self.known = (lines, offset)
                yield record

    def _record(self, line: bytes, number: int) -> Record:
        for text in (line, line[max(0, line.rfind(OPENING)) :]):  # glued to half a line, as older versions could leave it
            with suppress(ValueError):
                record = json.loads(text)
                if isinstance(record, dict) and "op_code" in record:
                    return record
        raise DamagedJournalError(self.path, number, line)

    def append_logs(self, logs: list[Record]) -> None:
        raise PermissionError(f"{self.path} was opened for reading")


class JournalWriter(JournalReader):
    """A journal that several calls write, one at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.together_depth, self.unsynced = 0, False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Lines that are one decision: on the disk for good when the block ends, which is one wait for it instead of one a line.

        Everybody sees them at once, as always. Whoever loses power within the block loses some of them, as if he had been killed there.
        """
        self.together_depth += 1
        try:
            yield
        finally:
            self.together_depth -= 1
            if self.unsynced and not self.together_depth:
                self.unsynced = False
                descriptor = os.open(self.path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def append_logs(self, logs: list[Record]) -> None:
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        # A writer killed between taking the lock and making the file would leave a lock of which Optuna cannot tell the age: for ever.
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666))
        lock = JournalFileSymlinkLock(str(self.path))  # the one Optuna's own writers take
        lock.acquire()
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                _cut_torn_line(descriptor)
                while text:  # a full disk takes a part and refuses the rest: half a line, which the next writer cuts off
                    text = text[os.write(descriptor, text) :]
                self.unsynced = True
                if not self.together_depth:
                    os.fsync(descriptor)
                    self.unsynced = False
            finally:
                os.close(descriptor)
        finally:
            with suppress(RuntimeError):  # held for so long (a stopped process) that somebody took the lock away
                lock.release()


def _cut_torn_line(descriptor: int) -> None:
    end = size = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - 4096)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        end = start + found + 1 if found >= 0 else start
        if found >= 0:
            break
    if end < size:
        os.ftruncate(descriptor, end)
