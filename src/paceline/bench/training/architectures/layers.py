"""What an architecture is made of: a layer has one weight that computes, and what is added to or scales its output."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """Shapes of the parameters, and multiply-adds for one input."""

    name: str
    shapes: tuple[Shape, ...]
    multiply_adds: float

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)


@dataclass
class Stack:
    """Layers in the order of the forward pass, as they are written down."""

    layers: list[Layer] = field(default_factory=list)

    def conv(self, name: str, inputs: int, outputs: int, kernel: tuple[int, int] | int, side: int) -> None:
        """A convolution without bias, whose output has ``side`` times ``side`` places."""
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        shape = (outputs, inputs, height, width)
        self.layers.append(Layer(name, (shape,), float(math.prod(shape) * side * side)))

    def linear(self, name: str, inputs: int, outputs: int, places: int = 1) -> None:
        """A matrix with bias, applied at so many places."""
        self.layers.append(Layer(name, ((outputs, inputs), (outputs,)), float(inputs * outputs * places)))

    def norm(self, channels: int) -> None:
        """Scale and shift, which belong to the layer before."""
        self._extend(((channels,), (channels,)))

    def bias(self, outputs: int) -> None:
        """A vector that is added to the output of the layer before."""
        self._extend(((outputs,),))

    def _extend(self, shapes: tuple[Shape, ...]) -> None:
        last = self.layers[-1]
        self.layers[-1] = Layer(last.name, last.shapes + shapes, last.multiply_adds)
