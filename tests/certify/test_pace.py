"""The time a certification still takes, as it is said, against the time it then takes."""

import heapq
import io
import time

import pytest
from rich.console import Console

from cure_ray.api import progress
from cure_ray.certification.job import CascadeSettings, Job, Shard, plan
from cure_ray.certification.pace import Pace
from cure_ray.threats.balls import Ball

CHEAP, DEAR = Ball("linf", 0.1), Ball("l2", 1.0)
COST = {str(CHEAP): 0.2, str(DEAR): 3.0}  # seconds a sample


def shards(samples: int = 400, size: int = 20, digest: str = "0" * 64) -> list[Shard]:
    job = Job(digest, "digits", "test", "1" * 64, "native", "1", CascadeSettings(), 0)
    return plan(job, [CHEAP, DEAR], range(samples), set(), size)


def cost(shard: Shard) -> float:
    return COST[str(shard.threats[0])] * len(shard.indices)


def test_nothing_is_said_before_a_shard_of_each_kind_is_finished() -> None:
    todo = shards()
    pace = Pace(todo)
    assert pace.seconds_left() is None
    first = pace.one_of_each_first(todo)
    assert sorted(map(todo.index, first)) == list(range(len(todo)))
    pace.learn(first[0], cost(first[0]))
    assert pace.seconds_left() is None
    pace.learn(first[1], cost(first[1]))
    assert pace.seconds_left() == pytest.approx(380 * 0.2 + 380 * 3)


def test_a_shard_that_takes_longer_than_all_others_is_not_about_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    todo = shards(40)
    pace = Pace(todo)
    for shard in todo[:-1]:
        pace.learn(shard, cost(shard))
    said = []
    for now[0] in (0.0, 20.0, 40.0, 300.0):
        said.append(pace.seconds_left_now())
    assert said == pytest.approx([60.0, 40.0, 40.0, 300.0])


def test_what_a_threat_costs_on_another_checkpoint_is_a_first_guess() -> None:
    mine, others = shards(40), shards(40, digest="2" * 64)
    pace = Pace([*mine, *others])
    for shard in mine:
        pace.learn(shard, cost(shard))
    assert pace.seconds_left() == pytest.approx(40 * 0.2 + 40 * 3)
    pace.learn(others[0], 5 * cost(others[0]))
    assert pace.seconds_left() == pytest.approx(20 * 1.0 + 40 * 3)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_estimate_is_right_to_a_factor_of_one_and_a_half(workers: int) -> None:
    """Two threats, one fifteen times dearer; workers took a minute to start, which is nobody's pace. Time is counted, not waited for."""
    todo, clock = shards(), 60.0
    pace, flying, said = Pace(todo, workers), list[tuple[float, int]](), list[tuple[float, float]]()
    waiting = pace.one_of_each_first(todo)
    queue = list(enumerate(waiting))
    while queue or flying:
        while queue and len(flying) < workers:
            number, shard = queue.pop(0)
            heapq.heappush(flying, (clock + cost(shard), number))
        clock, number = heapq.heappop(flying)
        pace.learn(waiting[number], cost(waiting[number]))
        if (left := pace.seconds_left()) is not None:
            said.append((clock, left))
    for when, left in said[: len(said) // 2]:
        assert (clock - when) / 1.5 < left < (clock - when) * 1.5
    assert said[-1][1] == 0


def test_a_line_says_what_is_decided_and_the_time_left_only_when_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first decisions are the cheap ones: 5 of 800 after half a minute of branch and bound do not mean 80 more minutes."""
    monkeypatch.setattr(progress, "LINE_SECONDS", -1.0)
    todo, written = shards(), io.StringIO()
    with progress.Reporter(800, quiet=False) as reporter:
        reporter.console = Console(file=written, soft_wrap=True)
        reporter.start(0)
        pace = Pace(todo)
        reporter.begin(pace)
        reporter("ibp", 5)
        assert written.getvalue() == "decided 5 of 800 (ibp 5)\n"
        for shard in (todo[0], todo[20]):
            pace.learn(shard, cost(shard))
        reporter("crown", 35)
    assert written.getvalue().splitlines()[1] == "decided 40 of 800 (ibp 5, crown 35); about 20 min left"  # 380 * 0.2 + 380 * 3 s


@pytest.mark.parametrize("width", [80, 200])
def test_a_narrow_terminal_still_shows_how_much_is_done_and_the_time_left(width: int) -> None:
    todo, written = shards(), io.StringIO()
    with progress.Reporter(800, quiet=False) as reporter:
        reporter.console = Console(file=written, force_terminal=True, width=width, color_system=None)
        reporter.start(0)
        pace = Pace(todo)
        reporter.begin(pace)
        for shard in (todo[0], todo[20]):
            pace.learn(shard, cost(shard))
        for stage in ("clean", "ibp", "crown-ibp", "attack", "crown", "alpha-crown", "branching", "open"):
            reporter(stage, 5)
        assert reporter.bar is not None
        reporter.bar.refresh()
    line = written.getvalue().split("certifying")[-1].splitlines()[0]
    assert " 40/800 about 20 min left clean 5, ibp 5" in line
    assert ("…" in line) == (width == 80)
