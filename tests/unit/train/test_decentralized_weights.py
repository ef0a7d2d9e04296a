"""The vector of a model's weights: what is in it, what locks it, and what averages may do to it."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.train.decentralized.weights import Weights

SOON_S = 20.0


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(requires_grad=False)
        self.linear = nn.Linear(3, 2)
        self.tied = nn.Linear(3, 2)
        self.tied.weight = self.linear.weight
        self.norm = nn.BatchNorm1d(2)
        self.attention = nn.Module()
        self.attention.register_buffer("mask", torch.tensor([0.0, -math.inf, math.inf]))


NUM_PARAMETERS = 6 + 2 + 2 + 4
NUM_BUFFERS = 4 + 3


def _made(average_state: bool = False, **options: Any) -> tuple[_Model, torch.optim.Optimizer, Weights]:
    model = _Model()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.1, **options)
    return model, optimizer, Weights(model, optimizer, average_state=average_state)


def _step(model: _Model, optimizer: torch.optim.Optimizer, weights: Weights) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    weights.begin_step()
    optimizer.step()
    weights.end_step()


def test_the_vector_has_parameters_then_buffers() -> None:
    model, _, weights = _made()
    assert (weights.num_parameters, weights.num_weights) == (NUM_PARAMETERS, NUM_PARAMETERS + NUM_BUFFERS)
    assert weights.size == weights.num_weights
    vector = weights.new()
    weights.read(vector)
    expected = [model.linear.weight, model.linear.bias, model.tied.bias, model.norm.weight, model.norm.bias]
    assert torch.equal(vector[:NUM_PARAMETERS], torch.cat([one.detach().flatten() for one in expected]))
    assert vector[NUM_PARAMETERS:].tolist() == [0, 0, 1, 1, 0, -math.inf, math.inf]


def test_write_and_add_change_what_is_trained_and_nothing_else() -> None:
    model, _, weights = _made()
    frozen, tracked = model.frozen.weight.clone(), int(model.norm.num_batches_tracked)
    weights.write(torch.arange(float(weights.size)))
    assert model.linear.weight.flatten().tolist() == list(range(6))
    assert model.norm.running_mean.tolist() == [14, 15]
    weights.add(torch.ones(weights.size))
    weights.add(torch.ones(NUM_PARAMETERS))  # the first part alone
    assert model.linear.weight.flatten().tolist() == list(range(2, 8))
    assert model.norm.running_mean.tolist() == [15, 16]
    assert torch.equal(model.frozen.weight, frozen)
    assert int(model.norm.num_batches_tracked) == tracked
    part = weights.new(6)
    weights.read(part)
    assert part.tolist() == list(range(2, 8))


def test_types_are_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2))
    weights = Weights(model, torch.optim.SGD(model.parameters(), lr=1))
    assert weights.dtype == torch.float32
    weights.write(torch.ones(weights.size))
    weights.add(torch.ones(weights.size))
    assert model[0].weight.dtype == torch.bfloat16
    assert model[0].weight.tolist() == [[2, 2], [2, 2]]
    double = nn.Linear(2, 2).double()
    assert Weights(double, torch.optim.SGD(double.parameters(), lr=1)).new().dtype == torch.float64


def test_a_difference_leaves_infinite_buffers_as_they_are() -> None:
    model, _, weights = _made()
    snapshot = weights.new()
    weights.read(snapshot)
    mean = snapshot.clone()
    mean[0] += 2
    mean[NUM_PARAMETERS] += 3
    before = model.linear.weight.flatten().tolist()
    weights.add(weights.difference(mean, snapshot))
    assert model.linear.weight.flatten().tolist() == pytest.approx([before[0] + 2, *before[1:]])
    assert model.norm.running_mean.tolist() == [3, 0]
    assert model.attention.mask.tolist() == [0, -math.inf, math.inf]


def test_a_difference_of_weights_that_diverged_is_not_hidden() -> None:
    _, _, weights = _made()
    snapshot = weights.new()
    weights.read(snapshot)
    mean = snapshot.clone()
    mean[0] = math.nan
    assert math.isnan(weights.difference(mean, snapshot)[0])


def test_the_state_is_found_after_a_step_and_again_when_it_is_replaced() -> None:
    model, optimizer, weights = _made(average_state=True, amsgrad=True)
    assert weights.size == weights.num_weights
    _step(model, optimizer, weights)
    assert weights.size == weights.num_weights + 3 * NUM_PARAMETERS
    optimizer.load_state_dict(optimizer.state_dict())
    _step(model, optimizer, weights)
    assert weights.size == weights.num_weights + 3 * NUM_PARAMETERS
    weights.write(torch.full((weights.size,), 7.0))
    state = optimizer.state[model.linear.weight]
    assert state["exp_avg"].unique().tolist() == [7]
    assert state["max_exp_avg_sq"].unique().tolist() == [7]
    assert state["step"] == 2


def test_second_moments_do_not_become_negative() -> None:
    model, optimizer, weights = _made(average_state=True)
    _step(model, optimizer, weights)
    state = optimizer.state[model.linear.weight]
    second = state["exp_avg_sq"].clone()
    weights.add(torch.full((weights.size,), -1.0))
    torch.testing.assert_close(state["exp_avg_sq"], second / 4)
    assert (state["exp_avg"] < 0).all()  # as it may
    weights.add(torch.full((weights.size,), 1.0))
    torch.testing.assert_close(state["exp_avg_sq"], second / 4 + 1)


def test_others_wait_while_a_step_is_under_way() -> None:
    model, _, weights = _made()
    seen = weights.new()
    reader = threading.Thread(target=weights.read, args=(seen,), daemon=True)
    weights.begin_step()
    reader.start()
    with torch.no_grad():
        model.linear.weight.fill_(1.0)
        model.linear.bias.fill_(1.0)
    assert reader.is_alive()
    weights.end_step()
    reader.join(SOON_S)
    assert not reader.is_alive()
    assert seen[:8].unique().tolist() == [1]


def test_a_reader_gets_its_turn_between_steps_that_follow_each_other_at_once() -> None:
    _, _, weights = _made()
    seen = weights.new()
    weights.begin_step()
    reader = threading.Thread(target=weights.read, args=(seen,), daemon=True)
    reader.start()
    while not weights._turn.locked():  # it waits
        pass
    weights.end_step()
    weights.begin_step()  # waits for the reader
    reader.join(SOON_S)
    assert not reader.is_alive()
    weights.end_step()


def test_a_step_that_raised_does_not_lock_others_out() -> None:
    _, _, weights = _made()
    weights.begin_step()
    weights.begin_step()  # the first one raised
    weights.end_step()
    weights.end_step()
    weights.read(weights.new())


def test_others_change_the_copy_while_other_weights_are_shown() -> None:
    model, _, weights = _made()
    weights.write(torch.ones(weights.size))
    weights.show(torch.full((weights.size,), 5.0))
    assert model.linear.bias.tolist() == [5, 5]
    weights.add(torch.ones(weights.size))
    own = weights.new()
    weights.read(own)
    assert own.unique().tolist() == [2]
    assert model.linear.bias.tolist() == [5, 5]
    with pytest.raises(UsageError, match="under way already"):
        weights.show(own)
    weights.restore()
    weights.restore()
    assert model.linear.bias.tolist() == [2, 2]
    weights.show(own)
    weights.write(torch.full((weights.size,), 9.0))
    weights.restore()
    assert model.linear.bias.tolist() == [9, 9]


def test_gradients_are_a_vector_too() -> None:
    model, _, weights = _made()
    model.linear.weight.grad = torch.full((2, 3), 2.0)
    vector = torch.empty(weights.num_parameters)
    weights.read_gradients(vector)
    assert vector.tolist() == [2] * 6 + [0] * 8
    weights.write_gradients(torch.arange(float(NUM_PARAMETERS)))
    assert model.linear.weight.grad.flatten().tolist() == list(range(6))
    assert model.norm.bias.grad.tolist() == [12, 13]
    assert model.frozen.weight.grad is None
