"""Residual blocks, and a small residual network made of them."""

from collections.abc import Sequence

from torch import Tensor, nn

from cure_ray.networks.models import Network, conv_layers, normalize_layers


class Residual(nn.Module):
    """main(x) + shortcut(x); without a shortcut, main(x) + x. A ReLU that follows the sum is a layer of its own."""

    def __init__(self, main: Sequence[nn.Module], shortcut: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.main, self.shortcut = nn.Sequential(*main), nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.main(x) + self.shortcut(x)
        return out


def _block(channels_in: int, channels_out: int, stride: int, batch_norm: bool) -> list[nn.Module]:
    """Two 3x3 convolutions around the shortcut, which is a 1x1 convolution where the shape changes."""
    *second, _ = conv_layers(channels_out, channels_out, 3, 1, 1, batch_norm)
    *projection, _ = conv_layers(channels_in, channels_out, 1, stride, 0, batch_norm)
    same = channels_in == channels_out and stride == 1
    first = conv_layers(channels_in, channels_out, 3, stride, 1, batch_norm)
    return [Residual([*first, *second], [] if same else projection), nn.ReLU()]


def resnet_small(
    input_shape: tuple[int, int, int],
    num_classes: int,
    mean: Sequence[float],
    std: Sequence[float],
    width: float = 1.0,
    batch_norm: bool = True,
) -> Network:
    """A 3x3 convolution (16), residual blocks of 16, 32 and 64 channels, the last two halving the image, the means of its
    four quarters (of an odd height or width without the last row or column), one linear layer."""
    plan = [(max(1, round(width * n)), stride) for n, stride in ((16, 1), (32, 2), (64, 2))]
    channels, height, image_width = input_shape
    layers = [*normalize_layers(mean, std), *conv_layers(channels, plan[0][0], 3, 1, 1, batch_norm)]
    channels = plan[0][0]
    for channels_out, stride in plan:
        layers += _block(channels, channels_out, stride, batch_norm)
        channels = channels_out
        height, image_width = (height - 1) // stride + 1, (image_width - 1) // stride + 1
    pool = max(1, height // 2), max(1, image_width // 2)
    means = (height // pool[0]) * (image_width // pool[1])
    layers += [nn.AvgPool2d(pool), nn.Flatten(), nn.Linear(channels * means, num_classes)]
    return Network(layers, input_shape, num_classes)
