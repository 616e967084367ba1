"""Writes one section of docs/benchmarks.md (or another page), leaving the others alone, with the context every number needs."""

import os
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from cure_ray.runs.hardware import cpu_name

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
PREAMBLE = """# Benchmarks

Each section is written by the benchmark it names. Times are CPU seconds of one process unless a section says otherwise; compare
them only within a section, where everything was measured side by side in one run.
"""


def context(seed: int, threads: int) -> str:
    """One line: when, on what, with what. Directories of this machine mean nothing elsewhere and become DIR."""
    words = [f"benchmarks/{Path(sys.argv[0]).name}", *("DIR" if Path(word).is_absolute() else word for word in sys.argv[1:])]
    return (
        f"Measured {datetime.now(UTC):%Y-%m-%d} with `{' '.join(['python', *words])}`: {cpu_name()}, {os.cpu_count()} cores, "
        f"{threads} thread(s), no GPU; torch {torch.__version__}, Python {platform.python_version()}; seed {seed}; "
        f"load average {os.getloadavg()[0]:.1f} at the end (above 1: other work shared the machine)."
    )


def write_section(title: str, body: str, document: Path = DOCUMENT) -> None:
    text = document.read_text() if document.exists() else PREAMBLE
    section = f"## {title}\n\n{body.strip()}\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.S | re.M)
    text = pattern.sub(lambda _: section + "\n", text) if pattern.search(text) else f"{text.rstrip()}\n\n{section}"
    document.parent.mkdir(exist_ok=True)
    document.write_text(text.rstrip() + "\n")
