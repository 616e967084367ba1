"""What the analysis scripts share: reading a store, writing a table or figure in every format, saying what is missing."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from cure_ray.errors import UserError
from cure_ray.results.frames import Loaded, load
from cure_ray.results.study import Study


@dataclass
class Analysis:
    """A loaded study and the directory its tables and figures go to."""

    loaded: Loaded
    out: Path
    baseline: str | None = None
    written: list[Path] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    @property
    def study(self) -> Study:
        return self.loaded.study

    def missing(self, what: str) -> None:
        """Something the paper has and this store has not."""
        self.absent.append(what)

    def table(
        self, name: str, frame: pd.DataFrame, caption: str, digits: int = 1, shown: pd.DataFrame | None = None, note: str = ""
    ) -> None:
        """CSV with all digits; Markdown and LaTeX rounded, or `shown` where the readable table is another one. The note goes below."""
        if frame.empty:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        csv, markdown, latex = (self.out / f"{name}.{ending}" for ending in ("csv", "md", "tex"))
        frame.to_csv(csv, index=False)
        readable, caption = _for_people(frame if shown is None else shown, caption, digits)
        markdown.write_text(f"{caption}\n\n{to_markdown(readable)}" + (f"\n{note}\n" if note else ""))
        latex.write_text(to_latex(readable, f"{caption}. {note}".strip() if note else caption, name))
        self.written += [csv, markdown, latex]

    def figure(self, name: str, figure: Any) -> None:
        """PNG for slides, SVG for papers; no timestamps inside, so that equal data give equal files."""
        self.out.mkdir(parents=True, exist_ok=True)
        png, svg = self.out / f"{name}.png", self.out / f"{name}.svg"
        figure.savefig(png, dpi=160, bbox_inches="tight", metadata={"Software": None})
        figure.savefig(svg, bbox_inches="tight", metadata={"Date": None})
        self.written += [png, svg]


def _for_people(frame: pd.DataFrame, caption: str, digits: int) -> tuple[pd.DataFrame, str]:
    """Rounded; a setting that is the same everywhere goes into the caption, and digests are cut to what messages show."""
    if "setting" in frame and frame["setting"].nunique() == 1:
        setting = str(frame["setting"].iloc[0])
        frame, caption = frame.drop(columns="setting"), caption if setting in caption else f"{caption}; {setting}"
    if "checkpoint" in frame:
        frame = frame.assign(checkpoint=frame["checkpoint"].str[:12])
    return frame.map(lambda v: _shown(v, digits)), caption


def _shown(value: Any, digits: int) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.{digits}f}"
    return "" if value is None else str(value)


def to_markdown(frame: pd.DataFrame) -> str:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |\n"

    rule = "|" + "|".join("---" for _ in frame.columns) + "|\n"
    return line(list(frame.columns)) + rule + "".join(line(list(row)) for row in frame.itertuples(index=False))


_LATEX = {c: f"\\{c}" for c in "&%$#_{}"}
_LATEX |= {
    "∩": r"$\cap$",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "-",
    "–": "--",
}


def escape_latex(text: Any) -> str:
    return "".join(_LATEX.get(c, c) for c in str(text))


def to_latex(frame: pd.DataFrame, caption: str, label: str) -> str:
    """A booktabs table."""
    columns = "l" + "r" * (len(frame.columns) - 1)
    head = " & ".join(escape_latex(c) for c in frame.columns)
    body = "\n".join(" & ".join(escape_latex(v) for v in row) + r" \\" for row in frame.itertuples(index=False))
    inside = f"\\toprule\n{head} \\\\\n\\midrule\n{body}\n\\bottomrule"
    return (
        f"\\begin{{table}}\n\\centering\n\\caption{{{escape_latex(caption)}}}\n\\label{{tab:{label}}}\n"
        f"\\begin{{tabular}}{{{columns}}}\n{inside}\n\\end{{tabular}}\n\\end{{table}}\n"
    )


def script(main: Callable[[Analysis], None], arguments: Sequence[str] | None = None) -> None:
    """The command line every analysis script has: STORE... --out DIR. Bad input ends with a sentence and exit code 2."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "cure_ray"  # otherwise ids in SVG files are random
    parser = argparse.ArgumentParser(description=(main.__doc__ or "").strip())
    parser.add_argument("store", nargs="+", help="results of `cure-ray certify`, or directories above them")
    parser.add_argument("--out", type=Path, default=Path("analysis/out"), help="where tables and figures go (default analysis/out)")
    parser.add_argument("--runs", type=Path, action="append", default=[], help="where the training runs are; repeatable")
    parser.add_argument("--threat", action="append", default=[], help="radius of the union, e.g. linf=8/255; repeatable")
    parser.add_argument("--baseline", help="method every other one is compared with, as the tables call it")
    parser.add_argument("--names", action="store_true", help="call rows by the experiments' names instead of their methods")
    parser.add_argument("--checkpoint", action="append", default=[], help="only this checkpoint (first digits); repeatable")
    options = parser.parse_args(arguments)
    try:
        loaded = load(options.store, options.threat, options.checkpoint, options.runs, options.names)
        analysis = Analysis(loaded, options.out, options.baseline)
        main(analysis)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for path in analysis.written:
        print(f"wrote {path}")
    for what in analysis.absent:
        print(f"missing: {what}")
