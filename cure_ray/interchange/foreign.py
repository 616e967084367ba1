"""Networks and images that were made elsewhere: a factory by name, weights by file, images in an .npz."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cure_ray.catalogue.own import checked_images, read_npz
from cure_ray.config.factories import import_function
from cure_ray.data.samples import Samples
from cure_ray.errors import UserError
from cure_ray.interchange.weights import read_weights
from cure_ray.runs.checkpoints import load_weights
from cure_ray.threats.box import UNIT, Box


def load_foreign_network(factory: str, weights: Path | None) -> nn.Module:
    """Call `package.module:factory` and load its weights; in eval mode. Pickled weights are read with weights_only."""
    make = import_function(factory, f"--network {factory}")
    try:
        network = make()
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"--network {factory}: calling it without arguments failed ({reason})") from error
    if not isinstance(network, nn.Module):
        raise UserError(f"--network {factory}: it returned {type(network).__name__}, not a torch module")
    if weights is not None:
        load_weights(network, read_weights(weights), str(weights))
    return network.eval()


def load_npz(path: Path) -> Samples:
    """`images` (N, C, H, W), uint8 or floats that float32 holds exactly, and `labels` (N) of an .npz file."""
    return replace(_samples(*read_npz(path, f"--data {path}")["train"], path.stem), file=path)


def as_samples(images: Any, labels: Any, name: str) -> Samples:
    """Tensors or arrays as samples: images (N, C, H, W), uint8 or floats that float32 holds exactly, and N whole numbers."""
    return _samples(*checked_images(_array(images), _array(labels), "the data given"), name)


def _samples(images: "np.ndarray[Any, Any]", labels: "np.ndarray[Any, Any]", name: str) -> Samples:
    pixels = torch.from_numpy(images).float() / 255 if images.dtype == np.uint8 else torch.from_numpy(images)
    return Samples(name, "test", pixels.contiguous(), torch.from_numpy(labels))


def _array(values: Any) -> "np.ndarray[Any, Any]":
    if isinstance(values, Tensor):
        if values.is_meta or values.layout != torch.strided:
            raise UserError(f"a dense tensor with numbers in it is needed, not one on {values.device} in the layout {values.layout}")
        plain = values.detach().cpu()
        return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()  # numpy has no bfloat16; float32 holds it
    try:
        return np.asarray(values)
    except ValueError as error:
        raise UserError(f"not an array ({error})") from None


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Whether a network that takes such images was more likely meant for (C, H, W): a flat first layer would take either."""
    usual = (1, 3, 4)
    return len(shape) == 3 and shape[2] in usual and shape[0] not in usual and shape[1] > 1


def check_samples(samples: Samples, network: nn.Module, box: Box = UNIT) -> None:
    """Refuse a wrong range, shape or label before any work is done. NaN pixels are left to the cascade, as `error` rows."""
    finite = samples.images[torch.isfinite(samples.images)]
    if finite.numel() and (float(finite.min()) < box.low or float(finite.max()) > box.high):
        low, high = float(finite.min()), float(finite.max())
        hint = " Divide by 255." if high > 2 and low >= 0 else " Undo the normalisation: it belongs into the network." if low < 0 else ""
        hint = hint if box == UNIT else ""
        other = " If another domain is meant, say it: --domain LOW,HIGH, or --domain none."
        raise UserError(f"images must lie in {box.words()}, these lie in [{low:g}, {high:g}].{hint}{other}")
    expected = getattr(network, "input_shape", None)
    shape = tuple(samples.images.shape[1:])
    if expected is not None and tuple(expected) != shape:
        raise UserError(f"the network takes images of shape {tuple(expected)}, the data has {shape}")
    if expected is None and _channels_last(shape):
        raise UserError(
            f"the images have the shape {shape}, which looks like height, width, channels; channels come first: (N, C, H, W), that is "
            f"images.transpose(0, 3, 1, 2). If {shape[0]} channels of {shape[1]}x{shape[2]} pixels are meant, say so in the network: "
            f"network.input_shape = {shape}"
        )
    try:
        with torch.no_grad():
            logits = network(torch.zeros(1, *shape))
    except RuntimeError as error:
        raise UserError(f"the network does not accept images of shape {shape}: {str(error).splitlines()[0]}") from error
    if not isinstance(logits, Tensor):
        raise UserError(f"the network must return one tensor [N, classes], it returned a {type(logits).__name__}")
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise UserError(f"the network must return [N, classes] with at least two classes, it returned {tuple(logits.shape)}")
    low_label, high_label = (int(samples.labels.min()), int(samples.labels.max())) if len(samples) else (0, 0)
    if low_label < 0 or high_label >= logits.shape[1]:
        raise UserError(f"labels must lie in 0..{logits.shape[1] - 1} for this network, these lie in {low_label}..{high_label}")
