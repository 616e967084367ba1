"""A tiny world of text: sentences, a dictionary in WordNet's own format, neighbours, and a random BERT that knows their words."""

import gzip
import itertools
import json
from pathlib import Path

import torch

GOOD, BAD = ("great", "fine", "lovely", "funny"), ("awful", "boring", "silly", "weak")
THINGS, VERBS = ("movie", "plot", "actor", "story"), ("is", "was", "seems", "looks")
# Every synset as (part, words, gloss); index and data are written from these, as grind(1WN) would.
SYNSETS = [
    ("noun", ("movie", "film", "picture", "moving_picture"), "a form of entertainment"),
    ("noun", ("plot", "secret_plan", "game"), "a secret scheme"),
    ("noun", ("story", "tale"), "a piece of fiction"),
    ("noun", ("picture", "image"), "a visual representation"),
    ("verb", ("look", "appear", "seem"), "give a certain impression"),
    ("adj", ("great", "outstanding"), "of major significance"),
    ("adj", ("great", "big", "Large"), "large in size"),
    ("adj", ("galore(ip)", "abounding"), "in great numbers"),
    ("adj", ("awful", "nasty"), "exceptionally bad"),
    ("adj", ("funny", "silly"), "arousing laughter"),
    ("adv", ("seldom", "rarely"), "not often"),
]
IRREGULAR = {"noun": {"stories": "story"}, "verb": {"seen": "see"}}
NEIGHBOURS = {"movie": ["film", "movies", "cinema"], "great": ["big", "awful"], "awful": ["great"], "is": ["are"], "boring": ["funny"]}
KINDS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}


def write_wordnet(folder: Path) -> Path:
    """index.*, data.* and *.exc in the format of wndb(5WN), licence lines and byte offsets included."""
    folder.mkdir(parents=True, exist_ok=True)
    licence = "  1 This is a licence, as the real files begin with one.  \n"
    for part, kind in KINDS.items():
        data, offsets = licence, dict[str, list[int]]()
        for _, words, gloss in (s for s in SYNSETS if s[0] == part):
            offset = len(data.encode("latin-1"))
            listed = " ".join(f"{word} 0" for word in words)
            frames = " 01 + 02 00" if part == "verb" else ""
            data += f"{offset:08d} 03 {kind} {len(words):02x} {listed} 001 @ 00001740 {kind} 0000{frames} | {gloss}  \n"
            for word in words:
                offsets.setdefault(word.partition("(")[0].lower(), []).append(offset)
        lines = [f"{word} {kind} {len(o)} 1 @ {len(o)} 0 {' '.join(f'{n:08d}' for n in o)}  \n" for word, o in sorted(offsets.items())]
        (folder / f"data.{part}").write_text(data, encoding="latin-1")
        (folder / f"index.{part}").write_text(licence + "".join(lines), encoding="latin-1")
        exceptions = "".join(f"{form} {base}\n" for form, base in IRREGULAR.get(part, {}).items())
        (folder / f"{part}.exc").write_text(exceptions)
    return folder


def write_neighbours(path: Path) -> Path:
    path.write_bytes(gzip.compress(json.dumps(NEIGHBOURS).encode()))
    return path


def sentences() -> list[tuple[int, str]]:
    """64 sentences of four to six words, classes in turns."""
    pairs = [(1, GOOD), (0, BAD)]
    made = [
        (label, f"the {thing} {verb} {words[i % 4]} ." if i % 3 else f"the {thing} {verb} {words[i % 4]} and {words[(i + 1) % 4]} .")
        for i, (thing, verb) in enumerate(itertools.product(THINGS, VERBS))
        for label, words in pairs
    ]
    return made + [(label, text.replace("the", "this", 1)) for label, text in made]


def write_sentences(folder: Path, train: int = 48, test: int = 16) -> Path:
    """train.tsv as GLUE has it (CRLF, sentence first), dev.tsv.gz with other names in another order."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = sentences()
    assert len(rows) >= train + test
    lines = [f"{text}\t{label}\r\n" for label, text in rows[:train]]
    (folder / "train.tsv").write_bytes("".join(["sentence\tlabel\r\n", *lines]).encode())
    dev = "".join(["label\tcontent\n", *(f"{label}\t{text}\n" for label, text in rows[train : train + test])])
    (folder / "dev.tsv.gz").write_bytes(gzip.compress(dev.encode()))
    return folder


def write_encoder(folder: Path, seed: int = 0, positions: int = 24, rows: int | None = None) -> Path:
    """A random BERT of one layer, 16 wide, whose vocabulary is this world's words; the weights come from nowhere."""
    from cure_ray.text.encoder import import_transformers

    library = import_transformers()
    known = {word for _, text in sentences() for word in text.split()}
    known |= {w.lower().partition("(")[0] for _, words, _ in SYNSETS for w in words} | {w for ws in NEIGHBOURS.values() for w in ws}
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(w for w in known if "_" not in w)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    tokenizer = library.BertTokenizer(str(folder / "vocab.txt"), do_lower_case=True, model_max_length=positions)
    config = library.BertConfig(
        vocab_size=rows or len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=positions,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = library.BertModel(config)
        with torch.no_grad():
            model.embeddings.word_embeddings.weight.mul_(20.0)  # else one word more or less would hardly be seen
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder
