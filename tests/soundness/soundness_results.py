"""One compact check of what becomes of verdicts: the union counted sample by sample, a store that returns what it was given or refuses.

Imports of cure_ray happen inside the functions: the mutation test runs them against altered copies of the package.
"""

import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

THREATS = (("linf", 0.1), ("l2", 0.5), ("l1", 1.0))
STATUSES = ("certified", "falsified", "unknown", "timeout", "oom", "error", "misclassified")


def refused(run: Callable[[], object], words: str = "") -> None:
    from cure_ray.errors import UserError

    said = None
    try:
        run()
    except UserError as error:
        said = str(error)
    assert said is not None, f"not refused: {words}"
    assert words in said, f"refused for another reason: {said}"


def make_job(digest: str = "a" * 64, union_only: bool = False, **changes: object) -> object:
    from cure_ray.certification.job import CascadeSettings, Job

    settings = CascadeSettings(("ibp", "attack", "crown"))
    return replace(Job(digest, "digits", "test", "d" * 64, "native", "1", settings, 0, union_only), **changes)


def make_rows(job: object, norm: str, eps: float, indices: list[int], seed: int = 0) -> list[object]:
    """Verdicts of every status, margins and all."""
    from cure_ray.certification.verdict import SCHEMA_VERSION, Status, Verdict

    rows = []
    for index in indices:
        r = random.Random(f"{seed} {norm} {index}")
        wrong = random.Random(f"{seed} clean {index}").random() < 0.2
        status = Status("misclassified" if wrong else "certified" if r.random() < 0.6 else r.choice(STATUSES[1:-1]))
        label, margins = index % 3, (r.uniform(0.1, 1), r.uniform(0.1, 1))
        attacked = r.random() < 0.5
        rows.append(
            Verdict(
                SCHEMA_VERSION, job.run_id, job.checkpoint_digest, job.dataset, job.split, index, label, (label + wrong) % 3, "lp",
                f"{norm}={eps:g}", norm, eps, status, r.choice(["ibp", "crown"]), min(margins), margins, 0.5 if attacked else None, None,
                0.25, job.engine, job.engine_version, job.seed, "ibp,attack,crown", 0.0, 20_000, "0,1", 0, None,
            )
        )  # fmt: skip
    return rows


def check_union() -> None:
    """Every share of the table against a count in plain Python; a union with holes, or rows that contradict each other, is refused."""
    import pandas as pd

    from cure_ray.results.frames import run_info
    from cure_ray.results.schema import to_table
    from cure_ray.results.study import build_study
    from cure_ray.results.tables import accuracy_table

    job, n = make_job(), 40
    rows = [row for norm, eps in THREATS for row in make_rows(job, norm, eps, list(range(n)))]

    def study(verdicts: list[object], radii: object = THREATS) -> object:
        frame = to_table(random.Random(1).sample(verdicts, len(verdicts))).to_pandas()
        return build_study(frame, {job.checkpoint_digest: run_info({}, job.checkpoint_digest, {})}, radii, None)

    table = accuracy_table(study(rows))
    (row,) = pd.DataFrame(table).to_dict("records")
    by_norm = {norm: {r.sample_index: str(r.status) for r in rows if r.norm == norm} for norm, _ in THREATS}
    proven = {norm: {i for i, s in by_norm[norm].items() if s == "certified"} for norm in by_norm}
    right = {r.sample_index for r in rows if r.label == r.predicted}
    expected = {
        "clean": len(right), "cert_linf": len(proven["linf"]), "cert_l2": len(proven["l2"]), "cert_l1": len(proven["l1"]),
        "union": len(proven["linf"] & proven["l2"] & proven["l1"]), "union_linf_l2": len(proven["linf"] & proven["l2"]),
    }  # fmt: skip
    for name, count in expected.items():
        assert math.isclose(row[name], 100 * count / n), f"{name}: {row[name]} for {count} of {n}"
        low, high = reference_wilson(count, n)
        assert math.isclose(row[f"{name}_low"], 100 * low, abs_tol=1e-6)
        assert math.isclose(row[f"{name}_high"], 100 * high, abs_tol=1e-6)
    assert 0 < expected["union"] < min(len(p) for p in proven.values())
    decided = ("certified", "falsified", "misclassified")
    for norm, _ in THREATS:
        attacked = all(str(r.status) in decided or r.attack_margin is not None for r in rows if r.norm == norm)
        assert attacked or math.isnan(row[f"emp_{norm}"])
    whole = [replace(r, attack_margin=0.5) for r in rows]
    (row,) = pd.DataFrame(accuracy_table(study(whole))).to_dict("records")
    broken = {norm: {i for i, s in by_norm[norm].items() if s in ("falsified", "misclassified")} for norm in by_norm}
    assert math.isclose(row["emp_l2"], 100 * (n - len(broken["l2"])) / n)
    assert math.isclose(row["emp_union"], 100 * (n - len(set().union(*broken.values()))) / n)
    refused(lambda: accuracy_table(study(rows[:-1])), "every sample and threat")
    refused(lambda: accuracy_table(study([*rows, rows[0]])), "more than one verdict")
    refused(lambda: accuracy_table(study([replace(rows[0], label=rows[0].label + 1), *rows[1:]])), "two different values")
    refused(lambda: accuracy_table(study(rows, [*THREATS[:2], ("l1", 2.0)])), "l1=2")
    refused(lambda: accuracy_table(study(rows + make_rows(job, "l2", 0.7, list(range(n))), None)), "several radii")


def reference_wilson(k: int, n: int) -> tuple[float, float]:
    """The roots of (p - k/n)^2 = z^2 p (1 - p) / n."""
    z, share = 1.959963984540054, k / n
    a, b, c = 1 + z * z / n, -(2 * share + z * z / n), share * share
    root = math.sqrt(max(b * b - 4 * a * c, 0.0))
    return max((-b - root) / (2 * a), 0.0), min((-b + root) / (2 * a), 1.0)


def check_statistics() -> None:
    from cure_ray.results.statistics import holm, mcnemar, pareto_front, wilson

    for k, n in ((0, 10), (10, 10), (3, 10), (500, 1000)):
        low, high = wilson(k, n)
        expected = reference_wilson(k, n)
        assert math.isclose(float(low), expected[0], abs_tol=1e-9)
        assert math.isclose(float(high), expected[1], abs_tol=1e-9)
        assert float(low) <= k / n <= float(high)
    for a, b in ((0, 0), (1, 7), (7, 1), (5, 5), (0, 12)):
        tail = sum(math.comb(a + b, i) for i in range(min(a, b) + 1)) / 2 ** (a + b)
        assert math.isclose(float(mcnemar(a, b)), min(1.0, 2 * tail))
    assert np.allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert np.allclose(holm([0.9, 0.8]), [1.0, 1.0])
    assert np.allclose(holm([0.02, 0.019]), [0.038, 0.038])
    points = [[1, 1], [2, 0], [0, 2], [1, 1], [0.5, 0.5], [2, -1]]
    assert pareto_front(points).tolist() == [True, True, True, True, False, False]


def check_store() -> None:
    """What is written is read; what is of other data, settings, radii or networks is refused; damage is found and named."""
    from cure_ray.certification.job import CascadeSettings, Shard, plan
    from cure_ray.results.fsck import fsck
    from cure_ray.results.schema import from_table
    from cure_ray.results.store import Store
    from cure_ray.threats.balls import Ball

    linf, l2, indices = Ball("linf", 0.1), Ball("l2", 0.5), list(range(12))
    with tempfile.TemporaryDirectory() as folder:
        root, job = Path(folder) / "store", make_job()
        refused(lambda: Store.open(root), "holds no results")
        (Path(folder) / "strange").mkdir()
        (Path(folder) / "strange" / "letter.txt").write_text("mine")
        refused(lambda: Store.create(Path(folder) / "strange", "digits", "test", "d" * 64), "is not empty")
        store = Store.create(root, "digits", "test", "d" * 64)
        for other in (("mnist", "test", "d" * 64), ("digits", "train", "d" * 64), ("digits", "test", "e" * 64)):
            refused(lambda o=other: Store.create(root, *o), "Choose another directory")
        assert store.begin(job, [linf, l2], indices, {"name": "one"}) == set()
        assert store.about(job.checkpoint_digest) == {"name": "one"}
        parts = [Shard(job, (linf,), tuple(indices[:6])), Shard(job, (linf,), tuple(indices[6:])), Shard(job, (l2,), tuple(indices))]
        rows = make_rows(job, "linf", 0.1, indices) + make_rows(job, "l2", 0.5, indices)
        picture = np.random.default_rng(0).random((1, 3, 3))
        digest = store.write_witness(picture)
        assert np.array_equal(store.read_witness(digest), picture)
        rows[0] = replace(rows[0], witness=digest)
        store.write(parts[0], rows[:6])
        missing = [f for f in fsck(store) if f.kind == "missing"]
        assert any("linf=0.1" in f.what and "6 of 12" in f.what for f in missing)
        assert any("l2=0.5" in f.what and "12 of 12" in f.what for f in missing)
        assert Store.open(root).begin(job, [linf, l2], indices, {}) == {("linf=0.1", i) for i in range(6)}
        left = plan(job, [linf, l2], indices, {("linf=0.1", i) for i in range(6)}, 5)
        assert [(s.threats, s.indices) for s in left] == [
            ((linf,), (6, 7, 8, 9, 10)), ((linf,), (11,)), ((l2,), (0, 1, 2, 3, 4)), ((l2,), (5, 6, 7, 8, 9)), ((l2,), (10, 11)),
        ]  # fmt: skip
        store.write(parts[1], reversed(rows[6:12]))
        store.write(parts[2], rows[12:])
        assert sorted(from_table(store.read()), key=_key) == sorted(rows, key=_key)
        assert fsck(store) == []
        store.compact(job, [linf, l2])
        assert len(store.shards()) == 2
        assert sorted(from_table(store.read()), key=_key) == sorted(rows, key=_key)
        assert fsck(store) == []
        assert Store.open(root).begin(job, [linf, l2], indices, {}) == {(t, i) for t in ("linf=0.1", "l2=0.5") for i in indices}
        refused(lambda: store.begin(make_job(seed=1), [linf], indices, {}), "other settings")
        refused(lambda: store.begin(make_job(settings=CascadeSettings(("ibp",))), [linf], indices, {}), "other settings")
        refused(lambda: store.begin(make_job("b" * 64), [linf], indices, {}), "another checkpoint")
        refused(lambda: store.begin(job, [Ball("linf", 0.1 + 1e-12)], indices, {}), "too close to tell apart")
        Store.create(root, "digits", "test", "d" * 64, many=True).begin(make_job("b" * 64), [linf], indices, {})
        assert {f.kind for f in fsck(store)} == {"missing"}
        _check_damage(store, root, parts[2], rows, digest, picture)
    _check_union_only()


def _key(verdict: object) -> tuple[str, int]:
    return verdict.threat, verdict.sample_index


def _check_damage(store: object, root: Path, shard: object, rows: list[object], digest: str, picture: np.ndarray) -> None:
    from cure_ray.results.fsck import fsck

    found = {name: (root / "verdicts" / name).read_bytes() for name in store.shards()}
    name = shard.name
    for place in (30, len(found[name]) // 2, len(found[name]) - 40):
        flipped = bytearray(found[name])
        flipped[place] ^= 1
        (root / "verdicts" / name).write_bytes(flipped)
        assert any(f.kind == "torn" and name in f.what for f in fsck(store)), f"a flipped bit at {place} was not seen"
    (root / "verdicts" / name).write_bytes(found[name])
    (root / "verdicts" / f"again-{name}").write_bytes(found[name])
    assert sum(f.kind == "duplicated" for f in fsck(store)) == 12
    (root / "verdicts" / f"again-{name}").unlink()
    other = make_job("b" * 64, seed=3)
    store.write(replace(shard, job=other), make_rows(other, "l2", 0.5, [0]))
    assert any(f.kind == "foreign" for f in fsck(store))
    store.discard(f"verdicts/{replace(shard, job=other).name}")
    lying = replace(shard, job=make_job(seed=9))
    store.write(lying, rows[12:13])
    assert any(f.kind == "torn" and "another run" in f.what for f in fsck(store)), "rows that belong to another run"
    store.discard(f"verdicts/{lying.name}")
    (root / "verdicts" / ".half").write_bytes(b"x")
    (root / "verdicts" / "notes.txt").write_bytes(b"x")
    kinds = [f.kind for f in fsck(store) if "half" in f.what or "notes" in f.what]
    assert sorted(kinds) == ["foreign", "torn"]
    np.save(root / "witnesses" / f"{digest}.npy", picture + 1e-9)
    assert any(f.kind == "torn" and "witness" in f.what for f in fsck(store))
    (root / "witnesses" / f"{digest}.npy").unlink()
    assert any(f.kind == "missing" and "witness" in f.what for f in fsck(store))


def _check_union_only() -> None:
    """Which samples such a run skipped depends on all its threats: none can be added."""
    from cure_ray.certification.job import Shard
    from cure_ray.results.store import Store
    from cure_ray.threats.balls import Ball

    linf, l2, indices = Ball("linf", 0.1), Ball("l2", 0.5), [0, 1, 2]
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(union_only=True)
        store = Store.create(folder, "digits", "test", "d" * 64)
        store.begin(job, [linf], indices, {})
        store.write(Shard(job, (linf,), tuple(indices)), make_rows(job, "linf", 0.1, indices))
        refused(lambda: store.begin(job, [linf, l2], indices, {}), "none can be added or left out")


def check_rows() -> None:
    """An outcome becomes the row that says it, and an undecided or unwitnessed one becomes none."""
    import torch

    from cure_ray.certification.outcome import Outcome
    from cure_ray.certification.shard import to_verdict
    from cure_ray.certification.verdict import Status
    from cure_ray.threats.balls import Ball

    job, saved = make_job(), []

    def save(image: torch.Tensor) -> str:
        saved.append(image)
        return "w"

    margins = torch.tensor([0.5, 0.25], dtype=torch.float64)
    outcome = Outcome(1, 1, Status.CERTIFIED, "crown", margins, 0.75, None, 1.5, 3)
    row = to_verdict(job, Ball("l2", 0.5), 7, outcome, save)
    assert (row.status, row.stage, row.margin_lb, row.margins, row.attack_margin) == ("certified", "crown", 0.25, (0.5, 0.25), 0.75)
    assert (row.sample_index, row.label, row.predicted, row.threat, row.eps, row.witness) == (7, 1, 1, "l2=0.5", 0.5, None)
    assert (row.run_id, row.checkpoint_digest, row.box, row.seed, row.nodes) == (job.run_id, job.checkpoint_digest, "0,1", 0, 3)
    witness = torch.zeros(1, 2, 2)
    row = to_verdict(job, Ball("l2", 0.5), 7, Outcome(1, 1, Status.FALSIFIED, "attack", None, -0.5, witness), save)
    assert (row.status, row.witness, row.margin_lb, row.margins) == ("falsified", "w", None, ())
    assert len(saved) == 1
    for bad in (Outcome(1, 1), Outcome(1, 1, Status.FALSIFIED, "attack")):
        try:
            to_verdict(job, Ball("l2", 0.5), 7, bad, save)
        except RuntimeError:
            continue
        raise AssertionError("a row of an undecided sample")


def check_results() -> None:
    """Everything here: used on every mutant of results."""
    check_statistics()
    check_rows()
    check_union()
    check_store()
