"""What our HTML pages share: one look, one script, templates that escape by themselves, and files that are written whole or not at all."""

import math
import os
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from cure_ray.errors import UserError

_SHARED = "cure_ray.results.report"


def number(value: Any, digits: int = 1) -> str:
    return "–" if value is None or (isinstance(value, float) and math.isnan(value)) else f"{value:.{digits}f}"


def environment(package: str, name: str) -> jinja2.Environment:
    """The templates of a page: `name`.html of `package`, with our style and script, and what `name`.css and `name`.js add to them."""
    here = resources.files(package)

    def text(suffix: str) -> Markup:
        parts = (resources.files(_SHARED).joinpath(f"base.{suffix}"), here.joinpath(f"{name}.{suffix}"))
        return Markup("".join(part.read_text(encoding="utf-8") for part in parts))

    loader = jinja2.DictLoader({f"{name}.html": here.joinpath(f"{name}.html").read_text(encoding="utf-8")})
    env = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["num"] = number
    env.globals |= {"css": text("css"), "js": text("js")}
    return env


def write_page(target: Path, html: str) -> Path:
    """Readers see the old file or the new one, never half of one."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        partial.write_text(html, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}. Choose another --out.") from None
    return target
