"""``paceline.Decentralized``: workers train at their own speeds and average their weights now and then."""

from __future__ import annotations

import atexit
import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.config import Config
from paceline.errors import UnsupportedError, UsageError
from paceline.train.decentralized.generator.messages import MAX_WORKERS
from paceline.train.decentralized.generator.secret import read_secret
from paceline.train.decentralized.mesh import GroupMesh, OpenMesh
from paceline.train.decentralized.schemes import find_scheme
from paceline.train.decentralized.schemes.scheme import GeneratorPlace, Scheme, Statistics, Worker, check_options
from paceline.train.decentralized.weights import Weights
from paceline.train.shared import checks, ownership

_NAME = "Decentralized"


class Decentralized(nn.Module):
    """Trains a module on workers of mixed speed; the training loop stays as it is::

        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        model = paceline.Decentralized(module, optimizer)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
        model.finish()

    Each worker makes its own steps, and averages its weights with a few others now and then, beside its next steps.
    Nobody waits for a slow worker. ``scheme`` says who averages what and when (docs/decentralized.md has a table);
    ``options`` are the scheme's. ``finish()`` ends the training: then every worker has the mean of all workers'
    weights. Workers need not make the same number of steps.

    Workers are the ranks of ``process_group`` (by default, all). With ``generator="host:port"`` there is no process
    group: workers come and go, and find each other through ``paceline generator``, which runs there. They know its
    ``secret_file`` (by default, PACELINE_SECRET_FILE). A newcomer starts with the others' mean.

    ``total_steps`` ends the training when all workers together have made so many steps: ``done`` becomes true.
    ``average_state=True`` averages the optimizer's state, as momentum, with the weights. ``init_sync=False`` keeps
    weights that differ from rank 0's. ``timeout_s`` is how long ``finish()`` waits for the others.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        process_group: Any = None,
        *,
        scheme: str = "ripples",
        generator: str | None = None,
        secret_file: str | Path | None = None,
        total_steps: int | None = None,
        average_state: bool = False,
        init_sync: bool = True,
        timeout_s: float = 1800.0,
        **options: Any,
    ) -> None:
        super().__init__()
        kind = find_scheme(scheme)
        check_options(kind, scheme, options)
        checks.check_arguments(module, optimizer, _NAME)
        checks.check_parameters(module, optimizer, _NAME)
        ownership.check_free(module, f"paceline.{_NAME}")
        if total_steps is not None and total_steps < 1:
            raise UsageError(f"total_steps is {total_steps}: it must be 1 or more")
        if not timeout_s > 0:
            raise UsageError(f"timeout_s is {timeout_s}: it must be above 0")
        self.module = module
        self.optimizer = optimizer
        self.training = module.training
        self._in_closure = False
        self._depth = 0  # of steps: an optimizer's own step() may call that of its base class, with the hooks again
        weights = Weights(module, optimizer, average_state=average_state)
        place = (
            None if generator is None else _generator_place(generator, secret_file, process_group, scheme, total_steps)
        )
        if place is not None and weights.device.type != "cpu":
            raise UnsupportedError(f"the module is on {weights.device}: with generator= weights are on the CPU")
        mesh = _group_mesh(process_group) if place is None else OpenMesh(place.secret, MAX_WORKERS)
        try:
            if isinstance(mesh, GroupMesh) and mesh.num_workers > 1:
                checks.check_alike(module, mesh.group)
                if init_sync:
                    _copy_from_first(module, mesh)
            model = checks.fingerprint(module) + (", with the optimizer's state" if average_state else "")
            self._worker = Worker(mesh, weights, optimizer, total_steps, timeout_s, place, model)
            self._scheme: Scheme = kind(self._worker, **options)
        except BaseException:
            mesh.close()
            raise
        self._open = True
        self._process = os.getpid()
        atexit.register(self._close_at_exit)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        ownership.own(module, optimizer, _NAME)

    # Training.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's forward pass."""
        if not self._in_closure:
            self._depth = 0
            self._worker.weights.end_step()  # where the last one ended by an exception
        return self.module(*inputs, **kwargs)

    def _before_step(self, _: Optimizer, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > 1:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._worker.weights.end_step()
        if closure is None:
            self._scheme.before_step()
            self._worker.weights.begin_step()
            return None
        self._worker.weights.begin_step()
        if len(args) > 1:
            return (args[0], self._watched(closure), *args[2:]), kwargs
        return args, {**kwargs, "closure": self._watched(closure)}

    def _watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure of a step, which runs the module while the step is under way."""

        def run() -> Any:
            self._in_closure = True
            try:
                return closure()
            finally:
                self._in_closure = False

        return run

    def _after_step(self, *_: object) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._worker.weights.end_step()
        self._worker.statistics.steps += 1
        self._scheme.after_step()

    @property
    def done(self) -> bool:
        """Whether all workers together have made ``total_steps`` steps: leave the loop, and call ``finish()``."""
        return self._scheme.done.is_set()

    def finish(self) -> None:
        """End the training: wait for the other workers, and take the mean of all live workers' weights.

        A worker calls it when its data ends, or when ``done``. Those that finish first wait; meanwhile the others go
        on averaging. Afterwards the module and the optimizer are free again, as after ``close()``.
        """
        if self._open:
            self._worker.weights.end_step()
            self._scheme.finish()
            self.close()

    def close(self) -> None:
        """Leave the training as it stands: module and optimizer are free, and the other workers go on."""
        if self._open:
            self._open = False
            atexit.unregister(self._close_at_exit)
            self._worker.weights.end_step()
            for hook in self._hooks:
                hook.remove()
            ownership.disown(self.module)
            try:
                self._scheme.close()
            finally:
                self._worker.mesh.close()

    def _close_at_exit(self) -> None:
        """Leave while threads still run, unless this is a forked process: the training is its parent's."""
        if os.getpid() == self._process:
            self.close()

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Show the mean of all live workers' weights in the module, to evaluate or to save; then its own again.

        With ``scheme="ripples"`` one worker may call it alone, and the others train on. With the other schemes all
        workers call it, each the same number of times.
        """
        if not self._open:
            yield self.module
            return
        self._worker.weights.end_step()
        self._worker.weights.check_own()
        self._worker.weights.show(self._scheme.average())
        try:
            yield self.module
        finally:
            self._worker.weights.restore()

    @property
    def statistics(self) -> Statistics:
        """What this worker has done so far: steps, waits, averages, bytes."""
        return self._worker.statistics

    # Reading and writing the model as a whole.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's, with its own keys: this worker's weights. For the mean, use ``averaged()``."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the module, the same on every worker; keys may have the prefix ``module.`` of DDP."""
        self._worker.weights.end_step()
        state = dict(state_dict)
        if state and all(key.startswith("module.") for key in state) and not hasattr(self.module, "module"):
            state = {key.removeprefix("module."): value for key, value in state.items()}
        with self._worker.weights.locked():
            return self.module.load_state_dict(state, strict=strict, assign=assign)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the module alone: it takes no part in the training."""
        return copy.deepcopy(self.module, memo)


def _generator_place(
    generator: str, secret_file: str | Path | None, process_group: Any, scheme: str, total_steps: int | None
) -> GeneratorPlace:
    if process_group is not None:
        raise UsageError("give a process_group or a generator, not both: with a generator workers come and go")
    if scheme != "ripples":
        raise UsageError(f'scheme {scheme!r} needs a process group: only "ripples" runs with generator=')
    if total_steps is not None:
        raise UsageError("with generator= the steps are counted there: paceline generator --total-steps")
    file = secret_file or Config.from_environment().secret_file
    if file is None:
        raise UsageError(
            "generator= needs the job's secret: pass secret_file=, or set PACELINE_SECRET_FILE, to the file that "
            "paceline generator has made"
        )
    return GeneratorPlace(generator, read_secret(Path(file)))


def _group_mesh(process_group: Any) -> GroupMesh:
    if not dist.is_initialized():
        raise UsageError("there is no process group: call torch.distributed.init_process_group() first")
    parent = process_group if process_group is not None else dist.group.WORLD
    if parent == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError(f"this rank is not in the process group: make {_NAME} on the group's ranks only")
    return GroupMesh(parent)


def _copy_from_first(module: nn.Module, mesh: GroupMesh) -> None:
    """Give every worker the weights and buffers of the first."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, group=mesh.group, group_src=0)
            tensor.copy_(whole)
