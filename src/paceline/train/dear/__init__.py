"""DeAR: reduce-scatter behind backpropagation, all-gather behind the next forward pass.

``wrapper`` is what users see. ``pipeline`` holds the parts together: ``backpipe`` (reduce-scatter), ``feedpipe``
(all-gather), ``guard`` (nobody reads what has not arrived), and an update: ``replicated`` or ``sharded``.
The idea is from "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining" (Zhang et al.,
ICDCS 2023).
"""
