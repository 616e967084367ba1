"""Attacks on words as one call: heads in, verdicts of family text out, in the same store as their certificates.

What is found is a misclassified sentence, or nothing: nothing is proven here. Every sentence that counts as a success was tokenized,
encoded alone and classified in float64.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from cure_ray import __version__, seeding
from cure_ray.api.execution import threads as cpu_threads
from cure_ray.api.progress import LINE_SECONDS
from cure_ray.api.subject import Subject, run_subject
from cure_ray.attacks import margin, replay_network
from cure_ray.certification.job import CascadeSettings, Job, Shard
from cure_ray.certification.outcome import Outcome, check_clean
from cure_ray.certification.shard import to_verdict
from cure_ray.certification.verdict import Status
from cure_ray.config import parse_experiment
from cure_ray.data.images import select_samples
from cure_ray.errors import UserError
from cure_ray.results.attacked import Attacked, read_attacked, refuse_contradictions
from cure_ray.results.store import Store
from cure_ray.runs.stopping import StoppedError, stop_on_signals
from cure_ray.text.attacks import BUDGET, Attack, Found, Score, attack, changed_text
from cure_ray.text.driver import Vectors, drive, score_all
from cure_ray.text.encoder import Encoder, load_encoder
from cure_ray.text.latents import encoder_directory, read_info, test_sentences
from cure_ray.text.lists import ATTACKS, WordList, word_lists
from cure_ray.text.record import WordsRecord
from cure_ray.text.tsv import Sentence
from cure_ray.threats import Words
from cure_ray.threats.box import EVERYWHERE
from cure_ray.threats.geometry import distance
from cure_ray.threats.norms import NORMS

CACHE = "vectors"  # below the directory of the latents
SHARD = 25  # sentences that are attacked and kept together
SAME = 1e-3  # how far rounding in batches may move a vector


@dataclass(frozen=True)
class WordsRequest:
    """Whom to attack, how, and where to keep it."""

    runs: tuple[Path, ...]
    out: str
    attacks: tuple[str, ...] = ATTACKS
    samples: int | None = None  # None: the experiment's number
    budget: int = BUDGET  # sentences one attack may ask for
    wordnet: Path | None = None
    neighbours: Path | None = None
    latents: Path | None = None  # where the experiment's data set lies now, if it moved
    encoder: Path | None = None
    add: bool = False
    keep_vectors: bool = True
    data_dir: Path | None = None
    device: str = "auto"
    threads: int = 1
    quiet: bool = False


@dataclass(frozen=True, eq=False)
class _Task:
    """One attack on one head."""

    subject: Subject
    replay: nn.Module  # the head in float64
    words: Words
    word_list: WordList
    job: Job
    radii: Mapping[str, float]
    left: frozenset[int]


def attack_text(asked: WordsRequest) -> Store:
    """Attack every head with every attack; finished sentences are kept, the same call continues. Returns the store."""
    if not asked.runs:
        raise UserError("which runs? Give directories of `cure-ray train` on vectors of `cure-ray embed`")
    if not asked.attacks:
        raise UserError(f"which attack? --attack takes {' and '.join(ATTACKS)}, separated by commas")
    with cpu_threads(asked.threads):
        lists = word_lists(asked.attacks, asked.wordnet, asked.neighbours)
        subjects = [run_subject(run, data_dir=asked.data_dir) for run in asked.runs]
        folder = _folder(asked, subjects[0])
        info = read_info(folder)
        sentences = test_sentences(folder, info)
        for subject in subjects:
            _check_sentences(subject, subjects[0], folder, sentences, asked.latents)
        encoder = load_encoder(encoder_directory(folder, info, asked.encoder), info.pooling, seeding.resolve_device(asked.device))
        _check_vectors(encoder, sentences, subjects[0], folder)
        defaults = parse_experiment(dict(subjects[0].about["experiment"])).certification
        wanted = asked.samples or defaults.samples
        indices = [int(i) for i in select_samples(len(sentences), wanted, defaults.selection)]
        store, tasks = _prepare(asked, subjects, lists, encoder, indices)
        with stop_on_signals() as stop:
            try:
                _attack_all(asked, store, tasks, encoder, sentences, indices, folder, stop)
            except StoppedError as told:
                kept = f"finished sentences are kept in {store.root}"
                raise StoppedError(f"stopped by {told}; {kept}; run the same command to continue.") from None
        for task in tasks:
            store.compact(task.job, [task.words])
    refuse_contradictions([store])
    return store


def summary(store: Store) -> str:
    """One line per head and attack: accuracy before and under attack, and what it took."""
    groups: dict[tuple[str, str], list[Attacked]] = {}
    for row in read_attacked([store]):
        groups.setdefault((row.checkpoint, row.attack), []).append(row)
    lines = ["accuracy in % under attacks on words: a sentence that stands was not broken, which proves nothing"]
    for (checkpoint, name), rows in sorted(groups.items()):
        about, tried = store.about(checkpoint), [row for row in rows if row.tried]
        stands = sum(row.status == "unknown" for row in tried)
        queries = sum(row.queries for row in tried) / max(len(tried), 1)
        who = f"{about.get('name', checkpoint[:12])} (seed {about.get('seed', '?')})"
        shares = f"clean {100 * len(tried) / len(rows):.1f}, {name} {100 * stands / len(rows):.1f}"
        lines.append(f"{who}: {shares} of {len(rows)} sentences, {queries:.0f} queries each")
    return "\n".join(lines)


def _folder(asked: WordsRequest, subject: Subject) -> Path:
    """The directory of `cure-ray embed` that the heads were trained on."""
    path = subject.about["experiment"]["dataset"].get("path")
    if path is None:
        raise UserError(f"{subject.name} was trained on {subject.samples.dataset}, not on vectors of sentences: see `cure-ray embed`")
    return asked.latents or Path(path).parent


def _check_sentences(subject: Subject, first: Subject, folder: Path, sentences: Sequence[Sentence], moved: Path | None) -> None:
    """All heads must be of one directory's vectors: they share the encoder, and every sentence is encoded once."""
    path = subject.about["experiment"]["dataset"].get("path")
    if path is None or (moved is None and Path(path).parent != folder):
        raise UserError(f"{subject.name} was trained on {path or subject.samples.dataset}, not on vectors in {folder}: attack it by itself")
    labels = [s.label for s in sentences]
    if subject.samples.digest != first.samples.digest or subject.samples.labels.tolist() != labels:
        raise UserError(f"{subject.name} was trained on {path}, whose test vectors are not those of {folder / 'sentences'}")


def _check_vectors(encoder: Encoder, sentences: Sequence[Sentence], subject: Subject, folder: Path) -> None:
    """The first test sentence must have the vector that is stored for it."""
    off = float((encoder.encode([sentences[0].text])[0] - subject.samples.images[0].flatten()).abs().max())
    if not off <= SAME:
        raise UserError(f"the encoder gives the first sentence of {folder} another vector than is stored (off by {off:.3g}): embed again")


def _prepare(
    asked: WordsRequest, subjects: Sequence[Subject], lists: dict[str, WordList], encoder: Encoder, indices: Sequence[int]
) -> tuple[Store, list[_Task]]:
    samples = subjects[0].samples
    many = asked.add or len(subjects) > 1
    store = Store.create(asked.out, samples.dataset, samples.split, samples.digest, many)
    tasks = list[_Task]()
    for subject in subjects:
        about, radii = subject.describe(torch.device("cpu")), {str(ball.norm): ball.eps for ball in subject.threats}
        for name, word_list in lists.items():
            options = {"attack": name, "words": word_list.digest, "queries": asked.budget, "encoder": encoder.digest, "radii": radii}
            settings = CascadeSettings(("attack",), box=EVERYWHERE)
            data = (subject.samples.dataset, subject.samples.split, subject.samples.digest)
            job = Job(subject.digest, *data, "words", __version__, settings, 0, engine_options=json.dumps(options, sort_keys=True))
            done = store.begin(job, [Words(name)], indices, about)
            left = frozenset(i for i in indices if (name, i) not in done)
            tasks.append(_Task(subject, replay_network(subject.network), Words(name), word_list, job, radii, left))
    return store, tasks


def _attack_all(
    asked: WordsRequest, store: Store, tasks: Sequence[_Task], encoder: Encoder, sentences: Sequence[Sentence], indices: Sequence[int],
    folder: Path, stop: Callable[[], None],
) -> None:  # fmt: skip
    console, spoken, encoded = Console(file=sys.stderr, highlight=False, soft_wrap=True), time.monotonic(), 0

    def tick(done: int, count: int) -> None:
        nonlocal spoken, encoded
        encoded += count
        stop()
        if not asked.quiet and time.monotonic() - spoken > LINE_SECONDS:
            spoken = time.monotonic()
            console.print(f"attacked {done} of {len(indices)} sentences with {len(tasks)} attacks; {encoded} sentences encoded")

    for start in range(0, len(indices), SHARD):
        part = list(indices[start : start + SHARD])
        if not any(task.left.intersection(part) for task in tasks):
            continue
        texts = [sentences[i].text for i in part]
        vectors = Vectors(encoder, folder / CACHE if asked.keep_vectors else None, texts, partial(tick, start))
        try:
            _attack_part(store, [task for task in tasks if task.left.intersection(part)], encoder, vectors, sentences, part, asked.budget)
        finally:
            vectors.keep()
        tick(start + len(part), 0)


def _attack_part(
    store: Store,
    tasks: Sequence[_Task],
    encoder: Encoder,
    vectors: Vectors,
    sentences: Sequence[Sentence],
    part: Sequence[int],
    budget: int,
) -> None:
    """One shard of sentences under every attack that is not done with it."""
    began = time.perf_counter()
    outcomes = {(t, i): _clean(task, i) for t, task in enumerate(tasks) for i in part if i in task.left}
    attacks: dict[tuple[int, int], Attack] = {}
    for (t, i), outcome in outcomes.items():
        if outcome.open:
            task, vector = tasks[t], tasks[t].subject.samples.images[i].flatten()
            (clean,) = score_all(task.subject.network, [vector], [outcome.label])
            attacks[t, i] = attack(str(task.words), sentences[i].text, task.word_list.synonyms, clean, encoder.unknown, budget)

    def classify(asked: list[tuple[tuple[int, int], str]]) -> list[Score]:
        found, scores = vectors.of([text for _, text in asked]), list[Score | None]([None] * len(asked))
        for t, task in enumerate(tasks):
            rows = [k for k, ((own, _), _) in enumerate(asked) if own == t]
            own_scores = score_all(task.subject.network, [found[k] for k in rows], [outcomes[asked[k][0]].label for k in rows])
            for k, score in zip(rows, own_scores, strict=True):
                scores[k] = score
        return [score for score in scores if score is not None]

    found, alone = drive(attacks, classify), dict[str, Tensor]()
    for (t, i), outcome in outcomes.items():
        text, record = sentences[i].text, WordsRecord(sentences[i].text)
        if (t, i) in found:
            record = _judge(tasks[t], i, outcome, text, found[t, i], vectors, alone, encoder)
        outcome.message = record.to_json()
        outcome.seconds = (time.perf_counter() - began) / len(outcomes)
    for t, task in enumerate(tasks):
        mine = [i for i in part if (t, i) in outcomes]
        rows = [to_verdict(task.job, task.words, i, outcomes[t, i], lambda z: store.write_witness(z.numpy())) for i in mine]
        store.write(Shard(task.job, (task.words,), tuple(mine)), rows)


def _clean(task: _Task, i: int) -> Outcome:
    samples = task.subject.samples
    outcome = Outcome(int(samples.labels[i]))
    check_clean(task.replay, samples.images[i : i + 1], [outcome])
    return outcome


@torch.no_grad()
def _judge(
    task: _Task, i: int, outcome: Outcome, text: str, found: Found, vectors: Vectors, alone: dict[str, Tensor], encoder: Encoder
) -> WordsRecord:
    """Decide the outcome by replaying the worst sentence, and measure how far its vector lies from the original's."""
    samples, worst = task.subject.samples, changed_text(text, found.changes)
    z_D = samples.images[i].flatten().double()
    if not found.changes:
        moved_D = z_D
    else:
        if found.score.wrong and worst not in alone:  # a success must not hang on what else was in its batch
            alone[worst] = encoder.encode([worst])[0]
        known = alone[worst] if found.score.wrong else vectors.of([worst])[0]
        assert known is not None
        moved_D = known.double()
    moved_CHW = moved_D.view_as(samples.images[i])
    logits, label = task.replay(moved_CHW[None]), torch.tensor([outcome.label])
    outcome.attack_margin, outcome.nodes = float(margin(logits, label)), found.queries
    broken = bool(found.changes) and int(logits.argmax(1)) != outcome.label
    outcome.decide(Status.FALSIFIED if broken else Status.UNKNOWN, "attack")
    outcome.witness = moved_CHW if broken else None
    singles = [v for v in vectors.of(found.singles) if v is not None]
    near = {str(norm): 0 for norm in NORMS if task.radii.get(norm)}
    if singles:
        delta_ND = torch.stack(singles).double() - z_D
        near = {str(norm): int((distance(delta_ND, norm) <= task.radii[norm]).sum()) for norm in NORMS if norm in near}
    distances = {str(norm): float(distance(moved_D - z_D, norm)) for norm in NORMS}
    return WordsRecord(text, found.changes, distances, len(singles), near)
