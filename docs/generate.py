"""What is generated of the documentation: reference pages from the code, the board from files and stores. `make docs` rewrites it."""

import inspect
from datetime import date
from pathlib import Path
from typing import Any

import click
import typer
import yaml

import cure_ray
from cure_ray.commands.show import field_rows
from cure_ray.results.board.build import Sources, board_rows, render
from cure_ray.results.judgement import judgements_page
from cure_ray.results.marked import fill
from cure_ray.results.schema import documentation
from cure_ray.zoo.published import all_published

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
BOARD = ROOT / "docs" / "board.html"
JUDGED = ROOT / "docs" / "board" / "published.md"


def configuration_page() -> str:
    rows = "\n".join(f"| `{path}` | `{default}` | {text.replace('|', ' or ')} |" for path, default, text in field_rows())
    return (
        "# Configuration\n\n"
        "Every field of an experiment, generated from the code by `make docs`; `cure-ray config` prints the same. An experiment file may\n"
        "also set `preset`, `profile` (`paper` or `authors`) and `scale` (0 to 1), which choose the starting point the other keys\n"
        "override; see [presets](../guide/presets.md). Radii accept fractions such as `8/255`.\n\n"
        f"| field | default | meaning |\n|---|---|---|\n{rows}\n"
    )


def api_page() -> str:
    """Every public name of the library with its signature and docstring."""
    parts = [
        "# Python API\n\n"
        "Generated from the docstrings by `make docs`. Importing `cure_ray` loads neither torch nor ray; each name is loaded\n"
        "when it is first used. Everything below raises `cure_ray.UserError` for bad input, with the sentence the command line prints.\n"
    ]
    for name in sorted(cure_ray.__all__, key=str.lower):
        parts.append(_entry(f"cure_ray.{name}", getattr(cure_ray, name), "##"))
    return "\n".join(parts)


def _entry(path: str, thing: Any, level: str) -> str:
    lines = [f"{level} {path}\n"]
    signature = _signature(thing)
    if signature:
        lines.append(f"```python\n{path.rpartition('.')[2]}{signature}\n```\n")
    text = inspect.getdoc(thing)
    lines.append((_fenced(text) if text else "") + "\n")
    if inspect.isclass(thing) and not issubclass(thing, Exception) and "pydantic" not in str(type(thing)):
        for name, member in vars(thing).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not name.startswith("_") and inspect.isfunction(function) and inspect.getdoc(function):
                lines.append(_entry(f"{path.rpartition('.')[2]}.{name}", function, "###"))
    return "\n".join(lines)


def _signature(thing: Any) -> str:
    if inspect.isclass(thing) and (issubclass(thing, Exception) or "pydantic" in str(type(thing))):
        return ""
    try:
        return str(inspect.signature(thing)).replace("cure_ray.", "").replace("'", "")
    except (TypeError, ValueError):
        return ""


def _fenced(text: str) -> str:
    """Doctest examples as code blocks."""
    out, inside = list[str](), False
    for line in text.splitlines():
        example = line.lstrip().startswith((">>>", "...")) or (inside and line.strip() != "")
        if example != inside:
            out.append("```pycon" if example else "```")
            inside = example
        out.append(line)
    return "\n".join([*out, "```"] if inside else out)


def command_line_page() -> str:
    from cure_ray.cli import app

    group: Any = typer.main.get_command(app)
    context = click.Context(group, info_name="cure-ray")
    parts = ["# Command line\n\nGenerated from the commands by `make docs`; `cure-ray COMMAND --help` says the same.\n"]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        parts += _command(f"cure-ray {name}", command)
        for inner in getattr(command, "commands", {}):
            parts += _command(f"cure-ray {name} {inner}", command.commands[inner])
    return "\n".join(parts)


def _command(name: str, command: Any) -> list[str]:
    rows = [_option(p) for p in command.params if p.name != "help"]
    table = "| argument | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    return [f"## {name}\n\n{inspect.cleandoc(command.callback.__doc__ or command.help or '')}\n", table]


def _option(parameter: Any) -> str:
    argument = parameter.param_type_name == "argument"
    names = (parameter.metavar or parameter.name.upper()) if argument else ", ".join([*parameter.opts, *parameter.secondary_opts])
    empty = parameter.default in (None, (), [], "") or callable(parameter.default)
    default = "" if empty else f"`{parameter.default}`"
    return f"| `{names}` | {default} | {' '.join((parameter.help or '').split()).replace('|', ' or ')} |"


PAGES = {
    "configuration.md": configuration_page, "schema.md": documentation, "api.md": api_page, "command-line.md": command_line_page,
}  # fmt: skip


def released() -> date:
    """The date of the version, which is that of the board's edition too: today's would make another page every day."""
    return date.fromisoformat(str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["date-released"]))


def board_page(out: Path = BOARD, zoo: Path = ROOT / "zoo") -> str:
    """The board as it would be at `out`, from where its links lead; judgements lie in `board` beside it."""
    judgements = out.parent / "board"
    return render(board_rows(Sources(all_published(), zoo, judgements if judgements.is_dir() else None), out), released())


# Documents with tables between marks, which are written from the zoo (cure_ray/results/marked.py).
MARKED = ("README.md", "docs/results.md", "docs/experiments.md", "docs/benchmarks.md", "docs/guide/zoo.md")


def marked_page(name: str) -> str:
    return fill((ROOT / name).read_text(), ROOT / "zoo")


if __name__ == "__main__":
    BOARD.write_text(board_page(), encoding="utf-8")
    print("docs/board.html")
    for name in MARKED:
        (ROOT / name).write_text(marked_page(name))
    JUDGED.write_text(judgements_page(JUDGED.parent))
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())
        print(f"docs/reference/{name}")
