"""The report as a file: self-contained, complete, escaped, and refused with a sentence where there is nothing to report."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import optuna
import pytest

from cure_ray.cli import main
from cure_ray.config import resolve
from cure_ray.results.report import write_report
from cure_ray.results.report.charts import Dot, line_chart, scatter, ticks, upset
from cure_ray.results.report.pictures import png
from cure_ray.testing import fabricate, stores


class Page(HTMLParser):
    """Collects what matters: ids, links, loaded resources, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "a":
            self.links.append(str(found["href"]))
        if tag in ("img", "script", "iframe", "source") and found.get("src"):
            self.loads.append(str(found["src"]))
        if tag == "link":
            self.loads.append(str(found["href"]))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    runs = {
        "a": stores.experiment("max"),
        "b": stores.experiment("scratch"),
        "c": stores.experiment("scratch", seed=1),
        "d": stores.experiment("linf"),
    }
    stores.write_store(folder / "results", runs)
    for name in ("a", "b", "c"):
        stores.write_run(folder / "runs" / name, runs[name])
    write_report(folder / "results")
    return folder


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "results" / "report.html").read_text()


def test_the_report_loads_nothing_from_anywhere(text: str) -> None:
    page = Page(text)
    assert page.loads
    assert all(load.startswith("data:") for load in page.loads)
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"https?://", text)


def test_every_link_leads_to_a_place_on_the_page_or_to_a_file_that_exists(root: Path, text: str) -> None:
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    files = 0
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids, link
        else:
            assert (root / "results" / unquote(link)).exists(), link
            files += 1
    assert files > 20


def test_the_claim_names_method_data_radii_and_interval(text: str) -> None:
    claim = text[text.index("<h1>") : text.index("</dl>")]
    for part in (
        "certifies",
        "30 test images of digits",
        "ℓ∞\u00a0≤\u00a00.1",
        "ℓ2\u00a0≤\u00a00.35",
        "ℓ1\u00a0≤\u00a00.7",
        "95 % interval",
        "native 1",
        "a CPU, 2 CPUs",
        "branch and bound",
    ):
        assert part in claim, part


def test_all_sections_are_there_with_status_counts_curves_and_margins(text: str) -> None:
    for part in (
        "Union table",
        "Pareto front",
        "Funnel",
        "Status of every sample",
        "Which norms fail together",
        "Learning curves",
        "Gallery",
        "Sources",
    ):
        assert part in text, part
    for status in ("certified", "falsified", "unknown", "timeout", "oom", "error", "misclassified"):
        assert f'<th scope="col" class="n">{status}</th>' in text
    assert text.count('<svg class="margins"') > 50
    assert text.count("counterexample for") > 5
    assert "share of the batch that is aligned" in text


def test_user_text_is_escaped(tmp_path: Path) -> None:
    store = stores.write_store(tmp_path / "s", {"a": stores.experiment("max")}, n=6)
    name = store.files.names("runs", ".json")[0]
    about = store.files.read_json(f"runs/{name}")
    assert about is not None
    about["experiment"]["training"]["method"] = "<script>alert(1)</script>"
    about["experiment"]["network"]["name"] = "<b>bold</b>"
    store.files.write_json(f"runs/{name}", about)
    html = write_report(tmp_path / "s").read_text()
    assert "<script>alert" not in html
    assert "<b>bold" not in html
    assert "&lt;b&gt;bold" in html


def test_without_images_runs_or_experiment_the_report_says_so(tmp_path: Path) -> None:
    store = stores.write_store(tmp_path / "s", {"a": stores.experiment("max")}, n=6)
    store.files.write_json(
        f"runs/{store.files.names('runs', '.json')[0]}", {"network": "my.nets:resnet", "weights": "w.pt", "data": "gone.npz"}
    )
    html = write_report(tmp_path / "s", tmp_path / "elsewhere" / "r.html").read_text()
    assert "does not say which data set" in html
    assert "training runs were not found" in html


def test_a_sweep_shows_which_hyper_parameters_mattered(tmp_path: Path) -> None:
    stores.write_store(tmp_path / "sweep" / "results", {"a": stores.experiment("max")}, n=6)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "sweep" / "journal.log"))
    study = optuna.create_study(study_name="eta", storage=optuna.storages.JournalStorage(backend), direction="maximize")
    for i in range(8):
        trial = optuna.trial.create_trial(
            params={"training.eta": i / 8, "training.beta": (i * 3 % 8) / 8},
            distributions={n: optuna.distributions.FloatDistribution(0, 1) for n in ("training.eta", "training.beta")},
            value=i / 8,
        )
        study.add_trial(trial)
    html = write_report(tmp_path / "sweep").read_text()
    section = html[html.index('id="sweeps"') :]
    assert "8 finished of 8 trials" in section
    assert section.index("training.eta") < section.index("training.beta")


def test_several_objectives_each_have_importances_and_slices_and_the_front_is_drawn(tmp_path: Path) -> None:
    """Trial i reaches (1 - i/10, i/10): all on the front but those whose clean is forbidden; one was stopped at a rung, one by bound."""
    stores.write_store(tmp_path / "sweep" / "results", {"a": stores.experiment("max")}, n=6)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "sweep" / "journal.log"))
    study = optuna.create_study(study_name="two", storage=optuna.storages.JournalStorage(backend), directions=["maximize"] * 2)
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        study.set_metric_names(["clean", "union"])
    for i in range(10):
        trial = study.ask()
        trial.suggest_float("training.lambda_2", 1e-4, 1.0, log=True)
        trial.suggest_categorical("training.method", ['"max"', '"joint"'])
        trial.set_constraint("clean", 0.55 - (1 - i / 10))
        if i < 8:
            study.tell(trial, [1 - i / 10, i / 10])
        else:
            trial.set_user_attr("rung:0" if i == 8 else "at_most", {"clean": 0.1, "union": 0.1})
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    html = write_report(tmp_path / "sweep").read_text()
    section = html[html.index('id="sweeps"') : html.index('id="gallery"')]
    assert "8 finished of 10 trials, 2 stopped early, 5 of the finished ones meet the constraints, 5 on the front" in section
    figures = section.split("<figure>")[1:]
    assert next(f.partition("</figcaption>")[0].removeprefix("<figcaption>") for f in figures) == "union against clean"
    assert len(figures) == 5, "the front, and two slices of each objective"
    for figure in figures:
        assert (figure.count("fill t0"), figure.count("hollow t0 faint"), figure.count("<circle")) == (5, 2, 10)
    assert section.count("<h4>clean, best 1.0000</h4>") == section.count("<h4>union, best 0.7000</h4>") == 1
    assert section.count(">joint</text>") == 2
    assert "1e-2" in section


def test_two_data_sets_become_two_settings(tmp_path: Path) -> None:
    stores.write_store(tmp_path / "one", {"a": stores.experiment("max")}, n=8)
    frame = fabricate.verdicts(5, 8, ("b",), threats=(("linf", 0.05), ("l2", 0.35), ("l1", 0.7)))
    shrunk = resolve({"preset": "smoke", "threats": {"linf": 0.05}, "training": {"method": "max"}})
    stores.write_store(tmp_path / "two", {"b": shrunk}, frame=frame)
    html = write_report(tmp_path).read_text()
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    assert html.count("<h1>") == 2
    assert 'id="union-1"' in html


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["cure-ray", "report", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return int(exit_info.value.code or 0)


def test_the_command_prints_the_path(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, str(root / "results"), "--out", str(tmp_path / "r.html"), "--images", "2") == 0
    assert str(tmp_path / "r.html") in capsys.readouterr().out


def test_bad_input_ends_with_a_sentence_and_exit_code_2(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        ((str(tmp_path / "none"),), "does not exist"),
        ((str(tmp_path),), "cure-ray certify"),
        ((str(root / "results"), "--threat", "linf=0.3"), "linf=0.3"),
        ((str(root / "results"), "--checkpoint", "zz"), "no verdicts of a checkpoint"),
        ((str(root / "results"), "--out", "/proc/nope/r.html"), "cannot write"),
    ):
        assert run_command(monkeypatch, *arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error


def test_a_duplicated_row_ends_the_command_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stores.write_store(tmp_path / "s", {"a": stores.experiment("max")}, n=6)
    file = next((tmp_path / "s" / "verdicts").iterdir())
    (tmp_path / "s" / "verdicts" / f"copy-{file.name}").write_bytes(file.read_bytes())
    assert run_command(monkeypatch, str(tmp_path / "s")) == 2
    assert "more than one verdict" in capsys.readouterr().err
    assert not (tmp_path / "s" / "report.html").exists()


def test_charts_stay_finite_on_degenerate_data() -> None:
    dot = Dot("a", (0, 0, 0), (0, 0, 0), 0, True)
    for chart in (scatter("t", [dot], "x", "y"), line_chart("t", []), upset("t", ["linf"], [((True,), 0)], 0)):
        assert "nan" not in str(chart)
        assert 'inf"' not in str(chart)
    assert ticks(0, 0) == [0]
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]


def test_png_is_readable_by_others() -> None:
    import io

    import matplotlib.image
    import numpy as np

    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert np.allclose(matplotlib.image.imread(io.BytesIO(png(pixels))) * 255, pixels)
