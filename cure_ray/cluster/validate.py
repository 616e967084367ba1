"""Offline checks of cluster files: Ray's own schema, and what it does not look at."""

from pathlib import Path
from typing import Any

import yaml

import cure_ray
from cure_ray.errors import UserError


def validate_cluster(path: Path, ray_version: str) -> dict[str, Any]:
    """A `ray up` file that Ray accepts, in a region, with both engines, closed groups, tokens and a private dashboard. Returns it."""
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
    if not any(str(source).endswith("auth_token") for source in config.get("file_mounts", {}).values()):
        raise UserError(f"{path}: no file_mounts bring the token to the nodes, and without one Ray does not start")
    if provider["type"] == "aws":
        kinds = config["available_node_types"].items()
        open_kinds = [name for name, kind in kinds if not kind["node_config"].get("SecurityGroupIds")]
        if open_kinds or "security_group" in provider:
            raise UserError(
                f"{path}: SecurityGroupIds of your own are missing in the node_config of {', '.join(open_kinds) or 'some nodes'} (and "
                "provider.security_group does not replace them): to a group that Ray makes or fills it adds SSH from everywhere"
            )
    setup = " ".join(config.get("setup_commands", []) + config.get("head_setup_commands", []))
    if "--no-deps auto_LiRPA==" not in setup:
        raise UserError(f"{path}: its setup does not install the second engine (pip install --no-deps auto_LiRPA==...)")
    if "--dashboard-host=127.0.0.1" not in " ".join(config["head_start_ray_commands"]):
        raise UserError(f"{path}: the dashboard is not bound to loopback")
    return config
