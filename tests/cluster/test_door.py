"""Embedded sessions on a machine that is shared: who may come in, what lies open, and what is left when the driver is killed."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray
from cluster_helpers import LOOPBACK, admitted, intrude, listening, replaceable, session_processes, until
from intruder import by_grpc

from cure_ray.cluster.certificate import write_certificate
from cure_ray.cluster.embedded import keep_signals, private_directory
from cure_ray.cluster.session import Session
from cure_ray.errors import UserError

FIXED = {6379, 8265, 10001, 44217, 44227, 52365}  # of a Ray head beside us: GCS, dashboard, client, metrics, agent


def test_no_socket_of_a_session_lets_in_who_has_no_token(ray_session: Session, tmp_path: Path) -> None:
    """Agents, workers, GCS, raylet, object store and driver: over HTTP, every gRPC method, TLS, redis and unix sockets, as `nobody`."""
    assert ray.get(ray.remote(lambda: 1).remote()) == 1
    assert ray_session.directory is not None
    doors, touched = (
        listening(session_processes(ray_session.directory, os.getpid())),
        Path(tempfile.gettempdir()) / f"intruder-{os.getpid()}",
    )
    assert len(doors.tcp) >= 7
    assert {interface for interface, _ in doors.tcp} <= LOOPBACK
    assert not {port for _, port in doors.tcp} & FIXED
    assert len(doors.unix) == 2
    assert all(path.startswith(str(ray_session.directory)) for path in doors.unix)
    answers = intrude(doors, ray_session.directory, touched)
    assert admitted(answers) == {}
    assert answers["methods"] > 100
    assert not touched.exists()
    # Each holds against one who has half of what is needed; and with all of it the doors open, so there was something to refuse.
    import grpc

    gcs, known = int(ray_session.address.rpartition(":")[2]), [("/ray.rpc.NodeInfoGcsService/CheckAlive", False)]
    public, key, token = ((ray_session.directory / name).read_bytes() for name in ("certificate.pem", "key.pem", "token"))
    bearer = (("authorization", f"Bearer {token.decode()}"),)
    holder = grpc.ssl_channel_credentials(public, key, public)
    write_certificate(tmp_path)
    stranger = grpc.ssl_channel_credentials(public, (tmp_path / "key.pem").read_bytes(), (tmp_path / "certificate.pem").read_bytes())
    assert set(by_grpc(gcs, known, grpc.ssl_channel_credentials(public), bearer)) == {"UNAVAILABLE"}
    assert set(by_grpc(gcs, known, stranger, bearer)) == {"UNAVAILABLE"}
    assert set(by_grpc(gcs, known, holder)) == {"UNAUTHENTICATED"}
    assert set(by_grpc(gcs, known, holder, (("authorization", "Bearer wrong"),))) == {"UNAUTHENTICATED"}
    assert set(by_grpc(gcs, known, holder, bearer)) == {"OK"}
    assert sum(set(statuses) == {401} for statuses in answers["http"].values()) == 2  # the agents
    assert sum(set(codes) == {"UNAVAILABLE"} for codes in answers["tls"].values()) >= 5  # everybody else


def test_nothing_of_a_session_lies_where_others_can_replace_it(ray_session: Session) -> None:
    """Neither what its processes hold open, nor what their command lines name; and no command line shows the token."""
    assert ray_session.directory is not None
    assert stat.S_IMODE(ray_session.directory.stat().st_mode) == 0o700
    for secret in ("token", "key.pem"):
        assert stat.S_IMODE((ray_session.directory / secret).stat().st_mode) == 0o600
    token = (ray_session.directory / "token").read_text()
    seen = set[Path]()
    for pid in session_processes(ray_session.directory, os.getpid()):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            opened = [os.readlink(d) for d in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        assert token not in line
        named = [part for word in line.replace("\0", " ").split() for part in word.split("=") if part.startswith("/")]
        seen |= {Path(text) for text in (*opened, *named) if text.startswith("/") and Path(text).exists()}
    assert [path for path in seen if path.is_relative_to(ray_session.directory)]
    assert {str(path): part for path in seen if (part := replaceable(path))} == {}


def test_no_child_of_the_driver_inherits_the_session(ray_session: Session) -> None:
    """A command started from a notebook would take the session's token and mode for a cluster's."""
    mine = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS", "RAY_TLS_SERVER_KEY", "RAY_enable_metrics_collection"}
    assert not mine & set(os.environ)


def test_a_handler_of_sigterm_outlives_the_start_of_a_session() -> None:
    """Ray puts one in its place that exits without a word."""
    before, mine = signal.getsignal(signal.SIGTERM), lambda number, frame: None
    try:
        for standing, afterwards in ((mine, mine), (signal.SIG_DFL, signal.default_int_handler)):
            signal.signal(signal.SIGTERM, standing)
            with keep_signals():
                signal.signal(signal.SIGTERM, signal.default_int_handler)
            assert signal.getsignal(signal.SIGTERM) == afterwards
    finally:
        signal.signal(signal.SIGTERM, before)


def test_private_directories_are_short_and_nobody_else_can_move_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(base: Path) -> Path:
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        directory = private_directory()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        directory.rmdir()
        return directory.parent

    short = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    assert made(short) == short
    short.chmod(0o777)  # whoever may write here may rename what lies here
    assert made(short) == Path("/tmp")
    short.chmod(0o1777)
    assert made(short) == short
    short.rmdir()
    deep = tmp_path / ("d" * 100)  # Ray's sockets would have longer names than the kernel takes
    deep.mkdir()
    assert made(deep) == Path("/tmp")
    monkeypatch.setattr(os, "access", lambda *given: False)
    with pytest.raises(UserError, match="TMPDIR"):
        private_directory()


@pytest.mark.parametrize("ending", [signal.SIGKILL, None], ids=["killed", "closed"])
def test_a_watchdog_ends_what_a_driver_leaves_and_nothing_else(tmp_path: Path, ending: int | None) -> None:
    """A driver with one process that writes into the directory, and one that does not; then the driver dies, or says that it is done."""
    directory = tmp_path / "session"
    directory.mkdir()
    (directory / "token").write_text("secret")
    code = f"""
import subprocess, sys, time
from pathlib import Path
from cure_ray.cluster.embedded import _watch
directory = Path({str(directory)!r})
guard = _watch(directory)
mine = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=open(directory / "log", "w"))
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(mine.pid, other.pid, flush=True)
sys.stdin.read(1)
guard.stdin.write(b".")
guard.stdin.close()
guard.wait()
print(mine.wait(), flush=True)
time.sleep(600)
"""
    with (tmp_path / "stderr").open("w") as said:
        driver = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True)
    assert driver.stdin is not None
    assert driver.stdout is not None
    mine, other = map(int, driver.stdout.readline().split())
    until(lambda: (directory / "log").read_text() == "1\n")
    try:
        if ending is not None:
            driver.send_signal(ending)
            until(lambda: not directory.exists())
            until(lambda: not Path(f"/proc/{mine}").exists() or "Z" in Path(f"/proc/{mine}/stat").read_text().split()[2])
        else:
            driver.stdin.write("\n")
            driver.stdin.flush()
            assert driver.stdout.readline() == f"{-signal.SIGKILL}\n"
            assert not directory.exists()
            assert driver.poll() is None  # it may go on
        last_word = f"process {driver.pid} ended at once: "
        assert (tmp_path / "stderr").read_text().startswith(last_word if ending is not None else "")
        assert (tmp_path / "stderr").read_text().count("\n") == (ending is not None)
        os.kill(other, 0)
    finally:
        os.kill(other, signal.SIGKILL)
        driver.kill()
        driver.wait()
