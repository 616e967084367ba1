"""Offline checks of cluster files: Ray's own schema, and what it does not look at."""

from pathlib import Path
from typing import Any

import yaml

import cure_ray
from cure_ray.errors import UserError


def validate_cluster(path: Path, ray_version: str) -> dict[str, Any]:
    """A `ray up` file that Ray accepts, in a region, with the right image, a private dashboard and tokens. Returns its content."""
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    try:  # private, and the only check there is: `ray up` has no dry run
        from ray.autoscaler._private.util import prepare_config, validate_config

        validate_config(prepare_config(dict(config)))
    except Exception as error:
        raise UserError(f"{path}: Ray refuses it: {error}") from None
    provider = config["provider"]
    if provider["type"] == "aws" and not provider.get("region"):
        raise UserError(f"{path}: provider.region is missing")
    image = (config.get("docker") or {}).get("image", "")
    if image and f":{ray_version}-py3" not in image:
        raise UserError(f"{path}: the image {image} is not of Ray {ray_version}, which cure_ray {cure_ray.__version__} needs")
    for role in ("head", "worker"):
        starts = [c for c in config[f"{role}_start_ray_commands"] if "ray start" in c]
        if not starts or "RAY_AUTH_MODE=token" not in starts[0]:
            raise UserError(f"{path}: {role}_start_ray_commands do not turn on token authentication")
    if "--dashboard-host=127.0.0.1" not in " ".join(config["head_start_ray_commands"]):
        raise UserError(f"{path}: the dashboard is not bound to loopback")
    return config
