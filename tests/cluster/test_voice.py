"""What Ray says of its processes reaches the terminal in one line each."""

import os
import signal

import pytest
import ray
from cluster_helpers import until

from cure_ray.cluster.session import Session
from cure_ray.cluster.voice import LONGEST, brief

OOM = """Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.1, ID: 8d17) where the lease was running was 30.1GB / 31.0GB (0.97). Ray killed this worker because it
was the most recently scheduled task; to see more information about memory usage on this node, use `ray logs raylet.out -ip 10.0.0.1`."""


def test_a_message_is_cut_down_to_its_first_sentence() -> None:
    assert brief(OOM) == "Task was killed due to the node running low on memory."
    assert brief("short") == "short"
    assert len(brief("word " * 1000)) == LONGEST


def test_a_killed_worker_is_one_line(ray_session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    @ray.remote(num_cpus=0, max_retries=0)
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(die.remote())
    shown = ""

    def heard() -> bool:
        nonlocal shown
        captured = capsys.readouterr()
        assert captured.out == ""
        shown += captured.err
        return "died\n" in shown

    until(heard, 30)
    assert [line for line in shown.splitlines() if not (line.startswith("Ray: a worker process (pid ") and line.endswith(") died"))] == []
