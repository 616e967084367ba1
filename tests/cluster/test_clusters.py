"""Clusters: the files that ship, a job on a real head with tokens, and the doctor."""

import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import yaml

from cure_ray.cluster.doctor import diagnose
from cure_ray.cluster.session import AUTOSCALING, Need, Session, fitting, grown_nodes, require, session, usable_nodes
from cure_ray.cluster.submit import EXCLUDES, entrypoint, project_root, submit_sweep
from cure_ray.cluster.trials.trial import need_of
from cure_ray.cluster.validate import validate_cluster
from cure_ray.config import resolve
from cure_ray.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["cluster.yaml", "deploy/on-premise.yaml"])
def test_cluster_files_are_accepted_by_ray_and_closed_to_the_world(name: str) -> None:
    validate_cluster(ROOT / name, ray.__version__)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("  region: us-east-1\n", "", "region is missing"),
        (f"ray:{ray.__version__}-py311", "ray:2.9.0-py311", "not of Ray"),
        ("RAY_AUTH_MODE=token", "RAY_AUTH_MODE=disabled", "token"),
        ("--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0", "loopback"),
        ("idle_timeout_minutes", "idle_timeout_minuets", "Ray refuses"),
        ('"~/.ray/auth_token"', '"~/.ray/something"', "no file_mounts bring the token"),
        ("      SecurityGroupIds: [sg-REPLACE-ME]\n", "", "SSH from everywhere"),
        ("  region: us-east-1\n", "  region: us-east-1\n  security_group: {GroupName: g}\n", "SSH from everywhere"),
        ("--no-deps auto_LiRPA", "auto_LiRPA", "second engine"),
    ],
)
def test_a_spoilt_cluster_file_is_refused(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    text = (ROOT / "cluster.yaml").read_text()
    assert old in text
    (tmp_path / "c.yaml").write_text(text.replace(old, new))
    with pytest.raises(UserError, match=sentence):
        validate_cluster(tmp_path / "c.yaml", ray.__version__)


def test_workers_scale_from_zero_and_the_rayjob_matches_our_ray() -> None:
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    assert config["available_node_types"]["gpu"]["min_workers"] == 0
    job = yaml.safe_load((ROOT / "deploy" / "kuberay-rayjob.yaml").read_text())
    assert (job["kind"], job["spec"]["rayClusterSpec"]["rayVersion"]) == ("RayJob", ray.__version__)
    assert job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    containers = [
        group["template"]["spec"]["containers"][0]["image"]
        for group in (job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"])
    ]
    assert all(f"-t {name} ." in image for name in containers)
    assert f"FROM rayproject/ray:{ray.__version__}-py311-gpu\n" in image
    assert "--no-deps auto_LiRPA==" in image
    assert (ROOT / ".dockerignore").read_text() == (ROOT / ".rayignore").read_text()
    assert set(EXCLUDES) <= set((ROOT / ".rayignore").read_text().split())


def test_both_clusters_say_how_far_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "cluster.yaml").read_text()
    gpu = yaml.safe_load(text)["available_node_types"]["gpu"]
    monkeypatch.setenv(AUTOSCALING, re.findall(rf"{AUTOSCALING}=(\S+)", text)[0])
    assert grown_nodes() == [gpu["resources"]] * gpu["max_workers"]
    assert len(set(re.findall(rf"{AUTOSCALING}=(\S+)", text))) == 1  # head and workers
    spec = yaml.safe_load((ROOT / "deploy" / "kuberay-rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    (environment,) = [c["env"] for c in spec["headGroupSpec"]["template"]["spec"]["containers"]]
    monkeypatch.setenv(AUTOSCALING, next(e["value"] for e in environment if e["name"] == AUTOSCALING))
    assert len(grown_nodes()) == spec["workerGroupSpecs"][0]["maxReplicas"]


def test_gpus_that_are_not_here_yet_are_planned_for(ray_session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = resolve({"preset": "smoke", "training": {"method": "linf"}})
    with session() as where:
        assert need_of(experiment, where.gpus).gpus == 0
    monkeypatch.setenv(AUTOSCALING, "3xCPU:4,GPU:2; 1xCPU:64")
    with session() as where:
        assert where.gpus == 6
        need = need_of(experiment, where.gpus)
        assert (need.gpus, fitting(need, usable_nodes())) == (1, 6)
        require(Need(6, 1, 1), "six workers")
        with pytest.raises(UserError, match="room for 6"):
            require(Need(7, 1, 1), "seven workers")
        with pytest.raises(UserError, match=r"room for 6 .*Lower --workers or --threads, or start more nodes"):
            require(Need(7, 1, 1), "certification", "--workers or --threads")
    monkeypatch.setenv(AUTOSCALING, "many")
    with pytest.raises(UserError, match="8xCPU:8,GPU:1"):
        grown_nodes()


def test_the_doctor_checks_storage_versions_and_disk(ray_session: Session, tmp_path: Path) -> None:
    checks = diagnose(tmp_path / "storage", resolve({"preset": "mnist-small"}), runs=2)
    text = "\n".join(map(str, checks))
    assert not [c for c in checks if c.level == "problem"]
    for part in (
        "torch 2.13",
        "ray 2.60",
        "storage",
        "GB free, the plan needs about 1.6 GB",
        "TF32 is off",
        "loopback with a token of its own",
    ):
        assert part in text
    huge = diagnose(tmp_path / "storage", resolve({"preset": "tinyimagenet"}), runs=100_000)
    assert [c.remedy for c in huge if c.level == "problem"] == ["free some space, lower execution.keep_checkpoints, or use another storage"]
    (tmp_path / "file").write_text("")
    assert any("cannot be written" in c.what for c in diagnose(tmp_path / "file"))


def test_submit_ships_code_and_asks_for_an_absolute_place() -> None:
    sweep = ROOT / "sweeps" / "smoke.yaml"
    assert project_root(sweep) == ROOT
    assert entrypoint(sweep, ROOT, "/shared/o", None) == "python -m cure_ray sweep sweeps/smoke.yaml --address auto --out /shared/o"
    with pytest.raises(UserError, match="absolute path"):
        submit_sweep(sweep, "http://127.0.0.1:1", "out")
    with pytest.raises(UserError, match="no Ray dashboard takes us in"):
        submit_sweep(sweep, "http://127.0.0.1:1", "/tmp/out")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """A real head, as `ray start` makes it, with token authentication; in a session directory of its own."""
    home = tmp_path_factory.mktemp("head")
    port, dashboard = free_port(), free_port()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    inherited["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"  # the job runs `python`: this one
    environment = {**inherited, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    ray_command = str(Path(sys.executable).with_name("ray"))
    process = subprocess.Popen(
        [ray_command, "start", "--head", f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--num-cpus=2",
         "--block", f"--temp-dir={Path('/tmp') / home.name}{os.getpid()}", "--object-store-memory=200000000",
         f"--dashboard-agent-listen-port={free_port()}"],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.time() + 90
    while time.time() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", dashboard)) == 0:
                break
        time.sleep(0.5)
    yield f"http://127.0.0.1:{dashboard}", environment
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()


class Tunnel:
    """A connection to a port of this machine that can be cut, and mended, as one over SSH."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, free_port()
        self.ends: list[socket.socket] = []
        self.mend()

    def mend(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return
            self.ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            end.close()

    def cut(self) -> None:
        for end in (self.listener, *self.ends):
            with suppress(OSError):  # closed already
                end.shutdown(socket.SHUT_RDWR)  # a socket that another thread reads stays open behind close() alone
            end.close()


def test_a_sweep_runs_as_a_job_on_a_head_with_tokens(head: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """Refused with a sentence to who has no token or another one; and the job outlives the dashboard through which it was sent."""
    address, environment = head
    tunnel = Tunnel(int(address.rpartition(":")[2]))
    sweep = ROOT / "tests" / "cluster" / "job.yaml"
    through = f"http://127.0.0.1:{tunnel.port}"
    command = [sys.executable, "-m", "cure_ray", "submit", str(sweep), "--address", through, "--out", str(tmp_path / "out")]
    without = {name: value for name, value in environment.items() if name != "RAY_AUTH_TOKEN"} | {"HOME": str(tmp_path)}
    for strangers in (without, {**without, "RAY_AUTH_MODE": "disabled"}, {**environment, "RAY_AUTH_TOKEN": secrets.token_hex(32)}):
        refused = subprocess.run(command, env=strangers, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert refused.returncode == 2, refused.stderr
        assert "token must be here (RAY_AUTH_MODE=token" in refused.stderr
        assert "Traceback" not in refused.stderr
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as sent:
        assert sent.stdout is not None
        assert "submitted raysubmit_" in sent.stdout.readline()
        tunnel.cut()
        try:
            _, said = sent.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            sent.kill()  # or this block would wait for it forever
            raise
    assert sent.returncode == 2, said
    assert "The job goes on without us" in said
    assert "Traceback" not in said
    tunnel.mend()
    again = shlex.split(said.rpartition("with: ")[2])
    assert again[0] == "ray"
    program = str(Path(sys.executable).with_name("ray"))
    done = subprocess.run([program, *again[1:]], env=environment, capture_output=True, text=True, timeout=240)
    assert "best of 1 finished trials" in done.stdout, done.stdout + done.stderr
    assert list((tmp_path / "out" / "trials").glob("*/seed0/checkpoints/epoch_*"))
