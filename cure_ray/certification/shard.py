"""From shards to rows: the images of a job, and the function that turns one shard into verdicts, wherever it runs."""

from collections.abc import Callable

import torch
from torch import Tensor

from cure_ray.certification.balls import Certifier
from cure_ray.certification.families import certify_any, enabled_stages
from cure_ray.certification.job import Job, Shard
from cure_ray.certification.outcome import Outcome
from cure_ray.certification.verdict import SCHEMA_VERSION, Status, Verdict
from cure_ray.data.samples import Samples
from cure_ray.threats import Ball, Balls, Threat, Words
from cure_ray.threats.box import UNIT

SaveWitness = Callable[[Tensor], str]  # stores an image, returns its digest


def certify_shard(certifier: Certifier, shard: Shard, samples: Samples, save_witness: SaveWitness) -> list[Verdict]:
    """All rows of a shard: for every threat one per sample."""
    rows = torch.tensor(shard.indices, dtype=torch.long)
    x, y = samples.images[rows], samples.labels[rows]
    if shard.job.union_only:
        found = certifier.certify_union(x, y, [t for t in shard.threats if isinstance(t, Ball)], shard.indices)
    else:
        found = [certify_any(certifier, x, y, threat, shard.indices) for threat in shard.threats]
    return [
        to_verdict(shard.job, threat, index, outcome, save_witness)
        for threat, outcomes in zip(shard.threats, found, strict=True)
        for index, outcome in zip(shard.indices, outcomes, strict=True)
    ]


def to_verdict(job: Job, threat: Threat, index: int, outcome: Outcome, save_witness: SaveWitness) -> Verdict:
    """An outcome as a row. The witness is stored first, so that no row ever points to a file that is not there."""
    falsified = outcome.status == Status.FALSIFIED
    if outcome.status is None or (falsified and outcome.witness is None):
        raise RuntimeError(f"sample {index} left the cascade undecided")
    stages = enabled_stages(threat, job.settings)
    margins = () if outcome.margins is None else tuple(outcome.margins.tolist())
    return Verdict(
        schema_version=SCHEMA_VERSION,
        run_id=job.run_id,
        checkpoint_digest=job.checkpoint_digest,
        dataset=job.dataset,
        split=job.split,
        sample_index=index,
        label=outcome.label,
        predicted=outcome.predicted,
        family=threat.family,
        threat=str(threat),
        norm=threat.norm,
        eps=threat.radii[index] if isinstance(threat, Balls) else threat.eps,
        status=outcome.status,
        stage=outcome.stage,
        margin_lb=min(margins) if margins else None,
        margins=margins,
        attack_margin=outcome.attack_margin,
        witness=save_witness(outcome.witness) if falsified and outcome.witness is not None else None,
        seconds=outcome.seconds,
        engine=job.engine,
        engine_version=job.engine_version,
        seed=job.seed,
        stages=",".join(stages),
        budget_seconds=job.settings.seconds if "branch-and-bound" in stages else 0.0,
        budget_nodes=job.settings.nodes,
        box=str(job.settings.box if isinstance(threat, Ball | Balls | Words) else UNIT),
        nodes=outcome.nodes,
        message=outcome.message,
        grid=threat.grid,
    )
