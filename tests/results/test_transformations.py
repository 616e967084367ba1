"""Stores with transformations and patches, alone and beside balls, from a real network: tables, report and scripts know them."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cure_ray.cli import app
from cure_ray.interchange import write_onnx
from cure_ray.results import tables
from cure_ray.results.frames import load
from cure_ray.results.statistics import wilson
from tests.certify.perturbation_tools import digits_network

GEOMETRIC, PATCH, BALL = "R(2);Tu(0.1),Tv(0.1)", "patch=1x1", "linf=0.01"
TABLES = (
    tables.accuracy_table, tables.stage_table, tables.status_table, tables.time_table, tables.decomposition_table,
    tables.significance_table, tables.seed_table, tables.pareto_table, tables.compact_table,
)  # fmt: skip


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One store with everything, certified once, and what the command printed."""
    folder = tmp_path_factory.mktemp("transformations")
    network, x, y = digits_network()
    write_onnx(network, folder / "net.onnx")
    np.savez(folder / "data.npz", images=x.numpy(), labels=y.numpy())
    command = ["certify", "--onnx", str(folder / "net.onnx"), "--data", str(folder / "data.npz"), "--device", "cpu", "--quiet"]
    done = CliRunner().invoke(
        app, [*command, "--threats", f"{BALL},{GEOMETRIC},{PATCH}", "--samples", "8", "--out", str(folder / "everything")]
    )
    assert done.exit_code == 0, done.output
    return folder / "everything", done.output


def part(certified: tuple[Path, str], folder: Path, families: set[str]) -> Path:
    """The store as it would be had only these families been certified: rows and plans of the others taken out."""
    shutil.copytree(certified[0], folder)
    gone = set()
    for file in sorted((folder / "verdicts").iterdir()):
        rows = pq.read_table(file)
        if rows["family"][0].as_py() not in families:
            gone.add(rows["threat"][0].as_py())
            file.unlink()
    store = load(certified[0]).stores[0].__class__.open(folder)
    for plan in store.plans():
        plan["threats"] = {t: s for t, s in plan["threats"].items() if t not in gone}
        store.files.write_json(f"plans/{plan['run_id']}.json", plan)
    return folder


CASES = [({"geometric"}, "gcr_geo"), ({"patch"}, "gcr_all"), ({"geometric", "patch"}, "gcr_all"), ({"lp", "geometric", "patch"}, "union")]


@pytest.mark.parametrize(("families", "headline"), CASES, ids=["geometric", "patch", "both", "everything"])
def test_every_table_and_the_report_can_be_made(certified: tuple[Path, str], tmp_path: Path, families: set[str], headline: str) -> None:
    root = part(certified, tmp_path / "store", families)
    study = load(root).study
    (entry,) = study.entries
    assert entry.headline == headline
    for table in TABLES:
        table(study)
    row = tables.accuracy_table(study).iloc[0]
    rows = pq.read_table(root / "verdicts").to_pandas()
    for threat, own in rows[rows["family"] != "lp"].groupby("threat"):
        assert row[f"cert_{threat}"] == pytest.approx(100 * (own["status"] == "certified").mean())
    others = rows[rows["family"] != "lp"]
    if "patch" in families:
        mean = others.groupby("threat")["status"].apply(lambda s: (s == "certified").mean()).mean()
        assert row["gcr_all"] == pytest.approx(100 * mean)
        assert row["gcr_all_low"] == pytest.approx(100 * wilson(8 * mean, 8)[0])
    assert ("union" in row) == ("lp" in families)
    done = CliRunner().invoke(app, ["report", str(root)])
    assert done.exit_code == 0, done.output
    assert done.exception is None
    html = (root / "report.html").read_text()
    assert ("union (balls only)" in html) == (families == {"lp", "geometric", "patch"})
    assert ("there is no union" in html) == ("lp" not in families)
    assert html.count("net certifies") == 1
    for threat in others["threat"].unique():
        assert threat in html
    if "lp" not in families:
        assert "Where the union is lost" not in html
        assert "nan" not in html[html.index("<main") : html.index("</main>")].lower().replace("contenance", "")


def test_the_printed_table_says_what_the_union_is_over_and_has_intervals_for_the_means(certified: tuple[Path, str]) -> None:
    lines = {line.split("  ")[0].strip(): line for line in certified[1].splitlines()}
    assert "union (balls only)" in lines
    assert "union" not in lines
    for name in ("gcr_geo", "gcr_all"):
        assert " to " in lines[name]
