"""A radius of its own for every image: each is judged at its own, alike in memory, in a store, and as if it were alone."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import cure_ray
from cure_ray.testing import tiny
from cure_ray.threats import Balls

RADII = np.linspace(0.05, 0.6, 4).repeat(3)
LINF = cure_ray.Ball("linf", 0.03)


def certified(threats: Any, out: Path | None = None, **options: Any) -> cure_ray.CertificationResult:
    x, y = tiny.samples(12)
    return cure_ray.certify(tiny.network(), x, y, threats, out=out, quiet=True, device="cpu", nodes=0, **options)


@pytest.mark.parametrize("given", [RADII, list(RADII), torch.tensor(RADII), pd.Series(RADII)], ids=["array", "list", "tensor", "column"])
def test_several_radii_are_a_ball_for_each_image(given: Any) -> None:
    balls = cure_ray.Ball("l2", given)
    assert isinstance(balls, Balls)
    assert balls.at(4) == cure_ray.Ball("l2", float(RADII[4]))
    assert balls == pickle.loads(pickle.dumps(balls)) == Balls("l2", tuple(RADII))
    assert str(balls) != str(cure_ray.Ball("l2", RADII[::-1]))


@pytest.mark.parametrize("given", [0.5, 1, np.float32(0.5), np.array(0.5), torch.tensor(0.5)])
def test_one_number_is_a_ball_for_all_whatever_holds_it(given: Any) -> None:
    ball = cure_ray.Ball("l2", given)
    assert type(ball.eps) is float
    assert ball == pickle.loads(pickle.dumps(ball)) == cure_ray.Ball("l2", float(given))


def test_every_image_is_judged_at_its_own_radius_as_if_it_were_alone(tmp_path: Path) -> None:
    threats = [cure_ray.Ball("l2", RADII), LINF]
    memory, stored = certified(threats), certified(threats, tmp_path / "store")
    rows = stored.verdicts[stored.verdicts.norm == "l2"].sort_values("sample_index")
    assert rows.eps.tolist() == RADII.tolist()
    assert rows.threat.nunique() == 1
    x, y = tiny.samples(12)
    for radius in set(RADII):
        all_at_it = cure_ray.certify(tiny.network(), x, y, cure_ray.Ball("l2", radius), quiet=True, device="cpu", nodes=0).verdicts
        mine = rows[rows.eps == radius]
        alone = all_at_it.set_index("sample_index").loc[mine.sample_index]
        assert mine.status.tolist() == alone.status.tolist()
        assert np.allclose(mine.margin_lb, alone.margin_lb, atol=1e-3)
    assert rows.status.nunique() > 1
    linf = stored.verdicts[stored.verdicts.norm == "linf"].set_index("sample_index").status
    both = (rows.set_index("sample_index").status == "certified") & (linf == "certified")
    assert stored.union == memory.union == cure_ray.load_results(tmp_path / "store").union == pytest.approx(both.mean())
    assert "its own radius" in stored.report(tmp_path / "report.html").read_text()


def test_a_store_goes_on_with_the_same_radii_and_keeps_others_apart(tmp_path: Path) -> None:
    certified(cure_ray.Ball("l2", RADII), tmp_path / "store", samples=[0, 5, 11])
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "store" / "verdicts").iterdir()}
    certified(cure_ray.Ball("l2", RADII), tmp_path / "store", samples=[0, 5, 11])
    assert written == {p: p.stat().st_mtime_ns for p in (tmp_path / "store" / "verdicts").iterdir()}
    other = certified(cure_ray.Ball("l2", RADII / 2), tmp_path / "store", samples=[0, 5, 11])
    assert other.verdicts.eps.tolist() == [RADII[i] / 2 for i in (0, 5, 11)]


@pytest.mark.parametrize(
    ("threats", "options", "sentence"),
    [
        (lambda: cure_ray.Ball("l2", RADII[:5]), {}, "5 radii of l2 for 12 images"),
        (lambda: cure_ray.Ball("l2", []), {}, "no radius given"),
        (lambda: cure_ray.Ball("l2", [0.1, -0.1]), {}, "finite number >= 0"),
        (lambda: cure_ray.Ball("l2", [0.1, float("nan")]), {}, "finite number >= 0"),
        (lambda: cure_ray.Ball("l2", ["0.1"]), {}, "must be a number"),
        (lambda: cure_ray.Ball("l2", np.ones((3, 2))), {}, "must be a number"),
        (lambda: cure_ray.Ball("l2", "0.5"), {}, "must be a number"),
        (lambda: cure_ray.Ball("l2", None), {}, "must be a number"),
        (lambda: cure_ray.Ball("l2", True), {}, "must be a number"),
        (lambda: [cure_ray.Ball("l2", RADII), cure_ray.Ball("l2", 0.1)], {}, "one radius per norm"),
        (lambda: [cure_ray.Ball("l2", RADII)], {"union_only": True}, "union-only"),
        (lambda: [0.5], {}, "a list of Ball"),
        (lambda: 0.5, {}, "a list of Ball"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(threats: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(cure_ray.UserError, match=sentence):
        certified(threats(), **options)


def test_another_engine_is_not_asked_about_single_radii_and_that_is_said() -> None:
    lines = list(certified([LINF, cure_ray.Ball("l2", RADII)]).cross_check("auto_lirpa"))
    assert len(lines) == 2
    assert "confirms" in lines[0]
    assert "not checked" in lines[1]
