"""Figures for papers and slides, in matplotlib; each takes a table and returns a figure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

COLOURS = {"clean": "#64748b", "linf": "#3b6fb6", "l2": "#d97706", "l1": "#8b5fbf", "union": "#2a8f5b", "union_linf_l2": "#0e7490"}
COLOURS |= {"words_pwws": "#3b6fb6", "words_cf8": "#d97706"}
CYCLE = ("#3b6fb6", "#d97706", "#2a8f5b", "#8b5fbf", "#c8322b", "#0e7490", "#a16207", "#be185d", "#4d7c0f", "#64748b")


def _axes(width: float = 5.2, height: float = 3.4, **kwargs: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(**kwargs)
    for ax in np.ravel(axes):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#e2e3df", linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def colour(metric: str) -> str:
    return COLOURS.get(metric.removeprefix("cert_"), "#333333")


def _tick(method: str) -> str:
    """A method and its variant on lines of their own."""
    name, _, variant = str(method).partition(" [")
    return f"{name}\n[{variant.replace(', ', ',' + chr(10))}" if variant else name


def _whiskers(table: pd.DataFrame, metric: str) -> Any:
    """Distance from the value to the ends of its interval."""
    low, high = table.get(f"{metric}_low"), table.get(f"{metric}_high")
    if low is None or high is None:
        return None
    return np.maximum(0, np.stack([table[metric] - low, high - table[metric]]))


def bars(table: pd.DataFrame, metrics: Sequence[str], title: str, y_label: str = "certified accuracy, %") -> Figure:
    """Grouped bars per method with 95 % intervals."""
    figure, ax = _axes(max(4.5, 1.1 * len(table) + 1.5))
    x, width = np.arange(len(table)), 0.8 / len(metrics)
    for i, metric in enumerate(metrics):
        place = x + (i - (len(metrics) - 1) / 2) * width
        errors = _whiskers(table, metric)
        label = metric.removeprefix("cert_").removeprefix("words_")
        ax.bar(place, table[metric], width * 0.92, yerr=errors, color=colour(metric), label=label,
               error_kw={"linewidth": 0.8, "capsize": 2})  # fmt: skip
    ax.set_xticks(x, [_tick(m) for m in table["method"]], fontsize=8)
    ax.set_ylabel(y_label)
    ax.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=len(metrics))
    return figure


def curves(table: pd.DataFrame, x: str, metrics: Sequence[str], title: str, x_label: str, log: bool = False) -> Figure:
    """A line per metric over a hyper-parameter or radius, with intervals."""
    figure, ax = _axes()
    ordered = table.sort_values(x)
    position = np.arange(len(ordered)) if log else ordered[x].to_numpy(dtype=float)
    for metric in metrics:
        errors = _whiskers(ordered, metric)
        ax.errorbar(
            position,
            ordered[metric],
            yerr=errors,
            color=colour(metric),
            marker="o",
            capsize=3,
            linewidth=1.5,
            label=metric.removeprefix("cert_"),
        )
    if log:  # values such as 0, 1e-6, 1e-5 are equally spaced by rank: 0 has no logarithm
        ax.set_xticks(position, [f"{v:g}" for v in ordered[x]])
    ax.set_xlabel(x_label)
    ax.set_ylabel("accuracy, %")
    ax.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=3)
    return figure


def lines_by_method(table: pd.DataFrame, x: str, y: str, title: str, x_label: str) -> Figure:
    """A line per method."""
    figure, ax = _axes()
    for i, (method, rows) in enumerate(table.groupby("method", sort=False)):
        ordered = rows.sort_values(x)
        ax.errorbar(
            ordered[x], ordered[y], yerr=_whiskers(ordered, y), marker="o", capsize=3, color=CYCLE[i % len(CYCLE)], label=str(method)
        )
    ax.set_xlabel(x_label)
    ax.set_ylabel("union accuracy, %")
    ax.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=3)
    return figure


def margin_comparison(
    margins: Mapping[str, Mapping[str, Sequence[float]]], classes: Sequence[int], title: str, stages: Mapping[str, Mapping[str, str]]
) -> Figure:
    """Per method (rows) and norm (columns): proven margins to every other class, negative in red, and the stage they come from."""
    methods, norms = list(margins), list(next(iter(margins.values())))
    figure, axes = _axes(2.6 * len(norms) + 0.6, 1.5 * len(methods) + 0.6, nrows=len(methods), ncols=len(norms), squeeze=False, sharex=True)
    for i, method in enumerate(methods):
        for j, norm in enumerate(norms):
            values = np.asarray(margins[method][norm], dtype=float)
            ax = axes[i][j]
            ax.bar(range(len(values)), values, color=np.where(values > 0, "#2a8f5b", "#c8322b"))
            ax.axhline(0, color="#333333", linewidth=0.8)
            ax.set_xticks(range(len(classes)), [str(k) for k in classes], fontsize=7)
            ax.tick_params(axis="y", labelsize=7)
            ax.set_title(f"{norm} ({stages[method][norm]})", fontsize=8)
        axes[i][0].set_ylabel(method, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def decomposition(table: pd.DataFrame, title: str) -> Figure:
    """Where the union is lost: errors of the weakest norm, and on top of them what it certifies and another norm does not."""
    lines = sum(1 + max(0, _tick(m).count("\n") - 1) * 0.5 for m in table["method"])
    figure, ax = _axes(6.2, max(1.6, 0.34 * lines + 1.1))
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", color="#e2e3df", linewidth=0.8)
    y = np.arange(len(table))[::-1]
    ax.barh(y, table["R_r"], 0.66, color="#c8322b", label="R_r (weakest norm)")
    ax.barh(y, table["R_align"], 0.66, left=table["R_r"], color="#d97706", label="R_align")
    for place, row in zip(y, table.to_dict("records"), strict=True):
        ax.text(row["R_union"] + 1, place, f"{row['R_r']:.1f} + {row['R_align']:.1f}  ({row['r']})", va="center", fontsize=7)
    ax.set_yticks(y, [_tick(m) for m in table["method"]], fontsize=8)
    ax.set_xlim(0, 130)
    ax.set_xticks(range(0, 101, 20))
    ax.set_xlabel("not certified in the union, %")
    ax.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=2)
    return figure
