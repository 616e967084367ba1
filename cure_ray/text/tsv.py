"""Labelled sentences from tab-separated files, by the names of their columns: GLUE's SST-2, or anybody's in its form."""

import gzip
from dataclasses import dataclass
from pathlib import Path

from cure_ray.errors import UserError

TEXT_COLUMNS = ("sentence", "content", "text")
LABEL = "label"
FILES = {"train": "train.tsv", "test": "dev.tsv"}  # GLUE's own test file has no labels: its dev file is what everybody tests on
SST2 = "SST-2"  # the folder GLUE unpacks to


@dataclass(frozen=True)
class Sentence:
    """A sentence and its class, from 0."""

    text: str
    label: int


def read_sentences(path: Path) -> list[Sentence]:
    """All sentences of a file (perhaps .gz). Quotes mean nothing, line ends may be CRLF. UserError naming the line that is wrong."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = raw.decode("utf-8-sig").split("\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as tab-separated UTF-8 text ({error})") from None
    header = [name.strip().lower() for name in lines[0].rstrip("\r").split("\t")]
    text_column = next((header.index(name) for name in TEXT_COLUMNS if name in header), None)
    if text_column is None or LABEL not in header:
        raise UserError(
            f"{path}: the first line must name the columns {LABEL} and {TEXT_COLUMNS[0]} (or {' or '.join(TEXT_COLUMNS[1:])}), separated "
            f"by tabs; it is {lines[0][:80]!r}"
        )
    label_column, found = header.index(LABEL), list[Sentence]()
    for number, line in enumerate(lines[1:], 2):
        cells = line.rstrip("\r").split("\t")
        if cells == [""]:
            continue
        if len(cells) != len(header):
            raise UserError(f"{path}, line {number}: {len(cells)} columns, the first line names {len(header)}")
        text, label = " ".join(cells[text_column].split()), cells[label_column].strip()
        if not text:
            raise UserError(f"{path}, line {number}: the sentence is empty; take the line out")
        if not label.isdecimal():
            raise UserError(f"{path}, line {number}: the label {label!r} is not a whole number from 0 on")
        found.append(Sentence(text, int(label)))
    if not found:
        raise UserError(f"{path}: no sentences below the first line")
    return found


def write_sentences(path: Path, sentences: list[Sentence]) -> None:
    """The form `read_sentences` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join([f"{LABEL}\t{TEXT_COLUMNS[0]}\n", *(f"{s.label}\t{s.text}\n" for s in sentences)]), encoding="utf-8")


def find_splits(data: str, places: list[Path]) -> dict[str, Path]:
    """The training and test file of `sst2`, looked for in data directories, or of a folder that holds train.tsv and dev.tsv."""
    folders = [place / SST2 for place in places] if data == "sst2" else [Path(data).expanduser()]
    for folder in folders:
        found = {split: _file(folder, name) for split, name in FILES.items()}
        if all(found.values()):
            return {split: path for split, path in found.items() if path is not None}
    looked = "\n".join(f"  {folder}" for folder in folders)
    raise UserError(
        f"no sentences of {data!r}: looked for train.tsv and dev.tsv (or with .gz) in\n{looked}\nUnpack GLUE's SST-2.zip into a directory "
        "named by --data-dir or CURE_RAY_DATA, or give a folder with such files."
    )


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
