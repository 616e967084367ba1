"""Ray embedded in this process: token, key, directory and ports of its own, closed to others, and an end that comes with ours."""

import functools
import logging
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cure_ray.cluster import watchdog
from cure_ray.cluster.certificate import write_certificate, write_secret
from cure_ray.errors import UserError
from cure_ray.runs.stopping import StoppedError

# For the time of the start only: Ray's processes inherit it, other children of this process do not.
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    # Despite its name: with 0 a node's address is 127.0.0.1 on every system, and Ray's servers then bind to loopback alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray's metrics have no authentication. The first ends the agent's server, the second (no port has that number) the head's.
    "RAY_enable_metrics_collection": "0",
    "DASHBOARD_METRIC_PORT": "-1",
}
NOT_OURS = ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_GCS_SERVER_PORT")  # a cluster's; the first outranks a token file
OBJECT_STORE_BYTES = 1 << 29  # states of networks and rows of shards; nothing large lives there
SOCKET = "/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # the longest name Ray makes below its directory
SOCKET_LIMIT = 107 if sys.platform == "linux" else 103  # bytes in the name of a socket
ENDING_SECONDS = 15.0


def _room(base: Path) -> bool:
    """Whether a directory of ours can stand here: short enough for Ray's sockets, and nobody else may rename it."""
    try:
        mode = base.stat().st_mode
    except OSError:
        return False
    return (
        len(os.fsencode(base / "cure_ray_01234567" / "ray")) + len(SOCKET) <= SOCKET_LIMIT
        and os.access(base, os.W_OK | os.X_OK)
        and not (mode & (stat.S_IWOTH | stat.S_IWGRP) and not mode & stat.S_ISVTX)
    )


def private_directory() -> Path:
    """A new directory with mode 0700, in TMPDIR or, where that does not do, in another place for temporary files."""
    bases = [Path(tempfile.gettempdir()).absolute(), Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")]
    for base in bases:
        if _room(base):
            with suppress(OSError):
                return Path(tempfile.mkdtemp(prefix="cure_ray_", dir=base))
    raise UserError(
        f"Ray needs a directory for its sockets, and none of {', '.join(map(str, dict.fromkeys(bases)))} will do: it must be writable, "
        "closed to others or with the sticky bit, and its name short. Set TMPDIR to such a directory."
    )


@contextmanager
def _changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    for name in NOT_OURS:
        os.environ.pop(name, None)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in (*NOT_OURS, *values):
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


@contextmanager
def _no_fixed_port() -> Iterator[None]:
    """`ray.init` has no argument for the agent's port (52365, which a head on this machine needs) nor against the autoscaler."""
    from ray._private import parameter, ray_constants

    private: Any = parameter
    original = private.RayParams
    ray_constants.ENABLE_RAY_CLUSTER = False  # what the variable means, should ray have been imported before it was set
    private.RayParams = functools.partial(original, dashboard_agent_listen_port=0, no_monitor=True)
    try:
        yield
    finally:
        private.RayParams = original


@contextmanager
def keep_signals() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM by one that exits without a word; whoever had set one gets it back."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before not in (signal.SIG_DFL, None) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def reread_environment() -> None:
    """Ray reads modes, token and keys once a process; an earlier session, or a cluster joined later, has others."""
    import ray._raylet

    core: Any = ray._raylet
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()


def _watch(directory: Path) -> "subprocess.Popen[bytes]":
    """The process that ends what is left and removes the directory when we do so or die."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", watchdog.__file__, str(directory), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is meant for us
    )


def _start(directory: Path, cpus: int | None) -> None:
    import ray

    token = directory / "token"
    write_secret(token, secrets.token_hex(32).encode())
    environment = {**ENVIRONMENT, **write_certificate(directory), "RAY_AUTH_TOKEN_PATH": str(token)}
    with _changed_environment(environment), _no_fixed_port(), keep_signals():
        reread_environment()
        ray.init(
            address="local",  # without it Ray joins whatever cluster it finds on this machine
            num_cpus=cpus,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(directory / "ray"),  # not the directory itself: Ray opens what it is given to everybody
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


@contextmanager
def embedded_ray(cpus: int | None = None) -> Iterator[Path]:
    """A Ray session on this machine alone, in the private directory that is yielded. No trace is left of it."""
    import ray

    api: Any = ray
    directory = private_directory()
    guard = _watch(directory)
    try:
        try:
            _start(directory, cpus)
        except SystemExit:  # SIGTERM, in the seconds in which Ray's handler stood
            raise StoppedError("SIGTERM while Ray was starting") from None
        except Exception as error:  # Ray raises a bare Exception here
            raise UserError(
                f"Ray could not start on this machine ({str(error).strip().splitlines()[0]}). Most often it is overloaded, out of memory "
                f"or {directory.parent} is full: free some and run the same command again. `cure-ray doctor` looks at the usual causes."
            ) from None
        yield directory
    finally:
        api.shutdown()
        assert guard.stdin is not None
        with suppress(OSError):  # somebody killed it
            guard.stdin.write(b".")
            guard.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            guard.wait(ENDING_SECONDS)
        reread_environment()
