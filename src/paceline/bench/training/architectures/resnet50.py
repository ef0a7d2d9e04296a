"""ResNet-50 (He et al., 2016), for images of 224 x 224 and 1000 classes."""

from __future__ import annotations

from paceline.bench.training.architectures.layers import Layer, Stack

_STAGES = ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7))  # width, blocks, side of the output


def resnet50() -> list[Layer]:
    """A stem, 16 bottlenecks of three convolutions, four projections, a classifier."""
    stack = Stack()
    stack.conv("stem", 3, 64, 7, 112)
    stack.norm(64)
    inputs = 64
    for stage, (width, blocks, side) in enumerate(_STAGES, 1):
        for block in range(blocks):
            name = f"stage{stage}.{block}"
            first_side = side * 2 if block == 0 and stage > 1 else side  # the stride is in the 3 x 3
            stack.conv(f"{name}.reduce", inputs, width, 1, first_side)
            stack.norm(width)
            stack.conv(f"{name}.conv", width, width, 3, side)
            stack.norm(width)
            stack.conv(f"{name}.expand", width, 4 * width, 1, side)
            stack.norm(4 * width)
            if block == 0:
                stack.conv(f"{name}.project", inputs, 4 * width, 1, side)
                stack.norm(4 * width)
            inputs = 4 * width
    stack.linear("classifier", inputs, 1000)
    return stack.layers
