"""`cure-ray config`: presets, the fully resolved form of an experiment, and the meaning of every field."""

from collections.abc import Iterator
from typing import Annotated

import typer

from cure_ray.commands.train import SetOption


def field_rows() -> Iterator[tuple[str, str, str]]:
    """(path, default, description) of every field of an experiment: the one source of help and documentation."""
    from pydantic import BaseModel

    from cure_ray.config import Experiment

    def walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from walk(field.annotation, f"{prefix}{name}.")
            else:
                default = model().model_dump(mode="json").get(name, field.default) if model is not Experiment else field.default
                yield f"{prefix}{name}", str(default), field.description or ""

    return walk(Experiment, "")


def config(
    experiment: Annotated[
        str | None, typer.Argument(metavar="[EXPERIMENT]", help="YAML file or preset; without one, every field is explained.")
    ] = None,
    override: SetOption = [],  # noqa: B006 - typer reads the default, nothing mutates it
) -> None:
    """Show an experiment fully resolved, as YAML; or, without one, list the presets and explain every field."""
    from cure_ray.config import PRESETS, dump_experiment, load_experiment

    if experiment is not None:
        resolved = load_experiment(experiment, override)
        print(dump_experiment(resolved), end="")
        print(f"# config_hash: {resolved.config_hash}")
        return
    print(f"presets: {', '.join(PRESETS)}; each with `profile: paper` (default) or `profile: authors`, and `scale: 0.1` to shrink it\n")
    for path, default, description in field_rows():
        print(f"{path} (default {default})\n    {description}")
