"""Union accuracies and their company on made-up verdicts: against an independent recomputation, and against the algebra."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from cure_ray.errors import UserError
from cure_ray.results import tables
from cure_ray.results.evaluations import STATUSES
from cure_ray.results.statistics import wilson
from cure_ray.results.study import Study, build_study
from cure_ray.testing import fabricate

NORMS = ("linf", "l2", "l1")


def study(seed: int = 0, n: int = 40, **runs: dict[str, object]) -> Study:
    runs = runs or {"a": {"method": "max"}}
    return build_study(fabricate.verdicts(seed, n, tuple(runs)), fabricate.infos(runs))


def recount(rows: pd.DataFrame) -> dict[str, float]:
    """The definition, sample by sample in plain Python."""
    robust: dict[int, dict[str, bool]] = {}
    correct: dict[int, bool] = {}
    columns = (rows[c].tolist() for c in ("sample_index", "norm", "status", "label", "predicted"))
    for sample, norm, status, label, predicted in zip(*columns, strict=True):
        robust.setdefault(sample, {})[norm] = status == "certified"
        correct[sample] = correct.get(sample, False) or label == predicted
    n = len(robust)
    counts = {f"cert_{norm}": sum(r[norm] for r in robust.values()) for norm in NORMS}
    counts["union"] = sum(all(r[norm] for norm in NORMS) for r in robust.values())
    counts["union_linf_l2"] = sum(r["linf"] and r["l2"] for r in robust.values())
    counts["clean"] = sum(correct.values())
    return {name: 100 * count / n for name, count in counts.items()}


def test_a_thousand_random_tables_agree_with_an_independent_recount_and_obey_the_algebra() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        names = tuple(f"{seed}-{i}" for i in range(50))
        rows = fabricate.verdicts(seed, int(rng.integers(1, 30)), names, certified=float(rng.random()))
        made = build_study(rows.sample(frac=1, random_state=seed))
        assert len(made.entries) == 50
        accuracy = tables.accuracy_table(made).set_index("checkpoint")
        split = tables.decomposition_table(made)
        assert np.allclose(split["R_union"], split["R_r"] + split["R_align"], atol=1e-9)
        stages = dict(list(tables.stage_table(made).groupby("checkpoint")["union"]))
        errors = dict(list(split.groupby("checkpoint")))
        rows_of = accuracy.to_dict("index")
        for entry, (digest, own) in zip(made.entries, rows.groupby("checkpoint_digest"), strict=True):
            row = rows_of[digest]
            for name, value in recount(own).items():
                assert row[name] == pytest.approx(value, abs=1e-9), (seed, digest, name)
            certified = [row[f"cert_{norm}"] for norm in NORMS]
            assert row["union"] <= min(certified) + 1e-9
            assert row["union"] <= row["union_linf_l2"] <= min(certified[:2]) + 1e-9
            assert row["union"] >= sum(certified) - 200 - 1e-9
            assert max(certified) <= row["clean"] + 1e-9
            parts = dict(zip(errors[digest]["union"], errors[digest]["R_union"], strict=True))
            assert 100 - parts["linf_l2, weaker first"] == pytest.approx(row["union_linf_l2"], abs=1e-9)
            assert 100 - parts["all, r = linf"] == pytest.approx(row["union"], abs=1e-9)
            by_stage = stages[digest]
            assert by_stage.is_monotonic_increasing
            assert by_stage.iloc[-1] == pytest.approx(row["union"])
            assert tables.failure_patterns(entry)["samples"].sum() == pytest.approx(row["clean"] * row["n"] / 100)


def test_every_status_is_counted_and_the_counts_add_up() -> None:
    table = tables.status_table(study(n=200))
    assert (table[list(STATUSES)].sum(axis=1) == table["n"]).all()
    assert (table["no_verdict"] == 0).all()
    assert set(STATUSES) <= set(table.columns)


def test_the_order_of_rows_and_shards_does_not_matter() -> None:
    rows = fabricate.verdicts(3, 50, ("a", "b"))
    first = tables.accuracy_table(build_study(rows))
    for seed in range(5):
        again = tables.accuracy_table(build_study(rows.sample(frac=1, random_state=seed)))
        pd.testing.assert_frame_equal(first, again)


def test_certified_accuracy_falls_with_the_radius_where_the_verdicts_do() -> None:
    """A sample certified at a radius is certified at every smaller one; tables over nested verdicts must be monotone."""
    rng, n = np.random.default_rng(0), 60
    base = fabricate.verdicts(0, n)
    limit = rng.random((n, 3))
    unions = []
    for radius in np.linspace(0, 1, 9):
        rows = base.copy()
        ok = (limit[rows["sample_index"], rows["norm"].map(dict(zip(NORMS, range(3), strict=True)))] >= radius).astype(bool)
        rows["status"] = np.where(rows["label"] != rows["predicted"], "misclassified", np.where(ok, "certified", "unknown"))
        unions.append(tables.accuracy_table(build_study(rows))["union"].item())
    assert unions == sorted(unions, reverse=True)
    assert unions[0] > unions[-1]


def test_misclassified_timeout_and_error_never_count_as_robust() -> None:
    for status in STATUSES[1:]:
        rows = fabricate.verdicts(0, 20).assign(status=status)
        assert tables.accuracy_table(build_study(rows))["union"].item() == 0


def test_empirical_accuracy_is_apart_and_absent_where_nothing_was_attacked() -> None:
    rows = fabricate.verdicts(1, 80)
    rows = rows[~rows["status"].isin(["oom", "error"])]
    whole = rows.groupby("sample_index")["norm"].transform("size") == 3
    table = tables.accuracy_table(build_study(rows[whole]))
    assert (table["emp_union"] >= table["union"]).all()
    assert (table["emp_linf"] >= table["cert_linf"]).all()
    blind = rows[whole].assign(attack_margin=np.nan)
    assert tables.accuracy_table(build_study(blind))["emp_linf"].isna().all()


def test_union_only_rows_give_a_union_but_no_accuracy_per_norm() -> None:
    rows = fabricate.verdicts(2, 40)
    failed = rows[(rows["norm"] == "linf") & (rows["status"] == "unknown")]["sample_index"]
    skip = rows["sample_index"].isin(failed) & (rows["norm"] != "linf")
    assert skip.any()
    rows.loc[skip, ["status", "stage", "predicted"]] = ["unknown", "skipped", -1]
    table = tables.accuracy_table(build_study(rows))
    assert "cert_l2" not in table
    assert "cert_linf" in table
    assert table["union"].item() == pytest.approx(recount(rows)["union"])
    assert table["clean"].item() == recount(fabricate.verdicts(2, 40))["clean"]


def test_paired_tests_use_only_the_samples_on_which_the_methods_differ() -> None:
    rows = fabricate.verdicts(0, 50, ("a", "b"))
    a, b = rows["checkpoint_digest"] == fabricate.digest("a"), rows["checkpoint_digest"] == fabricate.digest("b")
    for mask, limit in ((a, 40), (b, 28)):
        rows.loc[mask, "status"] = np.where(rows.loc[mask, "sample_index"] < limit, "certified", "unknown")
    made = build_study(rows, fabricate.infos({"a": {"method": "scratch"}, "b": {"method": "linf"}}))
    row = tables.significance_table(made).iloc[0]
    assert (row["method_a"], row["only_a"], row["method_b"], row["only_b"]) == ("linf", 0, "CURE-Scratch", 12)
    assert row["p"] == pytest.approx(2 * 0.5**12)
    assert bool(row["significant"])
    assert row["difference"] == pytest.approx(-24)


def test_paired_tests_refuse_different_samples() -> None:
    rows = fabricate.verdicts(0, 50, ("a", "b"))
    rows = rows[(rows["checkpoint_digest"] == fabricate.digest("a")) | (rows["sample_index"] < 30)]
    made = build_study(rows, fabricate.infos({"a": {"method": "scratch"}, "b": {"method": "linf"}}))
    with pytest.raises(UserError, match="different samples"):
        tables.significance_table(made)


def test_seeds_of_a_method_are_averaged_and_variants_are_not() -> None:
    made = study(
        n=60,
        a={"method": "scratch", "eta": 1.0, "seed": 0},
        b={"method": "scratch", "eta": 1.0, "seed": 1},
        c={"method": "scratch", "eta": 2.0},
    )
    table = tables.seed_table(made).set_index("method")
    assert table["seeds"].to_dict() == {"CURE-Scratch [eta=1]": 2, "CURE-Scratch [eta=2]": 1}
    each = tables.accuracy_table(made).query("method == 'CURE-Scratch [eta=1]'")["union"]
    assert table.loc["CURE-Scratch [eta=1]", "union"] == pytest.approx(each.mean())
    assert table.loc["CURE-Scratch [eta=1]", "union_sd"] == pytest.approx(each.std(ddof=1))


def test_a_variant_in_several_settings_is_named_by_what_is_not_default() -> None:
    plain, ball = (
        {"method": "max", "regions": {"l2": "box"}, "lambda_2": 1e-5},
        {"method": "max", "regions": {"l2": "ball"}, "lambda_2": 0.5},
    )
    made = study(n=10, a=plain, b=ball)
    assert sorted(e.label for e in made.entries) == ["CURE-Max", "CURE-Max [regions.l2=ball, lambda_2=0.5]"]


def test_geometric_and_patch_rows_give_gcr_columns() -> None:
    rows = fabricate.verdicts(0, 40)
    extra = []
    for family, name, status in (
        ("geometric", "R(10)", "certified"),
        ("geometric", "Sh(2)", "unknown"),
        ("patch", "patch 2x2", "certified"),
    ):
        extra.append(rows[rows["norm"] == "linf"].assign(family=family, threat=name, norm="", eps=0.0, status=status, stage="ibp"))
    row = tables.accuracy_table(build_study(pd.concat([rows, *extra], ignore_index=True))).iloc[0]
    assert row["gcr_geo"] == 50
    assert row["gcr_all"] == pytest.approx(200 / 3)
    assert row["gcr_geo_low"] < 50 < row["gcr_geo_high"]
    assert (row["cert_Sh(2)_low"], row["cert_R(10)_high"]) == (0, 100)
    assert row["union"] == pytest.approx(recount(rows)["union"])


def test_a_mean_over_fewer_configurations_than_the_others_have_is_not_put_in_their_column() -> None:
    rows = fabricate.verdicts(0, 20, ("a", "b"))
    geo = [rows[rows["norm"] == "linf"].assign(family="geometric", threat=name, norm="geometric", eps=0.0) for name in ("R(10)", "Sh(2)")]
    geo[1] = geo[1][geo[1]["checkpoint_digest"] == fabricate.digest("a")]
    made = build_study(pd.concat([rows, *geo], ignore_index=True), fabricate.infos({"a": {"method": "max"}, "b": {"method": "linf"}}))
    table = tables.accuracy_table(made).set_index("method")
    assert table["gcr_geo"].isna().to_dict() == {"linf": True, "CURE-Max": False}
    assert table["cert_R(10)"].notna().all()


def three_seeds(n: int = 60) -> Study:
    runs = {f"{m}{s}": {"method": m, "seed": s} for m in ("linf", "max", "scratch") for s in range(3)}
    return study(7, n, **runs)


def test_over_three_seeds_the_mean_the_deviation_and_the_interval_are_the_textbooks() -> None:
    made = three_seeds()
    each = tables.accuracy_table(made)
    for row in tables.seed_table(made).itertuples():
        own = each.loc[each["method"] == row.method, "union"].tolist()
        mean = sum(own) / 3
        assert row.seeds == 3
        assert row.union == pytest.approx(mean)
        assert row.union_sd == pytest.approx((sum((v - mean) ** 2 for v in own) / 2) ** 0.5)
        low, high = wilson(mean / 100 * 60, 60)  # 60 images, not 180
        assert (row.union_low, row.union_high) == (pytest.approx(100 * low), pytest.approx(100 * high))
    text = tables.compact_table(made, "linf").set_index("method")
    assert "±" in text.loc["CURE-Max", "union"]
    assert text.loc["linf", "against linf"] == "-"


def test_against_a_baseline_seeds_are_pooled_image_by_image_and_holm_runs_over_the_methods() -> None:
    made = three_seeds()
    table = tables.baseline_table(made, "linf").set_index("method")
    assert list(table.index) == ["CURE-Max", "CURE-Scratch"]
    wins = {e.label: np.zeros(60, dtype=int) for e in made.entries}
    for e in made.entries:
        wins[e.label] += e.evaluation.certified.all(1)
    p = {}
    for method, row in table.iterrows():
        better, worse = int((wins[method] > wins["linf"]).sum()), int((wins[method] < wins["linf"]).sum())
        assert (row["better"], row["worse"], row["seeds"], row["n"]) == (better, worse, 3, 60)
        assert row["difference"] == pytest.approx(100 * (wins[method].sum() - wins["linf"].sum()) / 180)
        p[method] = scipy.stats.binomtest(better, better + worse, 0.5).pvalue
        assert row["p"] == pytest.approx(p[method])
    first, second = sorted(p, key=lambda m: p[m])
    assert table.loc[first, "p_holm"] == pytest.approx(min(1, 2 * p[first]))
    assert table.loc[second, "p_holm"] == pytest.approx(min(1, max(2 * p[first], p[second])))
    pooled = tables.significance_table(made, pooled=True)
    assert len(pooled) == 3
    assert set(pooled["seed"]) == {"0, 1, 2"}
    assert len(tables.significance_table(made)) == 9
    with pytest.raises(UserError, match=r"no method called 'max' .* there are: linf, CURE-Max"):
        tables.baseline_table(made, "max")


def test_a_baseline_with_one_seed_is_compared_on_that_seed_alone() -> None:
    made = study(1, 40, a={"method": "max", "seed": 0}, b={"method": "max", "seed": 1}, c={"method": "linf", "seed": 1})
    row = tables.baseline_table(made, "linf").iloc[0]
    single = tables.significance_table(made).iloc[0]
    assert (row["seeds"], row["p"]) == (1, single["p"])
    assert single["seed"] == 1


def test_the_pareto_front_has_the_best_of_both() -> None:
    table = tables.pareto_table(study(n=80, a={"method": "linf"}, b={"method": "l2"}, c={"method": "max"}))
    assert set(table["metric"]) == {"union"}
    assert table.loc[table["value"].idxmax(), "on_front"]
    assert table.loc[table["clean"].idxmax(), "on_front"]


# ---------------------------------------------------------------- what is refused
