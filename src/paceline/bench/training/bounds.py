"""The least an iteration can take, if communication and computation overlap as far as dependencies allow. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.bench.training.profile import LayerProfile


class Bounds(msgspec.Struct, frozen=True):
    """Seconds of both passes, of both halves of the all-reduce, and the two bounds of the model's layers.

    Bounds know no start-ups and no buckets.
    """

    forward_s: float
    backward_s: float
    reduce_scatter_s: float
    all_gather_s: float
    layers_s: float
    wait_free_layers_s: float

    @classmethod
    def of(cls, layers: Sequence[LayerProfile], reduce_scatter_s: float, all_gather_s: float) -> Bounds:
        """The bounds of a model whose all-reduce takes this long at the limit of the links."""
        all_reduce_s = reduce_scatter_s + all_gather_s
        return cls(
            sum(layer.forward_s for layer in layers),
            sum(layer.backward_s for layer in layers),
            reduce_scatter_s,
            all_gather_s,
            layers_bound_s(layers, all_reduce_s),
            wait_free_layers_bound_s(layers, all_reduce_s),
        )

    @property
    def compute_s(self) -> float:
        """Without communication."""
        return self.forward_s + self.backward_s

    @property
    def all_reduce_s(self) -> float:
        """Both halves."""
        return self.reduce_scatter_s + self.all_gather_s

    @property
    def any_schedule_s(self) -> float:
        """The bound of every schedule of exact synchronous SGD: it computes everything, and all-reduces everything.

        >>> Bounds.of([LayerProfile("all", (1,), 1.0, 2.0)], 2.0, 2.0).any_schedule_s
        4.0
        """
        return max(self.compute_s, self.all_reduce_s)

    @property
    def dear_s(self) -> float:
        """DeAR without early gathers: reduce-scatter behind backpropagation, all-gather behind the next forward pass.

        A reference only. A schedule that also gathers during backpropagation can beat it.
        """
        return max(self.backward_s, self.reduce_scatter_s) + max(self.forward_s, self.all_gather_s)

    @property
    def wait_free_s(self) -> float:
        """All-reduce behind backpropagation, as DistributedDataParallel does.

        >>> Bounds.of([LayerProfile("all", (1,), 1.0, 2.0)], 2.0, 2.0).wait_free_s
        5.0
        """
        return self.forward_s + max(self.backward_s, self.all_reduce_s)

    @property
    def ideal_ratio(self) -> float:
        """The most that any schedule can gain over wait-free backpropagation, with the layers of the model."""
        return self.wait_free_layers_s / self.layers_s


def layers_bound_s(layers: Sequence[LayerProfile], all_reduce_s: float) -> float:
    """The least seconds an iteration takes on average, whatever the schedule, if it is exact synchronous SGD.

    Take any layer l, and follow one iteration from the end of backward of l to the next end of it. First, gradients of
    layers 1 to l do not exist before the end of backward of l. Their parameters are all needed before the next forward
    of l starts, because forward went through 1 to l - 1 before. So all of AR(1..l), the all-reduce of these gradients,
    happens in between. Then forward of l to the last layer and backward back to l follow, one after another. Hence

        T >= AR(1..l) + sum over i >= l of (f_i + b_i)      for every l, and T >= the sum of all f_i + b_i.

    The links serve one byte after another, so AR(1..l) is the share of the all-reduce that these layers have.
    """
    largest_s = after_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    for layer, reduced_s in zip(layers, _all_reduced_s(layers, all_reduce_s), strict=True):
        largest_s = max(largest_s, reduced_s + after_s)
        after_s -= layer.forward_s + layer.backward_s
    return largest_s


def wait_free_layers_bound_s(layers: Sequence[LayerProfile], all_reduce_s: float) -> float:
    """The same for DistributedDataParallel, whose next forward pass waits for all gradients.

    The all-reduce of layers 1 to l begins after backward of l, and the whole forward pass begins after its end:

        T >= FF + (sum over i >= l of b_i) + AR(1..l)       for every l, and T >= FF + BP.

    All-reducing gradients in the order in which they appear takes exactly the largest of these.
    """
    backward_s = sum(layer.backward_s for layer in layers)
    largest_s = until_s = backward_s
    for layer, reduced_s in zip(layers, _all_reduced_s(layers, all_reduce_s), strict=True):
        largest_s = max(largest_s, until_s + reduced_s)
        until_s -= layer.backward_s
    return sum(layer.forward_s for layer in layers) + largest_s


def _all_reduced_s(layers: Sequence[LayerProfile], all_reduce_s: float) -> list[float]:
    """AR(1..l) for every l: the seconds that the gradients of the first l layers take together."""
    elements, found = sum(sum(layer.sizes) for layer in layers), []
    so_far = 0
    for layer in layers:
        so_far += sum(layer.sizes)
        found.append(all_reduce_s * so_far / elements)
    return found
