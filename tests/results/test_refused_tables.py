"""Verdicts that make no table: incomplete, ambiguous, doubled or not understood; each is refused by name."""

import pandas as pd
import pytest

from cure_ray.errors import UserError
from cure_ray.results.evaluations import evaluations
from cure_ray.results.study import build_study
from cure_ray.testing import fabricate


def test_a_hole_in_a_union_is_an_error_that_names_it() -> None:
    rows = fabricate.verdicts(0, 20)
    rows = rows[~((rows["norm"] == "l2") & rows["sample_index"].isin([3, 7]))]
    with pytest.raises(UserError, match=r"l2=0.35 lacks 2 of 20 samples \(3, 7\)"):
        build_study(rows)


def test_a_norm_of_the_experiment_without_verdicts_is_an_error_that_names_it() -> None:
    rows = fabricate.verdicts(0, 20, threats=fabricate.THREATS[:2])
    with pytest.raises(UserError, match=r"l1=0.7 too, but there are verdicts for linf=0.1, l2=0.35 only"):
        build_study(rows, fabricate.infos({"a": {"method": "max"}}))


def test_two_radii_of_one_norm_need_a_choice() -> None:
    rows = fabricate.verdicts(0, 20, threats=(("linf", 0.1), ("linf", 0.2), ("l2", 0.35)))
    with pytest.raises(UserError, match=r"linf=0.1, linf=0.2"):
        build_study(rows)
    chosen = build_study(rows, threats=[("linf", 0.2), ("l2", 0.35)])
    assert [t.name for t in chosen.entries[0].evaluation.threats] == ["linf=0.2", "l2=0.35"]


def test_two_checkpoints_of_one_training_run_need_a_choice() -> None:
    same = {"method": "max"}
    with pytest.raises(UserError, match="two checkpoints of one training run"):
        build_study(fabricate.verdicts(0, 10, ("a", "b")), fabricate.infos({"a": same, "b": same}))


def test_two_verdicts_for_one_cell_are_refused_and_named_whatever_run_they_are_from() -> None:
    rows = fabricate.verdicts(0, 10)
    for again in (rows.iloc[[4, 7, 13]], rows.iloc[[4, 7, 13]].assign(run_id="other")):
        with pytest.raises(UserError, match=r"more than one verdict for linf=0.1 \(samples 4, 7\); l2=0.35 \(sample 3\)"):
            build_study(pd.concat([rows, again], ignore_index=True))


def test_verdicts_of_different_networks_under_one_digest_are_refused() -> None:
    rows = fabricate.verdicts(0, 10)
    rows.loc[3, "predicted"] = 9 - rows.loc[3, "predicted"]
    with pytest.raises(UserError, match="two different values of `predicted`"):
        build_study(rows)


def test_a_status_of_the_future_and_a_table_without_columns_are_refused() -> None:
    with pytest.raises(UserError, match=r"'probably fine'.*upgrade"):
        evaluations(fabricate.verdicts(0, 5).assign(status="probably fine"))
    with pytest.raises(UserError, match="lack the columns eps"):
        evaluations(fabricate.verdicts(0, 5).drop(columns="eps"))
    with pytest.raises(UserError, match="no verdicts yet"):
        evaluations(fabricate.verdicts(0, 5).iloc[:0])
