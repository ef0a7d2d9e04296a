"""DenseNet-201 (Huang et al., 2017), growth 32, for images of 224 x 224 and 1000 classes."""

from __future__ import annotations

from paceline.bench.training.architectures.layers import Layer, Stack

_GROWTH = 32
_BLOCKS = ((6, 56), (12, 28), (48, 14), (32, 7))  # layers, side


def densenet201() -> list[Layer]:
    """A stem, four dense blocks of two convolutions a layer, transitions between, a classifier."""
    stack = Stack()
    stack.conv("stem", 3, 64, 7, 112)
    stack.norm(64)
    channels = 64
    for block, (num_layers, side) in enumerate(_BLOCKS, 1):
        for layer in range(num_layers):
            name = f"block{block}.{layer}"
            stack.norm(channels)
            stack.conv(f"{name}.reduce", channels, 4 * _GROWTH, 1, side)
            stack.norm(4 * _GROWTH)
            stack.conv(f"{name}.conv", 4 * _GROWTH, _GROWTH, 3, side)
            channels += _GROWTH
        stack.norm(channels)
        if block < len(_BLOCKS):
            stack.conv(f"transition{block}", channels, channels // 2, 1, side)
            channels //= 2
    stack.linear("classifier", channels, 1000)
    return stack.layers
