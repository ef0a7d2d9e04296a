"""Replays the training of well-known models: their gradients and times, real collectives, no arithmetic.

``profile`` knows the models, ``scaling`` fits them to a lab's rate, ``replay`` is a module that takes the time and
makes the gradients of one, ``strategies`` are the ways to train it, ``measure`` lets them take turns, ``bounds`` says
what none can beat. ``cli/bench_training.py`` is the user.
"""
