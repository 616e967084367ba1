"""Every analysis script runs on a small store and on a rich one, writes what it says, and says what is missing."""

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from cure_ray.results.frames import load
from cure_ray.results.outputs import Analysis, escape_latex, script, to_markdown
from cure_ray.results.paper import compare, doubts, parse_radii, read_paper
from cure_ray.results.study import build_study
from cure_ray.testing import fabricate, stores

FOLDER = Path(__file__).parent.parent.parent / "analysis"
SCRIPTS = sorted(p.stem for p in FOLDER.glob("*.py"))


def main_of(name: str) -> Callable[[Analysis], None]:
    spec = importlib.util.spec_from_file_location(f"analysis_{name}", FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a quickstart leaves: one data set, two methods."""
    root = tmp_path_factory.mktemp("small")
    stores.write_store(root / "store", {"a": stores.experiment("linf"), "b": stores.experiment("scratch")}, n=12)
    return root / "store"


@pytest.fixture(scope="session")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All the grids, several seeds, several radii, geometric and patch rows, attacks on words."""
    root = tmp_path_factory.mktemp("rich")
    runs = {m: stores.experiment(m) for m in ("linf", "l2", "l2_pgd", "joint", "max", "random", "finetune", "scratch")}
    runs |= {f"scratch{s}": stores.experiment("scratch", seed=s) for s in (1, 2)}
    runs |= {f"eta{v}": stores.experiment("scratch", eta=v) for v in (0.5, 4.0)}
    runs |= {f"beta{v}": stores.experiment("scratch", beta=v) for v in (0.0, 1.0)}
    runs |= {f"alpha{v}": stores.experiment("joint", alpha=v) for v in (0.0, 1.0)}
    runs |= {f"lambda{v}": stores.experiment("l2", lambda_2=v) for v in (1e-4, 1e-2)}
    runs |= {"ba": stores.experiment("scratch", projection=False), "gp": stores.experiment("scratch", eta=0.0)}
    base = fabricate.verdicts(0, 12, tuple(runs))
    more = [base]
    for eps in (0.05, 0.2):
        more.append(base[base["norm"] == "linf"].assign(threat=f"linf={eps:g}", eps=eps))
    for family, name in (("geometric", "R(10)"), ("geometric", "Sh(2)"), ("patch", "patch 2x2")):
        more.append(base[base["norm"] == "linf"].assign(family=family, threat=name, norm="", eps=0.0))
    more += [fabricate.attacked(base, attack, seed) for seed, attack in enumerate(("pwws", "cf8"))]
    stores.write_store(root / "store", runs, frame=pd.concat(more, ignore_index=True))
    stores.write_run(root / "runs" / "max", runs["max"])
    return root / "store"


@pytest.fixture(scope="session")
def made(rich: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What a script writes from the rich store; each runs once."""

    @functools.cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        script(main_of(name), [str(rich), "--out", str(folder), "--baseline", "CURE-Max"])
        return folder

    return run


def test_there_is_a_script_for_every_table_and_figure() -> None:
    assert SCRIPTS == [
        "alpha_curve", "ba_gp_ablation", "beta_curve", "bound_differences", "cifar100_table", "decomposition", "eta_curve",
        "geometric_table", "l2_training", "lambda2_curve", "main_table", "paper_comparison", "runtime_table", "trade_off_bars",
        "varying_eps", "words_table",
    ]  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs_on_a_small_store_and_names_what_it_lacks(
    name: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(main_of(name), [str(small), "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert said
    assert all(
        (line.removeprefix("wrote ")) and Path(line.removeprefix("wrote ")).exists()
        for line in said.splitlines()
        if line.startswith("wrote")
    )
    if name in (
        "alpha_curve",
        "beta_curve",
        "eta_curve",
        "lambda2_curve",
        "varying_eps",
        "geometric_table",
        "cifar100_table",
        "bound_differences",
        "words_table",
    ):
        assert "missing: " in said


@pytest.mark.parametrize("name", [s for s in SCRIPTS if s != "cifar100_table"])
def test_it_writes_tables_and_figures_from_a_rich_store(name: str, made: Callable[[str], Path]) -> None:
    folder = made(name)
    endings = {p.suffix for p in folder.iterdir()}
    assert {".csv", ".md", ".tex"} <= endings
    figures = {
        "alpha_curve",
        "ba_gp_ablation",
        "beta_curve",
        "bound_differences",
        "eta_curve",
        "lambda2_curve",
        "trade_off_bars",
        "varying_eps",
        "words_table",
    }
    if name in figures:
        assert {".png", ".svg"} <= endings
    for csv in folder.glob("*.csv"):
        assert not pd.read_csv(csv).empty
    for tex in folder.glob("*.tex"):
        text = tex.read_text()
        assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
        body = text[text.index(r"\midrule") : text.index(r"\bottomrule")].strip().splitlines()[1:]
        columns = text[text.index(r"\toprule") :].splitlines()[1].count(" & ")
        assert all(line.count(" & ") == columns for line in body)


def test_the_ladder_joins_only_runs_that_differ_in_nothing_else_and_its_errors_add_up(made: Callable[[str], Path]) -> None:
    folder = made("ba_gp_ablation")
    table = pd.read_csv(folder / "ba_gp_0.csv")
    assert list(dict.fromkeys(table["step"])) == ["Max", "Max + BA", "Max + GP", "Max + BA + GP"]
    assert (table["R_r"] + table["R_align"]).tolist() == pytest.approx((100 - table["union"]).tolist())
    rows = table.set_index("method")
    assert set(rows.loc[rows["step"] == "Max + BA", "below"]) == {"CURE-Max"}
    assert set(rows.loc[rows["step"] == "Max + GP", "below"]) == {"CURE-Max"}
    assert rows.loc["CURE-Scratch", "below_step"] == "Max + BA"
    (plain,) = table[table["method"] == "CURE-Scratch [projection=False]"].to_dict("records")
    assert plain["difference"] == pytest.approx(plain["union"] - rows.loc["CURE-Max", "union"])
    assert f"| Max + BA | {plain['method']} |" in (folder / "ba_gp_0.md").read_text()


def test_the_decomposition_is_a_table_of_methods_with_deviations_over_seeds(made: Callable[[str], Path]) -> None:
    folder = made("decomposition")
    table = pd.read_csv(folder / "decomposition.csv")
    assert table["R_union"].to_numpy() == pytest.approx((table["R_r"] + table["R_align"]).to_numpy())
    text = (folder / "decomposition.md").read_text()
    assert text.count("\n| CURE-Scratch") == len({m for m in table["method"] if m.startswith("CURE-Scratch")})
    assert "±" in text
    assert {"decomposition_0.png", "decomposition_0.svg"} <= {p.name for p in folder.iterdir()}


def test_the_main_table_compares_with_the_named_baseline(
    made: Callable[[str], Path], small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made("main_table")
    text = (folder / "main_table.md").read_text()
    assert "| against CURE-Max |" in text
    assert "Holm-corrected over the methods" in text
    assert len(pd.read_csv(folder / "main_baseline.csv")) == text.count("\n| ") - 2, "every method but the baseline itself"
    with pytest.raises(SystemExit) as info:
        script(main_of("main_table"), [str(small), "--out", str(tmp_path), "--baseline", "nobody"])
    assert info.value.code == 2
    assert "no method called 'nobody'" in capsys.readouterr().err


def test_the_table_of_words_keeps_proofs_and_attacks_apart_and_counts_what_stays_in_a_ball(made: Callable[[str], Path], rich: Path) -> None:
    folder = made("words_table")
    text = (folder / "words_table.md").read_text()
    assert {"pwws (attack on words)", "cf8 (attack on words)", "union, latent"} <= {c.strip() for c in text.splitlines()[2].split("|")}
    assert "Nothing is proven about words" in text
    rows = load([rich]).verdicts.query("family == 'text'")
    for _, moved in pd.read_csv(folder / "words_moved.csv").iterrows():
        own = rows[rows["threat"] == moved["attack"]]
        assert moved["broken"] == (own["status"] == "falsified").sum() > 0
        assert moved["attacked"] == (own["status"] != "misclassified").sum()
        assert (moved["moved_l2"], moved["inside_l2"], moved["single_l2"]) == (2.0, 0, 50.0)
    tests = pd.read_csv(folder / "words_significance.csv")
    assert set(tests["attack"]) == {"pwws", "cf8"}
    assert (tests["only_a"] - tests["only_b"]).abs().max() > 0
    paper = pd.read_csv(folder / "words_paper.csv").set_index("method")
    assert paper.loc["CURE-Scratch"].tolist() == [28.4, 17.6]


def test_the_eta_curve_mixes_no_other_setting(made: Callable[[str], Path]) -> None:
    table = pd.read_csv(made("eta_curve") / "eta_curve_0.csv")
    assert table[["eta", "seeds"]].to_numpy().tolist() == [[0.0, 1], [0.5, 1], [2.0, 3], [4.0, 1]]


def test_the_varied_radius_replaces_only_its_own_norm(made: Callable[[str], Path]) -> None:
    table = pd.read_csv(made("varying_eps") / "varying_eps.csv")
    assert sorted(table["eps"].unique()) == [0.05, 0.1, 0.2]
    assert set(table["norm"]) == {"linf"}


def test_equal_data_give_equal_files(small: Path, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        script(main_of("trade_off_bars"), [str(small), "--out", str(tmp_path / folder)])
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_a_script_on_no_store_ends_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        script(main_of("main_table"), [str(tmp_path / "none")])
    assert info.value.code == 2
    assert "does not exist" in capsys.readouterr().err


# ---------------------------------------------------------------- the paper's values


def test_the_papers_values_are_complete_and_its_oddities_marked() -> None:
    paper = read_paper(FOLDER / "paper")
    assert (paper["experiment"] == "main").sum() == 105
    assert (paper["experiment"] == "main_appendix").sum() == 70
    marked = paper[paper["doubt"].str.contains("K1") & (paper["doubt"] == "K1")]
    assert set(marked["method"]) == {"CURE-Joint", "CURE-Random"}
    assert len(marked) == 10
    assert doubts("main", "TinyImageNet", "CURE-Finetune", "union") == "K13"
    assert doubts("main", "MNIST", "CURE-Scratch", "union") == ""
    assert parse_radii("linf=8/255;l2=0.5") == {"linf": 8 / 255, "l2": 0.5}


def test_values_are_compared_only_at_the_same_data_and_radii() -> None:
    paper = read_paper(FOLDER / "paper")
    threats = (("linf", 0.1), ("l2", 0.5), ("l1", 1.0))
    from cure_ray.results.study import RunInfo

    def made(dataset: str, eps: tuple[tuple[str, float], ...]) -> pd.DataFrame:
        info = RunInfo(
            fabricate.digest("a"), {"seed": 0, "dataset": {"name": dataset}, "training": {"method": "max"}, "threats": dict(eps)}
        )
        return compare(build_study(fabricate.verdicts(0, 20, threats=eps, dataset=dataset), {fabricate.digest("a"): info}), paper)

    table = made("mnist", threats)
    assert set(table["experiment"]) == {"main_appendix"}
    assert table.set_index("metric")["paper"].to_dict() == {
        "clean": 99.3,
        "cert_linf": 97.6,
        "cert_l2": 97.3,
        "cert_l1": 96.8,
        "union": 96.8,
    }
    assert (table["ours, alpha-CROWN"] <= table["ours, all stages"]).all()
    assert made("digits", threats).empty
    assert made("mnist", (("linf", 0.11), ("l2", 0.5), ("l1", 1.0))).empty


def test_markdown_and_latex_escape_what_would_break_them() -> None:
    assert escape_latex("a_b & 5 % {x}") == r"a\_b \& 5 \% \{x\}"
    assert "a\\|b" in to_markdown(pd.DataFrame({"x": ["a|b"]}))


def test_the_notebook_runs_from_top_to_bottom(rich: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("CURE_RAY_STORE", str(small))
    monkeypatch.setitem(os.environ, "PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(FOLDER / "union.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells if cell.cell_type == "code")  # nothing stale in git
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert any("CURE-Scratch" in str(cell.get("outputs")) for cell in notebook.cells)
