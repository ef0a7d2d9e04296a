"""Steps of a double of an optimizer."""

from __future__ import annotations

from typing import Any

import torch

from paceline.train.dear.partial import PartialStep


class Calls(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_hooks_are_not_run_for_a_subclass_either() -> None:
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # from now on torch runs hooks in SGD's step, too
    parameter = torch.ones(2, requires_grad=True)
    optimizer = Calls([parameter], lr=0.5)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    parameter.grad = torch.ones(2)
    step = PartialStep(optimizer)
    step.run(step.hyper_parameters(), [[parameter]])
    assert not calls
    assert parameter.tolist() == [0.5, 0.5]
    optimizer.step()
    assert "before" in calls
    assert "after" in calls
