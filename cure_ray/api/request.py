"""What a certification is asked for, typed: whom, against what, how hard to try, where to run, where to keep it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cure_ray.api.subject import Subject
from cure_ray.attacks import attack_settings
from cure_ray.certification.families import check_feasible
from cure_ray.certification.job import CascadeSettings
from cure_ray.config import Certification
from cure_ray.config.stages import DEFAULT_STAGES, GUARD_SECONDS, NODES
from cure_ray.data.images import select_samples
from cure_ray.errors import UserError
from cure_ray.interchange.foreign import check_samples
from cure_ray.threats import Balls, Threat
from cure_ray.threats.box import UNIT, Box
from cure_ray.threats.numbers import read_number
from cure_ray.threats.text import check_distinct, read_threats
from cure_ray.threats.transformations import check_grid

MOST_THREADS = 4096
SEEDS = range(-(2**63), 2**63)  # what a column of the results holds


@dataclass(frozen=True)
class Cascade:
    """How hard to try. None: the experiment's, or the program's."""

    stages: tuple[str, ...] | None = None
    seconds: float | None = None  # branch and bound, per sample and threat
    nodes: int | None = None  # the same in sub-problems; alone, time is no limit (but an hour)
    engine: str = "native"
    box: Box | bool | str | None = None  # the domain of the inputs: True is 0,1, False is none
    patch_precheck: bool = False
    separate_logits: bool = False
    attack: str | None = None  # default or strong
    unasked: int = NODES  # sub-problems of branch and bound where nobody names a budget

    def __post_init__(self) -> None:
        if self.nodes is not None:
            whole_numbers(nodes=self.nodes)

    def settings(self, defaults: Certification | None) -> CascadeSettings:
        """A budget switches branch and bound on, unless stages are chosen; where none is named there is a small one."""
        base = CascadeSettings(defaults.stages if defaults else DEFAULT_STAGES)
        named = self._named(defaults)
        picked = self.stages or base.stages
        if named is None and ("branch-and-bound" in picked or picked == DEFAULT_STAGES) and self.unasked:
            named = GUARD_SECONDS, self.unasked
        seconds, limit = named or (0.0, None)
        if self.stages is None and seconds > 0 and self.engine == "native" and "branch-and-bound" not in picked:
            picked += ("branch-and-bound",)
        if self.stages is None and self.engine != "native":
            picked = tuple(s for s in picked if s != "branch-and-bound")
        if "branch-and-bound" in picked and seconds <= 0 and self.stages is not None:
            raise UserError("branch-and-bound needs a budget per sample, for example --nodes 1000 or --budget 10s")
        if "branch-and-bound" not in picked:
            seconds, limit = 0.0, self.nodes  # part of a job's identity even so: as it was before there was a budget by default
        given = self.box if self.box is not None else defaults.domain if defaults else None
        box = UNIT if given is None else Box.of(given)
        search = attack_settings(self.attack or (defaults.attack if defaults else "default"))
        asked = CascadeSettings(tuple(picked), seconds, base.nodes if limit is None else limit, search, box)
        return replace(asked, patch_precheck=self.patch_precheck, separate_logits=self.separate_logits)

    def _named(self, defaults: Certification | None) -> tuple[float, int | None] | None:
        """The budget that was asked for: here, else in the experiment. What is named together holds together."""
        for seconds, nodes in ((self.seconds, self.nodes), (defaults.seconds, defaults.nodes) if defaults else (None, None)):
            if nodes == 0:
                return 0.0, 0
            if seconds is not None or nodes is not None:
                return GUARD_SECONDS if seconds is None else seconds, nodes
        return None


def parse_seconds(text: str | float | None) -> float | None:
    """10s, 2m, 1h or plain seconds."""
    if text is None:
        return None
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(str(text)[-1:])
    try:
        value = read_number(str(text)[:-1] if unit else str(text)) * (unit or 1.0)
    except ValueError:
        raise UserError(f"--budget: {text!r} is not a time like 10s, 2m or 0") from None
    if not 0 <= value < float("inf"):
        raise UserError(f"--budget: {text!r} must not be negative or infinite")
    return value


def parse_stages(stages: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """`ibp,crown`, or the names one by one; nothing: the default."""
    if not isinstance(stages, str | None) and (not isinstance(stages, Iterable) or not all(isinstance(s, str) for s in stages)):
        raise UserError(f"stages are names, like ibp,crown or ['ibp', 'crown'], not {stages!r}")
    parts = stages.split(",") if isinstance(stages, str) else [*(stages or ())]
    return tuple(s.strip() for s in parts if s.strip()) or None


def whole_numbers(**given: object) -> None:
    """UserError unless each of these is a whole number."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"{name} must be a whole number, got {value!r}")


def _chosen(samples: object) -> list[int]:
    """Numbers of samples, as a list or array holds them."""
    values = samples.tolist() if hasattr(samples, "tolist") else samples
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UserError(f"samples must be how many, or a list of which, got {samples!r}")
    numbers = [*values]
    for number in numbers:
        whole_numbers(samples=number)
    return numbers


@dataclass(frozen=True)
class Execution:
    """Where the work runs: in this process, or with more than one worker on Ray. No verdict depends on it."""

    device: str = "auto"  # auto, cpu, cuda, cuda:N
    threads: int = 1
    workers: int = 1
    gpus_per_worker: float = 1.0  # with device cuda; fractions allowed
    address: str | None = None  # a running Ray cluster; by default RAY_ADDRESS, else this machine
    quiet: bool = False

    def __post_init__(self) -> None:
        whole_numbers(workers=self.workers, threads=self.threads)
        if self.workers < 1 or self.threads < 1 or self.gpus_per_worker < 0:
            given = f"workers={self.workers}, threads={self.threads}, gpus_per_worker={self.gpus_per_worker}"
            raise UserError(f"at least one worker and one thread, and no negative share of a GPU; got {given}")
        if self.threads > MOST_THREADS:
            raise UserError(f"at most {MOST_THREADS} threads, got {self.threads}; more than the cores of a machine are of no use")


def check_given(threats: Threat | Sequence[Threat], images: int) -> list[Threat]:
    """The threats of a list, or one alone; each for this many images."""
    chosen = [*threats] if isinstance(threats, Sequence) else [threats]
    for threat in chosen:
        if not isinstance(threat, Threat):
            raise UserError(f"threats are a text like linf=0.1,l2=0.5 or a list of Ball, Transformation and Patch, not {threat!r}")
        if isinstance(threat, Balls) and len(threat.radii) != images:
            raise UserError(f"{len(threat.radii)} radii of {threat.norm} for {images} images: give one for each of them, in their order")
    check_distinct(chosen)
    return chosen


@dataclass(frozen=True)
class CertificationRequest:
    """One certification: of every subject under every threat, on the chosen images."""

    subjects: tuple[Subject, ...]
    threats: str | Threat | Sequence[Threat] | None = None  # None: the experiment's
    samples: int | Sequence[int] | None = None  # how many, or which; None: the experiment's number, or all of one's own images
    cascade: Cascade = field(default_factory=Cascade)
    execution: Execution = field(default_factory=Execution)
    seed: int = 0
    union_only: bool = False  # stop a sample at its first failed norm; gives the union only
    out: str | Path | None = None  # results directory or fsspec URI; None: in memory
    add: bool = False  # allow results of several checkpoints in one `out`
    yes: bool = False  # start geometric grids of any size
    grid: str | None = None  # cells of transformations read from text; None: the experiment's, or the standard ones

    def __post_init__(self) -> None:
        whole_numbers(seed=self.seed)
        if not SEEDS[0] <= self.seed <= SEEDS[-1]:
            raise UserError(f"a seed must fit into 64 bits ({SEEDS[0]} to {SEEDS[-1]}), got {self.seed}")

    def threats_of(self, subject: Subject) -> list[Threat]:
        """What was asked for: here, else in the experiment, else all its norms."""
        if self.threats is not None and not isinstance(self.threats, str):
            chosen = check_given(self.threats, len(subject.samples))
        else:
            text = self.threats or ";".join(subject.defaults.threats if subject.defaults else ())
            radii = {threat.norm: threat.eps for threat in subject.threats}
            grid = check_grid(self.grid or subject.grid)
            chosen = read_threats(text, grid, subject.input_shape, radii) if text else [*subject.threats]
        if not chosen:
            raise UserError("which threats? For example --threats linf=0.1,l2=0.5,l1=1.0")
        return chosen

    def indices_of(self, subject: Subject) -> list[int]:
        """The experiment's number of images, or all of one's own, or those that were chosen."""
        total, defaults = len(subject.samples), subject.defaults
        if total == 0:
            raise UserError(f"the {subject.samples.split} split of {subject.samples.dataset} has no images")
        if self.samples is not None and not isinstance(self.samples, int):
            chosen = _chosen(self.samples)
            if len(set(chosen)) != len(chosen) or not chosen or min(chosen) < 0 or max(chosen) >= total:
                raise UserError(f"samples must be different numbers in 0..{total - 1}, and at least one")
            return sorted(chosen)
        if self.samples is not None and (isinstance(self.samples, bool) or self.samples < 1):
            raise UserError(f"samples must be at least 1, got {self.samples}")
        wanted = self.samples or (defaults.samples if defaults and not subject.own_data else total)
        return [int(i) for i in select_samples(total, wanted, defaults.selection if defaults else "first")]

    def remarks(self) -> Iterator[str]:
        """What will not be quite as asked, though nothing is wrong with it."""
        for subject in self.subjects:
            total = len(subject.samples)
            if isinstance(self.samples, int) and self.samples > total:
                yield f"{self.samples} samples were asked for; {subject.samples.dataset} has {total}, all of which are certified"

    def settings_of(self, subject: Subject) -> CascadeSettings:
        return self.cascade.settings(subject.defaults)

    def check(self) -> None:
        """Refuse what cannot be done, of any subject, before anything is started or written."""
        for subject in self.subjects:
            threats, indices = self.threats_of(subject), self.indices_of(subject)
            settings = self.settings_of(subject)
            check_feasible(threats, settings, self.union_only, len(indices), self.yes)
            check_samples(subject.samples, subject.network, settings.box)
