"""Turns pydantic's validation errors into sentences a person can act on."""

from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from cure_ray.errors import nearest


def model_at(model: type[BaseModel], path: tuple[Any, ...]) -> type[BaseModel] | None:
    """The model that owns the last key of `path`."""
    current = model
    for key in path[:-1]:
        field = current.model_fields.get(str(key))
        if field is None:
            return None
        candidates = [field.annotation, *get_args(field.annotation)]
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            return None
        current = nested[0]
    return current


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line per problem: where, what was given, what would be right."""
    lines = []
    for problem in error.errors():
        path = tuple(part for part in problem["loc"] if not isinstance(part, int))
        where = ".".join(map(str, path)) or model.__name__.lower()
        message = problem["msg"].removeprefix("Value error, ")
        owner = model_at(model, path)
        if problem["type"] == "extra_forbidden" and owner is not None:
            lines.append(f"{where}: unknown key.{nearest(str(path[-1]), list(owner.model_fields))}")
            continue
        if problem["type"] == "literal_error" and isinstance(problem["input"], str):
            options = [o.strip().strip("'") for o in problem["ctx"]["expected"].replace(" or ", ", ").split(", ")]
            lines.append(f"{where}: unknown value {problem['input']!r}.{nearest(problem['input'], options)}")
            continue
        given = "" if isinstance(problem["input"], dict | BaseModel) else f" (given: {problem['input']!r})"
        lines.append(f"{where}: {message}{given}")
    return "\n".join(lines)
