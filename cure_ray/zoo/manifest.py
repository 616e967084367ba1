"""The list of the zoo: which networks it holds, under which protocol, made how and at what cost, and the SHA-256 of every file.

`zoo/manifest.json` of a checkout (or of `--zoo DIR`, or of $CURE_RAY_ZOO); the zoo is no part of the wheel. A folder of ours is a run
directory (experiment.yaml, run.json, metrics.jsonl, checkpoints/epoch_NNNN/) with the verdict store in `results/`; one of a published
network has the store alone, since its weights are its authors', and so has one of a network of ours under a second protocol. All have
`card.md`, and `images.npz` with a few of the certified images, so that anybody can certify them again. Torch-free.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator

from cure_ray.config._base import Model, NonNegative
from cure_ray.config._explain import explain
from cure_ray.errors import UserError, nearest
from cure_ray.runs.directory import file_digest
from cure_ray.threats.text import read_threats

MANIFEST, RESULTS, CARD, IMAGES = "manifest.json", "results", "card.md", "images.npz"
VARIABLE = "CURE_RAY_ZOO"
MOST_BYTES = 25_000_000


class Cost(Model):
    """What one step took."""

    seconds: NonNegative = Field(description="CPU seconds of one thread where the step counts them, else seconds spent on it.")
    hardware: str
    version: str = Field(description="Of cure_ray.")


class Entry(Model):
    """One network of the zoo."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    title: str
    kind: Literal["ours", "published"]
    published: str | None = Field(None, description="The name of the description, for a published network.")
    dataset: str
    threats: str = Field(description="The protocol, as `cure-ray certify --threats` takes it.")
    n: int = Field(ge=1, description="Images with a verdict under every threat.")
    seeds: tuple[int, ...] = Field((), description="Of the training; none for a network of others.")
    identity: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    commands: tuple[str, ...] = Field(description="What makes it again, from training to verdicts.")
    training: Cost | None = None
    certification: Cost
    folder: str
    run: str | None = Field(None, description="The folder of the entry that has the network, for one under a second protocol.")
    files: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]

    @field_validator("threats")
    @classmethod
    def _readable(cls, value: str) -> str:
        read_threats(value)
        return value

    @field_validator("folder", "run")
    @classmethod
    def _inside(cls, value: str | None) -> str | None:
        if value is not None and (Path(value).is_absolute() or ".." in Path(value).parts):
            raise ValueError("a folder lies inside the zoo")
        return value

    @field_validator("files")
    @classmethod
    def _files_inside(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{name} does not lie in its folder")
        return value


class Manifest(Model):
    """All of them."""

    format: Literal["cure_ray-zoo-1"] = "cure_ray-zoo-1"
    entries: tuple[Entry, ...] = ()

    def find(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        known = tuple(entry.name for entry in self.entries)
        raise UserError(f"the zoo has no network {name!r}.{nearest(name, known) if known else ' It is empty.'}")

    def run_of(self, entry: Entry) -> Entry:
        """The entry whose folder is the run directory of a network of ours: itself, or the one it shares the network with."""
        found = next((e for e in self.entries if e.folder == entry.run), None) if entry.run is not None else entry
        if found is None or found.run is not None or found.identity != entry.identity:
            raise UserError(f"{entry.name}: the manifest says its network is in {entry.run}, and lists no such network there")
        return found

    def with_entry(self, entry: Entry) -> "Manifest":
        """This list with one more, in the order of names; an entry of the same name is replaced."""
        others = [e for e in self.entries if e.name != entry.name]
        return Manifest(entries=tuple(sorted([*others, entry], key=lambda e: e.name)))


def find_zoo(given: str | Path | None = None) -> Path:
    """The zoo's directory: the one given, $CURE_RAY_ZOO, or `zoo/` of the checkout this program runs from or stands in."""
    named = given or os.environ.get(VARIABLE)
    if named:
        root = Path(named)
        if not (root / MANIFEST).is_file():
            raise UserError(f"{root} is no zoo: it has no {MANIFEST}")
        return root
    for place in (Path(__file__).parent.parent.parent, Path.cwd(), *Path.cwd().parents):
        if (place / "zoo" / MANIFEST).is_file():
            return place / "zoo"
    raise UserError(
        f"no zoo here: it comes with the repository, not with the package. Clone it, or name one with --zoo DIR or ${VARIABLE}."
    )


def read_manifest(zoo: Path) -> Manifest:
    """The list, checked for what can be checked without reading the networks."""
    path = zoo / MANIFEST
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{zoo} is no zoo: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    try:
        found = Manifest.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{path}:\n{explain(error, Manifest)}") from None
    names = [entry.name for entry in found.entries]
    if len(set(names)) != len(names):
        raise UserError(f"{path}: {next(n for n in names if names.count(n) > 1)} is listed twice")
    return found


def write_manifest(zoo: Path, manifest: Manifest) -> None:
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"
    partial = zoo / f".{MANIFEST}.{os.getpid()}"
    partial.write_text(text)
    partial.replace(zoo / MANIFEST)


def listed_files(folder: Path) -> dict[str, str]:
    """Every file of a folder by its path in it, with its SHA-256."""
    return {str(p.relative_to(folder).as_posix()): file_digest(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def check_entry(zoo: Path, entry: Entry) -> Path:
    """The folder of an entry, every file of it what the manifest says; UserError naming what is missing, changed or not listed."""
    folder = zoo / entry.folder
    there = listed_files(folder) if folder.is_dir() else {}
    for name, expected in entry.files.items():
        if name not in there:
            raise UserError(f"{entry.name}: {folder / name} is missing, though the manifest lists it. Restore it from the repository.")
        if there[name] != expected:
            raise UserError(
                f"{entry.name}: {folder / name} is not what the manifest lists (SHA-256 {there[name][:12]}, listed {expected[:12]}). "
                "Restore it from the repository."
            )
    strange = sorted(set(there) - set(entry.files))
    if strange:
        raise UserError(f"{entry.name}: {folder / strange[0]} is not in the manifest; a zoo holds nothing that nobody vouches for")
    return folder


def zoo_bytes(zoo: Path) -> int:
    return sum(p.stat().st_size for p in zoo.rglob("*") if p.is_file())
