"""Networks of the zoo as torch modules: ours from their checkpoints, published ones from their authors' weights."""

from pathlib import Path

from cure_ray.errors import UserError
from cure_ray.interchange.weights import read_weights
from cure_ray.networks.models import Network
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.zoo.architecture import fitted
from cure_ray.zoo.manifest import check_entry, find_zoo, read_manifest
from cure_ray.zoo.published import find_published


def load_network(name: str, zoo: str | Path | None = None, weights: str | Path | None = None) -> Network:
    """In evaluation mode; what the manifest lists must be there and unchanged."""
    root = find_zoo(zoo)
    manifest = read_manifest(root)
    entry = manifest.find(name)
    if entry.published is None:
        return load_checkpoint(check_entry(root, manifest.run_of(entry))).network
    check_entry(root, entry)
    published = find_published(entry.published)
    if weights is None:
        at = published.source.url if published.source else "unknown"
        raise UserError(f"{name}: its weights are its authors', not ours to ship. Download them from {at}, and give the file: weights=FILE")
    return fitted(published, read_weights(Path(weights)), str(weights))
