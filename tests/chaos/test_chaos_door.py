"""Embedded runs on a shared machine, from outside: their doors while they train, search and certify, and what a kill -9 leaves.

Every case is the real command, in a process of its own; the intruder is user `nobody` where the tests run as root.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster_helpers import LOOPBACK, Doors, admitted, intrude, listening, session_processes, tiny, until

from cure_ray.config import dump_experiment
from cure_ray.runs.run import train_run

pytestmark = pytest.mark.chaos
AGENT_PORT = 52365  # every Ray head wants it
END_SECONDS = 10.0


def started(arguments: list[str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "cure_ray", *arguments], stdout=file, stderr=subprocess.STDOUT)


def directory_of(driver: int) -> Path | None:
    """Where the session of a driver lives: its watchdog's command line says so."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if parent == driver and any(word.endswith("watchdog.py") for word in words):
            return Path(next(word for word in words if "/cure_ray_" in word and not word.endswith(".py")))
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def titles(pids: list[int]) -> str:
    found = []
    for pid in pids:
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")[:80])
        except OSError:
            continue
    return "\n".join(found)


@pytest.fixture(params=["train", "data-parallel train", "sweep", "certify"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[str], str]:
    """Arguments of a command that runs for minutes, and a file that is there, or a process that works, in the midst of it."""
    if "train" in request.param:
        parallel = {"mode": "parallel", "device": "cpu", "ct_workers": 2 if "data" in request.param else 1, "cpus_per_worker": 0.5}
        experiment = tiny(epochs=5000)
        experiment = experiment.model_copy(update={"execution": experiment.execution.model_copy(update=parallel)})
        (tmp_path / "e.yaml").write_text(dump_experiment(experiment))
        return ["train", str(tmp_path / "e.yaml"), "--out", str(tmp_path / "out")], "out/metrics.jsonl"
    if request.param == "sweep":
        data = {
            "name": "door",
            "base": {
                "preset": "smoke",
                "training": {"method": "linf", "epochs": 5000, "standard_epochs": 0, "anneal_epochs": 1, "lr_milestones": []},
                "execution": {"device": "cpu"},
            },
            "space": {"training.lambda_inf": {"grid": [0.2, 0.4]}},
            "search": "grid",
            "samples": 10,
        }
        (tmp_path / "s.yaml").write_text(yaml.safe_dump(data))
        return ["sweep", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "out")], "out/trials/*/seed*/metrics.jsonl"
    run = train_run(tiny(method="linf", epochs=1), tmp_path / "run", quiet=True).directory
    threats = "linf=0.2,l2=2,l1=8"
    return [
        "certify",
        str(run),
        "--workers",
        "2",
        "--nodes",
        "100000",
        "--threats",
        threats,
        "--out",
        str(tmp_path / "out"),
    ], "ray::Worker.work"


def test_no_door_opens_in_the_midst_of_work_and_nothing_outlives_a_killed_driver(command: tuple[list[str], str], tmp_path: Path) -> None:
    arguments, sign = command
    driver = started(arguments, tmp_path / "log")
    touched = Path(tempfile.gettempdir()) / f"intruder-{os.getpid()}"
    try:
        directory = until(lambda: directory_of(driver.pid), 120)

        def works() -> bool:
            return bool([*tmp_path.glob(sign)]) or sign in titles(session_processes(directory, driver.pid))

        until(lambda: works() or driver.poll() is not None, 180)
        assert driver.poll() is None, (tmp_path / "log").read_text()
        tried = set[tuple[str, int]]()
        for _ in range(4):  # workers come and go: look again
            doors = listening(session_processes(directory, driver.pid))
            assert {interface for interface, _ in doors.tcp} <= LOOPBACK
            assert AGENT_PORT not in {port for _, port in doors.tcp}
            new = Doors(doors.tcp - tried, doors.unix)
            answers = intrude(new, directory, touched)
            still = {str(port) for _, port in listening(session_processes(directory, driver.pid)).tcp} | new.unix | {str(directory)}
            assert {door: answer for door, answer in admitted(answers).items() if door in still} == {}
            tried |= new.tcp
        assert len(tried) >= 9
        assert not touched.exists()
        assert driver.poll() is None, (tmp_path / "log").read_text()
        before = session_processes(directory, driver.pid)
        assert len(before) > 6
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        until(lambda: not session_processes(directory, driver.pid)[:-1] and not directory.exists(), END_SECONDS)
        print(f"{arguments[0]}: {len(tried)} sockets refused; {len(before)} processes ended with their driver")
    finally:
        driver.kill()
        driver.wait()


@pytest.fixture
def head() -> Iterator[tuple[str, dict[str, str]]]:
    """A head as `ray start` makes it: its agent wants the port it always has."""
    home = Path(tempfile.mkdtemp(prefix="head", dir="/tmp"))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment = {**inherited, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    program, dashboard = str(Path(sys.executable).with_name("ray")), free_port()
    process = subprocess.Popen(
        [program, "start", "--head", f"--port={free_port()}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--num-cpus=1",
         "--block", f"--temp-dir={home}", "--object-store-memory=100000000"],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield f"http://127.0.0.1:{dashboard}", environment
    process.terminate()
    process.wait(60)
    shutil.rmtree(home, ignore_errors=True)


def test_a_head_on_the_same_machine_accepts_jobs_beside_an_embedded_run(head: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    experiment = tiny(epochs=5000)
    experiment = experiment.model_copy(update={"execution": experiment.execution.model_copy(update={"mode": "parallel"})})
    (tmp_path / "e.yaml").write_text(dump_experiment(experiment))
    driver = started(["train", str(tmp_path / "e.yaml"), "--out", str(tmp_path / "out")], tmp_path / "log")
    address, environment = head
    submit = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", address, "--", "echo", "here", "I", "am"]
    try:
        until(lambda: (tmp_path / "out" / "metrics.jsonl").exists() or driver.poll() is not None, 180)
        assert driver.poll() is None, (tmp_path / "log").read_text()
        done = until(lambda: (r := subprocess.run(submit, env=environment, capture_output=True, text=True)).returncode == 0 and r, 120)
        assert "here I am" in done.stdout
    finally:
        driver.terminate()
        driver.wait(60)
