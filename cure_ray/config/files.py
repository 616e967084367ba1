"""Experiment files: YAML in and out, presets and profiles, `--set` overrides, the scale factor.

A file may be short: `preset`, `profile` and `scale` choose a starting point, everything else overrides it. What is stored with
a run is always the long, fully resolved form, which needs none of the three and loads to the same experiment.
"""

import copy
import functools
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from itertools import starmap
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from cure_ray.config._explain import explain
from cure_ray.config.experiment import Experiment
from cure_ray.config.methods import METHODS, inactive_fields
from cure_ray.errors import UserError, nearest

PRESETS = tuple(sorted(p.name.removesuffix(".yaml") for p in resources.files("cure_ray.presets").iterdir() if p.name.endswith(".yaml")))
PROFILES = ("paper", "authors")


# Choosing one's own data set or network takes the place of what was chosen, or written, about another one.
_REPLACES = {
    "path": ("content", "name", "crop"),
    "factory": ("code", "arguments", "name", "width", "batch_norm", "last_conv_stride"),
}


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for own, replaced in _REPLACES.items():
        if own in over and over[own] != base.get(own):
            merged = {key: value for key, value in merged.items() if key not in replaced}
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}.{nearest(name, PRESETS)}")
    return copy.deepcopy(_read_preset(name))


@functools.cache
def _read_preset(name: str) -> dict[str, Any]:
    """Once: a search resolves thousands of experiments, and reading YAML was a third of proposing one."""
    text = resources.files("cure_ray.presets").joinpath(f"{name}.yaml").read_text()
    return cast(dict[str, Any], yaml.safe_load(text))


def _scaled(training: dict[str, Any], scale: float) -> dict[str, Any]:
    """Epochs, ramp and milestones shrink together; nothing that was there disappears, and milestones stay ordered."""
    out = dict(training)
    for key in ("epochs", "anneal_epochs"):
        if out.get(key):
            out[key] = max(1, round(out[key] * scale))
    out["epochs"] = max(out.get("epochs", 1), out.get("standard_epochs", 1) + out.get("anneal_epochs", 0) + 1)
    out["lr_milestones"] = [max(1, round(m * scale)) for m in out.get("lr_milestones", ())]
    return out


def resolve(data: Mapping[str, Any]) -> Experiment:
    """The experiment a (possibly short) file describes: preset, its method's part, its profile's part, the file; then the scale."""
    data = dict(data)
    preset, profile, scale = data.pop("preset", None), data.pop("profile", "paper"), data.pop("scale", 1)
    if profile not in PROFILES:
        raise UserError(f"unknown profile {profile!r}.{nearest(str(profile), PROFILES)}")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 1:
        raise UserError(f"scale must be a number in (0, 1], got {scale!r}")
    if profile != "paper" and preset is None:
        raise UserError(f"profile {profile} adjusts a preset: name one with `preset:` ({', '.join(PRESETS)})")
    for section in ("dataset", "network", "threats", "training", "execution", "certification"):
        if not isinstance(data.get(section, {}), Mapping):
            raise UserError(f"{section}: expected a mapping of keys, got {data[section]!r}")
    parts = _preset(preset) if preset is not None else {}
    user_training = data.get("training", {})
    method = str(user_training.get("method", parts.get("base", {}).get("training", {}).get("method", "scratch")))
    if method not in METHODS:
        raise UserError(f"training.method: unknown value {method!r}.{nearest(method, tuple(METHODS))}")
    row = METHODS[cast(Any, method)]
    authors = parts.get("authors", {}) if profile == "authors" else {}
    base: dict[str, Any] = {}
    for part in (parts.get("base"), authors.get("base"), row.defaults, parts.get(method), authors.get(method)):
        base = _merge(base, part or {})
    idle = inactive_fields(cast(Any, method), str(user_training.get("base", "max")))
    base["training"] = {k: v for k, v in base.get("training", {}).items() if k not in idle}
    merged = _merge(base, data)
    merged["training"] = {**merged["training"], "method": method}
    if scale != 1:
        merged["training"] = _scaled(merged["training"], float(scale))
    if preset is not None:
        merged["origin"] = f"preset {preset}, profile {profile}, scale {scale:g}"
        merged.setdefault("name", f"{preset}-{method}")
    return parse_experiment(merged)


def parse_experiment(data: Mapping[str, Any]) -> Experiment:
    """An Experiment from its explicit form, with errors a person can act on."""
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        raise UserError(explain(error, Experiment)) from None


def parse_override(text: str) -> dict[str, Any]:
    """`training.eta=1.0` as nested data; the value is YAML."""
    path, separator, value = text.partition("=")
    if not separator or not path.strip():
        raise UserError(f"--set takes key=value, for example --set training.eta=1.0; got {text!r}")
    try:
        return _nested(path.strip(), _load_yaml(value, f"--set {text}"))
    except UserError:
        raise UserError(f"--set {text}: the value is not valid YAML") from None


def _nested(path: str, value: Any) -> dict[str, Any]:
    """`training.eta` and its value as the file would say it."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return cast(dict[str, Any], value)


class _Loader(yaml.SafeLoader):
    """safe_load, except that 1e-5 is a number (YAML 1.1 wants 1.0e-5, which nobody writes), and a repeated key is an error.

    Aliases are refused: nine lines of them expand to a billion entries.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed, write it out", None)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} appears twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _load_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: numbers of thousands of digits
        raise UserError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def load_experiment(
    source: str | Path | Mapping[str, Any] | Experiment,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    base: Mapping[str, Any] | None = None,
) -> Experiment:
    """An experiment from a preset's name, a YAML file, its content as a mapping, or another experiment, with overrides applied.

    Overrides are a mapping of paths to values, or the texts `--set` takes.

    >>> from cure_ray import load_experiment
    >>> load_experiment("smoke", {"training.eta": 1.0}).training.eta
    1.0
    >>> load_experiment({"preset": "smoke", "seed": 3}, ["training.method=max"]).name
    'smoke-max'
    """
    data: Any
    shown = str(source) if isinstance(source, str | Path) else "the experiment"
    if isinstance(source, Experiment):
        data = source.model_dump(mode="json")
    elif not isinstance(source, str | Path):
        data = source
    elif Path(source).is_file():
        try:
            data = _load_yaml(Path(source).read_text(), shown)
        except UnicodeDecodeError:
            raise UserError(f"{source}: not a text file; expected an experiment in YAML") from None
    elif str(source) in PRESETS:
        data = {"preset": str(source)}
    else:
        hint = nearest(str(source), PRESETS)
        raise UserError(f"{source}: no such file, and no such preset.{hint}")
    if not isinstance(data, Mapping):
        raise UserError(f"{shown}: expected a mapping of keys (preset, dataset, training, ...), got {type(data).__name__}")
    merged = _merge(base or {}, data)
    for part in starmap(_nested, overrides.items()) if isinstance(overrides, Mapping) else map(parse_override, overrides):
        merged = _merge(merged, part)
    try:
        return resolve(merged)
    except UserError as error:
        raise UserError(f"{shown}:\n{error}") from None


def dump_experiment(experiment: Experiment) -> str:
    """The fully resolved form as YAML; loading it gives the same experiment."""
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
