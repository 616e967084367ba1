"""`cure-ray status` only looks: nothing changes, nothing is opened for writing, and a directory one may only read is enough."""

import ctypes
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_helpers import held_elsewhere
from optuna.trial import TrialState
from search_helpers import SWEEP, call, new_sweep, proposed, run_of, trained

from cure_ray.config import dump_experiment
from cure_ray.errors import UserError
from cure_ray.runs.lease import take
from cure_ray.runs.pulse import Pulse, beating, this_process
from cure_ray.search.layout import JOURNAL
from cure_ray.search.space import Sweep
from cure_ray.search.status import describe_directory
from cure_ray.search.study import read_study

LOOK = """
import os, sys
from pathlib import Path

home, touched = sys.argv[1], []
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
changing = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.utime", "os.chmod", "fcntl.lockf"}

def watch(event, args):
    if event == "open" and str(args[0]).startswith(home) and isinstance(args[2], int) and args[2] & writing:
        touched.append((event, *args))
    elif event in changing and any(str(a).startswith(home) for a in args):
        touched.append((event, *args))

sys.addaudithook(watch)
from cure_ray.search.status import describe_directory
print(describe_directory(Path(home)))
assert not touched, touched
try:
    open(home + "/probe", "w")
except PermissionError:
    assert touched, "the watch does not work"
    sys.exit(0)
sys.exit("this process may write here: the test proves nothing")
"""


def obey_permissions() -> None:
    """Between fork and exec: root gives up the two capabilities that let it ignore permission bits."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None)
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            libc.prctl(24, capability, 0, 0, 0)


def look(directory: Path) -> str:
    """`describe_directory` in a process that may not write there, and that fails if it tries."""
    paths = [directory, *directory.rglob("*")]
    before = {p: p.stat().st_mode for p in paths}
    for path in paths:
        path.chmod(before[path] & ~0o222)
    try:
        command = [sys.executable, "-c", LOOK, str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=obey_permissions, check=False)
    finally:
        for path, mode in before.items():
            path.chmod(mode)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fingerprint(directory: Path) -> dict[str, tuple[int, int, str]]:
    def content(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

    return {str(p): (p.stat().st_mtime_ns, p.stat().st_ino, content(p)) for p in [directory, *sorted(directory.rglob("*"))]}


@pytest.fixture
def worked(out: Path) -> Path:
    """One trial judged to its end, one running, and half a line at the journal's end."""
    with call(out) as ledger:
        done, running = proposed(ledger), proposed(ledger)
        for proposal, epochs in ((done, 4), (running, 2)):
            trained(run_of(ledger, proposal), epochs, {})
            (run_of(ledger, proposal) / "experiment.yaml").write_text(dump_experiment(proposal.experiment))
        ledger.judged(done.number, 0, {"union": 0.5, "clean": 0.9})
        ledger.judged(done.number, 1, {"union": 0.6, "clean": 0.9})
    with (out / JOURNAL).open("ab") as file:
        file.write(b'{"op_code": 8, "wor')
    return out


def test_looking_changes_nothing_opens_nothing_for_writing_and_needs_no_right_to_write(worked: Path) -> None:
    before = fingerprint(worked)
    text = look(worked)
    assert "best: trial 0: union 60.0 %" in text
    assert "1 interrupted" in text
    assert fingerprint(worked) == before


def test_a_run_in_a_directory_one_may_only_read_is_described(worked: Path) -> None:
    run = next((worked / "trials").glob("0001-*")) / "seed0"
    before = fingerprint(run)
    assert "epoch 2 of 4" in look(run)
    assert fingerprint(run) == before


def test_a_sweep_that_nobody_has_begun_is_not_begun_by_looking_at_it(out: Path) -> None:
    before = fingerprint(out)
    assert "0 trials; none finished" in look(out)
    assert fingerprint(out) == before
    assert not (out / JOURNAL).exists()


def test_a_database_is_read_as_it_is(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    out = new_sweep(tmp_path / "out", storage=url)
    assert "0 trials" in describe_directory(out)
    assert not (tmp_path / "study.db").exists()
    with call(out, storage=url) as ledger:
        proposed(ledger)
    before = fingerprint(tmp_path)
    assert "1 interrupted" in describe_directory(out)
    assert read_study(out, Sweep.model_validate({**SWEEP, "storage": url})).trials[0].state == TrialState.RUNNING
    assert fingerprint(tmp_path) == before


def test_a_directory_one_may_not_read_gets_a_sentence(worked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Path) -> str:
        raise PermissionError(13, "Permission denied", str(worked / JOURNAL))

    monkeypatch.setattr("cure_ray.search.status._describe", refuse)
    with pytest.raises(UserError, match=r"journal\.log may not be read by you"):
        describe_directory(worked)


def test_a_worker_of_another_machine_that_is_not_heard_of_is_not_shown_as_if_it_worked(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cure_ray.search.status.FRESH", 0.3)
    monkeypatch.setattr("cure_ray.runs.pulse.BEAT", 0.02)
    with call(out) as ledger:
        proposal = proposed(ledger)
        run = run_of(ledger, proposal)
        trained(run, 2, {})
        (run / "experiment.yaml").write_text(dump_experiment(proposal.experiment))
        pulse = held_elsewhere(run)
        assert "process on node7" in describe_directory(out)
        assert "no sign of life" in describe_directory(out)
        with beating(Pulse(pulse)):
            assert "no sign of life" not in describe_directory(out)


def test_ranks_that_are_gone_are_not_shown_and_the_call_that_starts_them_again_is(out: Path) -> None:
    with call(out) as ledger:
        proposal = proposed(ledger)
        run = run_of(ledger, proposal)
    trained(run, 2, {})
    (run / "experiment.yaml").write_text(dump_experiment(proposal.experiment))
    with take(run) as mine:
        (mine.desk / "ranks").mkdir()
        (mine.desk / "ranks" / "ct0.json").write_text(json.dumps(this_process()))
        (mine.desk / "ranks" / "nt.json").write_text(json.dumps({**this_process(), "started": "1"}))  # its number is another's now
        text = describe_directory(run)
        assert f"running: ct0 on {this_process()['host']} (pid {os.getpid()})" in text
        assert "nt on" not in text
        (mine.desk / "ranks" / "ct0.json").write_text(json.dumps({**this_process(), "started": "1"}))
        assert f"running: none of its processes just now; process {os.getpid()} on" in describe_directory(run)
    assert "nobody at work" in describe_directory(run)
