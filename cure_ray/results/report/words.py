"""The sentences and facts at the head of the report: what was claimed, on what, and how sure it is."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from cure_ray.results.frames import Loaded
from cure_ray.results.study import Study
from cure_ray.threats.balls import EACH
from cure_ray.threats.box import Box

Row = dict[str, Any]


def claim(study: Study, best: Row) -> str:
    """One sentence: who certifies how much of what against what."""
    first = study.entries[0]
    e, value = first.evaluation, f"{best[first.headline]:.1f}\u00a0%"
    if first.balls:
        balls = listed([f"{pretty(t.norm)}\u00a0≤\u00a0{'its own radius' if EACH in t.name else f'{t.eps:g}'}" for t in e.threats])
        if unit(study) == "sentence":
            what = f"the vectors of {best['n']} {e.split} sentences of {e.dataset}"
            return f"{best['method']} certifies {value} of {what} against {balls} at once, in latent space: nothing is proven about words."
        return f"{best['method']} certifies {value} of {best['n']} {e.split} images of {e.dataset} against {balls} at once."
    images = f"{best['n_gcr']} {e.split} images of {e.dataset}"
    names = [t.name for t in e.threats]
    if len(names) == 1:
        return f"{best['method']} certifies {value} of {images} against {names[0]}."
    return f"{best['method']} certifies {value} of {images} on average over {len(names)} transformations and patches."


def unit(study: Study) -> str:
    """What a sample is called: heads on vectors of sentences classify sentences."""
    return "sentence" if study.entries[0].everything.family("text") else "image"


def comparison(rows: Sequence[Row], best: Row, headline: str, one: str = "image") -> str:
    """The interval, the seeds, and how many others are beaten beyond chance."""
    seeds = f", mean of {best['seeds']} seeds (± {best[f'{headline}_sd']:.1f})" if best["seeds"] > 1 else ""
    text = f"95 % interval {best[f'{headline}_low']:.1f} to {best[f'{headline}_high']:.1f}{seeds}; clean accuracy {best['clean']:.1f} %."
    others = [r for r in rows if r["versus"] not in ("best", "")]
    if others:
        worse = sum(r["versus"] == "worse" for r in others)
        test = "exact McNemar test" if max(r["seeds_compared"] for r in others) == 1 else "exact sign test, seeds pooled,"
        whom = f"{worse} of the {len(others)} other methods" if len(others) > 1 else ("the other method" if worse else "no other method")
        text += f" Beyond chance it beats {whom} ({test} on the same {one}s, Holm-corrected over all pairs)."
    return text


def facts(loaded: Loaded, study: Study) -> tuple[tuple[str, str], ...]:
    """(name, text) of everything a number depends on; what is unknown is left out."""
    entries = study.entries
    first = entries[0].evaluation
    mine = loaded.verdicts[loaded.verdicts["checkpoint_digest"].isin([e.evaluation.checkpoint for e in entries])]
    seeds = sorted({e.info.seed for e in entries})
    networks = sorted({str(e.info.setting("network.name")) for e in entries if e.info.experiment})
    machines = sorted({_machine(e.info.hardware) for e in entries} - {""})
    provers = sorted({_machine(e.info.about.get("certified_on") or {}) for e in entries} - {""})
    transformations = dict.fromkeys(t.name for e in entries for t in e.everything.family("geometric", "patch"))
    versions = sorted(
        {f"cure_ray {e.info.versions['cure_ray']}, torch {e.info.versions.get('torch')}" for e in entries if "cure_ray" in e.info.versions}
    )
    sizes = sorted({e.evaluation.n for e in entries})
    units = "in latent space" if unit(study) == "sentence" else "pixel units"
    found = [
        ("data", f"{first.dataset}, {first.split} split"),
        (f"radii ({units})", ", ".join(t.name for t in first.threats) if entries[0].balls else ""),
        ("transformations and patches", "; ".join(transformations)),
        (f"{unit(study)}s", " or ".join(map(str, sizes)) + " per checkpoint"),
        ("seeds", ", ".join(map(str, seeds)) + f" ({len(entries)} checkpoint{'s' if len(entries) > 1 else ''})"),
        ("network", ", ".join(networks)),
        ("engine", ", ".join(f"{a} {b}" for a, b in _distinct(mine, ["engine", "engine_version"]))),
        ("stages and budgets", " / ".join(_budgets(mine[mine["family"] == "lp"]) or _stages(mine))),
        ("certification time", f"{duration(float(mine['seconds'].sum()))} for {len(mine):,} verdicts"),
        ("trained on", "; ".join(machines) or "not recorded"),
        ("certified on", "; ".join(provers)),
        ("versions", "; ".join(versions)),
    ]
    return tuple((k, v) for k, v in found if v)


def _budgets(verdicts: pd.DataFrame) -> list[str]:
    out = []
    for stages, seconds, nodes, box in _distinct(verdicts, ["stages", "budget_seconds", "budget_nodes", "box"]):
        branch = f"; branch and bound {seconds:g} s or {nodes:,} sub-problems per image and threat" if "branch" in str(stages) else ""
        out.append(f"{str(stages).replace(',', ', ')}{branch}; {f'ball ∩ {Box.of(box).words()}' if Box.of(box).bounded else 'whole ball'}")
    return out


def _stages(verdicts: pd.DataFrame) -> list[str]:
    return [f"{str(stages).replace(',', ', ')} ({family})" for family, stages in _distinct(verdicts, ["family", "stages"])]


def _distinct(verdicts: pd.DataFrame, columns: list[str]) -> list[tuple[Any, ...]]:
    return list(verdicts[columns].drop_duplicates().itertuples(index=False, name=None))


def _machine(h: Mapping[str, Any]) -> str:
    if not h:
        return ""
    return str(h.get("gpu") or f"{h.get('processor') or h.get('machine')}, {h.get('cpus')} CPUs")


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def pretty(norm: str) -> str:
    return {"linf": "ℓ∞", "l2": "ℓ2", "l1": "ℓ1"}.get(norm, norm)


def listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
