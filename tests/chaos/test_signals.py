"""Certification on a terminal, ended by a signal or a key: it says what is kept, and gives the terminal back as it was."""

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest
from cluster_helpers import tiny

from cure_ray.runs.run import train_run

pytestmark = pytest.mark.chaos
CTRL_C, SHOW_CURSOR = b"\x03", b"\x1b[?25h"


def on_a_terminal(arguments: list[str], end: int | bytes, sign: bytes, seconds: float = 240.0) -> tuple[int, bytes]:
    """Exit code and all that was shown; `end` comes once `sign` was seen."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it, and would hand that on
        os.execv(sys.executable, [sys.executable, "-m", "cure_ray", *arguments])
    shown, deadline, ended = b"", time.monotonic() + seconds, False
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                shown += os.read(terminal, 1 << 16)
            except OSError:  # the other end is closed
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown
        if not ended and sign in shown:
            ended = True
            if isinstance(end, bytes):
                os.write(terminal, end)
            else:
                os.kill(pid, end)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"it did not end:\n{shown[-2000:].decode(errors='replace')}")


@pytest.mark.parametrize(("workers", "end"), [(2, signal.SIGTERM), (2, CTRL_C), (1, CTRL_C)])
def test_certify_on_a_terminal_says_what_it_keeps_when_it_is_ended(tmp_path: Path, workers: int, end: int | bytes) -> None:
    run = train_run(tiny(method="linf", epochs=2), tmp_path / "run", quiet=True).directory
    hard = ["--threats", "linf=0.2,l2=2,l1=8", "--nodes", "100000", "--samples", "60"]
    code, shown = on_a_terminal(
        ["certify", str(run), "--workers", str(workers), *hard, "--out", str(tmp_path / "out")],
        end,
        b"clean ",  # the bar says which stage decided how many
    )
    text = shown.decode(errors="replace")
    assert code == 130, text
    assert f"kept in {tmp_path / 'out'}; run the same command to continue" in text.replace("\r\n", "")
    assert b"certifying" in shown
    assert shown.rindex(SHOW_CURSOR) > shown.rindex(b"certifying")
    assert "Traceback" not in text
