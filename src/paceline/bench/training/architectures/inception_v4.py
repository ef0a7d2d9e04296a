"""Inception-v4 (Szegedy et al., 2017), for images of 299 x 299 and 1000 classes."""

from __future__ import annotations

from paceline.bench.training.architectures.layers import Layer, Stack

Kernel = tuple[int, int] | int
Branch = tuple[tuple[int, Kernel, int], ...]
"""Convolutions one after another: channels of the output, kernel, side of the output."""

_WIDE, _TALL = (1, 7), (7, 1)
_STEM: tuple[tuple[int, tuple[Branch, ...]], ...] = (
    (3, (((32, 3, 149), (32, 3, 147), (64, 3, 147)),)),
    (64, (((96, 3, 73),),)),
    (160, (((64, 1, 73), (96, 3, 71)), ((64, 1, 73), (64, _WIDE, 73), (64, _TALL, 73), (96, 3, 71)))),
    (192, (((192, 3, 35),),)),
)
_A: tuple[Branch, ...] = (
    ((96, 1, 35),),
    ((64, 1, 35), (96, 3, 35)),
    ((64, 1, 35), (96, 3, 35), (96, 3, 35)),
    ((96, 1, 35),),
)
_REDUCE_A: tuple[Branch, ...] = (((384, 3, 17),), ((192, 1, 35), (224, 3, 35), (256, 3, 17)))
_B: tuple[Branch, ...] = (
    ((384, 1, 17),),
    ((192, 1, 17), (224, _WIDE, 17), (256, _TALL, 17)),
    ((192, 1, 17), (192, _TALL, 17), (224, _WIDE, 17), (224, _TALL, 17), (256, _WIDE, 17)),
    ((128, 1, 17),),
)
_REDUCE_B: tuple[Branch, ...] = (
    ((192, 1, 17), (192, 3, 8)),
    ((256, 1, 17), (256, _WIDE, 17), (320, _TALL, 17), (320, 3, 8)),
)


def inception_v4() -> list[Layer]:
    """A stem, 4 + 7 + 3 blocks of branches with two reductions between, a classifier."""
    stack = Stack()
    for number, (inputs, branches) in enumerate(_STEM):
        _block(stack, f"stem{number}", inputs, branches)
    for number in range(4):
        _block(stack, f"a{number}", 384, _A)
    _block(stack, "reduce_a", 384, _REDUCE_A)
    for number in range(7):
        _block(stack, f"b{number}", 1024, _B)
    _block(stack, "reduce_b", 1024, _REDUCE_B)
    for number in range(3):
        _block_c(stack, f"c{number}")
    stack.linear("classifier", 1536, 1000)
    return stack.layers


def _block(stack: Stack, name: str, inputs: int, branches: tuple[Branch, ...]) -> None:
    for number, branch in enumerate(branches):
        channels = inputs
        for step, (outputs, kernel, side) in enumerate(branch):
            stack.conv(f"{name}.{number}.{step}", channels, outputs, kernel, side)
            stack.norm(outputs)
            channels = outputs


def _block_c(stack: Stack, name: str) -> None:
    """Two of its branches fork at their ends."""
    forks = (((1536, 384, 1),), ((1536, 384, 1), (384, 448, (3, 1)), (448, 512, (1, 3))))
    _block(stack, f"{name}.straight", 1536, (((256, 1, 8),), ((256, 1, 8),)))
    for number, trunk in enumerate(forks):
        channels = 1536
        for step, (inputs, channels, kernel) in enumerate(trunk):
            stack.conv(f"{name}.{number}.{step}", inputs, channels, kernel, 8)
            stack.norm(channels)
        for kernel in ((1, 3), (3, 1)):
            stack.conv(f"{name}.{number}.fork{kernel[0]}", channels, 256, kernel, 8)
            stack.norm(256)
