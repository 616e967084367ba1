"""The process beside an embedded Ray session: when its driver ends, in whatever way, nothing of the session stays behind.

Ray's own agents notice a killed driver after half a minute or more, and nobody removes its files. Started as a script, without this
package or any other: DIRECTORY DRIVER_PID, and a pipe as standard input whose end is the driver's.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

LOOK_SECONDS = 1.0  # a forked child of the driver may hold the pipe open after it
PATIENCE_SECONDS = 10.0


def belongs(process: Path, directory: str) -> bool:
    """Whether a process is one of the session's: it holds one of its files open, or its command line names one.

    Titles of Ray's processes overwrite their command lines and environments, so open files come first. The driver's log does not
    count: whatever the driver forks holds it too.
    """
    try:
        targets = [os.readlink(descriptor) for descriptor in (process / "fd").iterdir()]
        return any(t.startswith(directory + "/") and "/python-core-driver" not in t for t in targets) or (
            directory + "/" in (process / "cmdline").read_bytes().decode(errors="replace")
        )
    except OSError:  # gone
        return False


def members(directory: str, spared: frozenset[int]) -> list[int]:
    """Process ids of the session, where /proc tells."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) not in spared and belongs(process, directory):
            found.append(int(process.name))
    return found


def finish(directory: str, spared: frozenset[int]) -> None:
    """Kill what is left of the session and remove its directory."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        left = members(directory, spared)
        if not left:
            break
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.05)
    shutil.rmtree(directory, ignore_errors=True)


def last_word(driver: int) -> None:
    """For a driver that cannot speak any more: killed, or ended by Ray's library, which does so when a server of the session is gone."""
    cursor = "\x1b[?25h\r\n" if sys.stderr.isatty() else ""  # a bar may have hidden it
    with contextlib.suppress(OSError):
        print(
            f"{cursor}process {driver} ended at once: it was killed, or a process of its Ray session was (often for lack of memory). "
            "What it had finished is kept; run the same command again to continue.",
            file=sys.stderr,
            flush=True,
        )


def main(directory: str, driver: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # batch systems send them to everybody; we go when the driver has gone
    said = b""  # a driver that ends in its own way says so before it closes the pipe
    while os.getppid() == driver and not said:
        if select.select([0], [], [], LOOK_SECONDS)[0]:
            said = os.read(0, 1)
            if not said:
                break
    if not said and select.select([0], [], [], 0)[0]:
        said = os.read(0, 1)
    if not said:
        last_word(driver)
    finish(directory, frozenset({os.getpid(), driver}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
