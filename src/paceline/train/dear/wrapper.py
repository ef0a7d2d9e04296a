"""``paceline.DataParallel``: in the place of DistributedDataParallel, with both halves of communication hidden."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from paceline.config import Config, Shared
from paceline.errors import UnsupportedError, UsageError
from paceline.train.dear import clipping, opaque
from paceline.train.dear.buffers import Buffers
from paceline.train.dear.checks import Watch, check_sharding
from paceline.train.dear.groups import make_groups
from paceline.train.dear.joining import Joining
from paceline.train.dear.overlap import Recorder
from paceline.train.dear.partial import ELEMENTWISE, PER_PARAMETER, is_torch
from paceline.train.dear.pipeline import Pipeline
from paceline.train.dear.scaler import UNSCALE
from paceline.train.dear.takeover import Closure, TakeOver, step_elsewhere
from paceline.train.dear.tuning import Tuner, make_tuner
from paceline.train.shared import checks, ownership

_NAME = "DataParallel"
_ACCELERATE = " (with Accelerate: paceline.integrations.accelerate.prepare)"


class DataParallel(nn.Module):
    """Trains a module on all ranks of a group; the training loop stays as it is::

        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        model = paceline.DataParallel(module, optimizer)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()

    Gradients are reduce-scattered during backward() and gathered during the next forward pass, or both during
    backward() where the links have time, and the update happens as they arrive. With ``sharded=True`` each rank
    updates its part of the parameters, with its part of the optimizer's state, and the parameters are gathered.
    Any code that reads a parameter sees its new value.

    ``bucket_mb`` is how much is sent at once: a number (25 by default, or a twentieth of a model of more than 500 MB),
    or "auto" to find it while training; then ``tuning_file`` keeps it for the next time. ``elementwise=True`` vouches
    for an optimizer that is not PyTorch's own: every element is updated by itself, so that parts of a parameter can
    be. ``log_overlap_every`` logs what was hidden, every so many steps, to the logger "paceline.dear".
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        process_group: Any = None,
        *,
        device_mesh: DeviceMesh | None = None,
        sharded: bool = False,
        bucket_mb: float | str | None = None,
        tuning_file: str | Path | None = None,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        elementwise: bool | None = None,
        log_overlap_every: int = 0,
    ) -> None:
        super().__init__()
        checks.check_arguments(module, optimizer, _NAME, _ACCELERATE)
        checks.check_parameters(module, optimizer, _NAME)
        if sharded:
            check_sharding(optimizer, elementwise)
        ownership.check_free(module, f"paceline.{_NAME}")
        self.module = module
        self._groups = make_groups(process_group, device_mesh)
        self._alone = self._groups.num_ranks == 1
        self._closed = False
        self.optimizer = optimizer
        self.training = module.training
        if self._alone:
            ownership.own(module, optimizer, _NAME)
            return
        checks.check_alike(module, self._groups.reduce)
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        device = named[0][1].device
        self._joining = Joining(self._groups, device)
        self._running = Buffers(module, self._groups.reduce)
        self._broadcast_buffers = broadcast_buffers and self._running.any
        if init_sync:
            self._broadcast_module()
        self._watch = Watch(module, optimizer, sharded=sharded)
        splittable = is_torch(optimizer, ELEMENTWISE if sharded else PER_PARAMETER)
        self._whole = not sharded and not splittable
        model_bytes = sum(one.numel() * one.element_size() for _, one in named)
        tuner, deterministic = self._agreed_tuner(bucket_mb, tuning_file, model_bytes)
        self._pipe = Pipeline(
            named,
            optimizer,
            self._groups,
            tuner,
            sharded=sharded,
            at_once=not splittable,
            log_every=log_overlap_every,
            deterministic=deterministic,
        )
        self._pipe.back.before_round = self._announce_round
        self._pipe.before_step = self._watch.check
        self._opaque = opaque.Watched(self._pipe.use)
        self._opaque.watch(module)
        self._lent = TakeOver(optimizer, self._pipe, self._optimizer_steps, self.zero_grad, {UNSCALE: self._unscale})
        ownership.own(module, optimizer, _NAME)  # at last: what fails before leaves the module free

    def _broadcast_module(self) -> None:
        """Rank 0's parameters and buffers are everybody's."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                whole = parameter.detach().contiguous()
                dist.broadcast(whole, group=self._groups.reduce, group_src=0)
                parameter.copy_(whole)
        self._running.broadcast()

    def _agreed_tuner(
        self, bucket_mb: float | str | None, path: str | Path | None, model_bytes: int
    ) -> tuple[Tuner, bool]:
        """Rank 0's tuner, as only it may have the file, and whether no decision may depend on timing."""
        config = Config.from_environment()
        tuner = make_tuner(bucket_mb, path, model_bytes, may_search=self._groups.rank != 0 or not config.deterministic)
        said: list[tuple[int, bool, Shared]] = [(tuner.threshold_bytes, tuner.searching, config.shared)]
        dist.broadcast_object_list(said, group=self._groups.reduce, group_src=0)
        tuner.threshold_bytes, tuner.searching, shared = said[0]
        return tuner, config.following(shared).deterministic

    # What the optimizer's step() has become.

    def _optimizer_steps(self, step: Callable[..., Any], closure: Closure) -> Any:
        if self._whole:
            return self._step_whole(step, closure)
        return step_elsewhere(self.optimizer, step, closure, self._update)

    def _update(self) -> None:
        with self._joining.announced("step", self._hyper_parameters):
            self._set_divisor()
            self._pipe.step()

    def _step_whole(self, step: Callable[..., Any], closure: Closure) -> Any:
        """An optimizer that may look at all parameters together gets all gradients, and one call."""
        self._watch.check()
        if closure is None and not self._pipe.back.gathered:
            with self._joining.announced("gather"):
                self._pipe.gather_gradients()
        result = step() if closure is None else step(closure)
        with self._joining.announced("end"):
            self._pipe.end_whole_step()
        return result

    # Training.

    @opaque.not_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass; each bucket of parameters is awaited at its first use."""
        if self._alone and not self._closed:
            return opaque.call(self.module, inputs, kwargs)
        compiler = opaque.set_compiler(None)  # torch.compile(model) compiles the module, and nothing of ours
        try:
            self._before_forward()
            if compiler is None:
                outputs = self.module(*inputs, **kwargs)
            else:
                self._pipe.use(self.module.parameters())
                opaque.set_compiler(compiler)
                outputs = opaque.call(self.module, inputs, kwargs)
                opaque.set_compiler(None)
            self._after_forward(outputs)
        finally:
            opaque.set_compiler(compiler)
        return outputs

    def _before_forward(self) -> None:
        if self._closed:
            raise UsageError("this DataParallel is closed: call its module, or wrap that anew")
        back, trains = self._pipe.back, torch.is_grad_enabled() and self.module.training
        if trains:
            self._pipe.training_thread = threading.get_ident()
        if self._broadcast_buffers and self._running.due(back.steps, trains=trains):
            with self._joining.announced("buffers"):
                self._running.broadcast(self._joining.last_active if self._joining.entered else 0)

    def _after_forward(self, outputs: Any) -> None:
        self._running.stale = self._running.stale or self.module.training
        if torch.is_grad_enabled():
            for output in [outputs] if isinstance(outputs, torch.Tensor) else tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    cast(Any, output).register_hook(self._pipe.back.backward_begins)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only add up gradients on this rank; the next one outside sends them all."""
        if self._alone:
            yield
            return
        back = self._pipe.back
        before, back.enabled = back.enabled, False
        try:
            yield
        finally:
            back.enabled = before

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = True) -> Iterator[None]:
        """Train on as many inputs as this rank has; when they end, shadow the others until theirs do.

        Gradients are divided by the number of ranks, or of those that still have inputs. Not for optimizers that need
        all gradients in one call.
        """
        if self._alone:
            yield
            return
        if self._whole:
            raise UnsupportedError(f"join() does not serve {type(self.optimizer).__name__}: make inputs even")
        looked_out = self._pipe.looks_out
        self._joining.entered = True
        self._divide_by_active = not divide_by_initial_world_size
        try:
            yield
            self.zero_grad()  # what this rank has no inputs for, it adds nothing to
            self._pipe.looks_out = False  # iterations are the others' now
            self._joining.shadow(
                {
                    "round": self._shadow_round,
                    "reduce": lambda _: self._pipe.reduce(),
                    "gather": lambda _: self._pipe.gather_gradients(),
                    "clip": lambda details: self.clip_grad_norm_(*details),
                    "unscale": self._shadow_unscale,
                    "abandon": lambda _: self._pipe.abandon(),
                    "step": self._shadow_step,
                    "buffers": lambda _: self._running.broadcast(self._joining.last_active),
                }
            )
            self._pipe.synchronize()
            self._follow_last()
        finally:
            self._pipe.looks_out = looked_out
            self._joining.entered = False
            self._pipe.back.divisor = self._groups.num_ranks

    _divide_by_active = False

    def _set_divisor(self) -> None:
        if self._joining.entered and self._divide_by_active:
            self._pipe.back.divisor = self._joining.num_active

    def _announce_round(self) -> None:
        with self._joining.announced("round"):
            self._set_divisor()

    def _shadow_round(self, _: object) -> None:
        self._set_divisor()
        self._pipe.back.launch_rest()

    def _hyper_parameters(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    def _shadow_step(self, hyper_parameters: list[dict[str, Any]]) -> None:
        self._adopt(hyper_parameters)
        self._set_divisor()
        self._pipe.step()
        self._pipe.zero_grad()

    def _adopt(self, hyper_parameters: list[dict[str, Any]]) -> None:
        for group, hyper in zip(self.optimizer.param_groups, hyper_parameters, strict=True):
            group.update(hyper)

    def _follow_last(self) -> None:
        """All inputs are used: buffers and hyper-parameters are those of the rank that had most."""
        if self._running.any:
            self._running.broadcast(self._joining.last_active)
        said = [self._hyper_parameters()]
        dist.broadcast_object_list(said, group=self._groups.reduce, group_src=self._joining.last_active)
        self._adopt(said[0])

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients to a norm of at most ``max_norm``; returns what it was. Every rank must call it.

        The norm is that of the mean gradient of all parameters, computed from shards before the all-gather.
        """
        if self._alone or self._pipe.back.gathered:
            return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type, error_if_nonfinite)
        with self._joining.announced("clip", lambda: (max_norm, norm_type)):
            self._pipe.reduce()
            buckets = self._pipe.buckets
            with torch.no_grad():
                shards = [bucket.own(self._groups.rank) for bucket in buckets]
                norm = clipping.total_norm(shards, float(norm_type), self._groups.reduce)
                if error_if_nonfinite and not bool(torch.isfinite(norm)):
                    raise RuntimeError(
                        f"the total norm of order {norm_type} of the gradients is {norm.item()}: pass "
                        "error_if_nonfinite=False to scale by it anyway"
                    )
                clipping.scale_to([bucket.sums for bucket in buckets], norm, max_norm)
        return norm

    def _unscale(
        self, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor] | None:
        """For :class:`GradScaler`: unscale what this rank has of the means; None if they were gathered already."""
        if self._pipe.back.gathered:
            return None
        with self._joining.announced("unscale", lambda: inv_scale.item()):
            self._pipe.reduce()
            sums = [bucket.sums for bucket in self._pipe.buckets]
            if not allow_fp16 and any(one.dtype == torch.float16 for one in sums):
                raise ValueError("Attempting to unscale FP16 gradients.")  # as torch says it
            found = found_inf.to(sums[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(sums, found, inv_scale.to(sums[0].device))
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._groups.reduce)
        return {found.device: found}

    def _shadow_unscale(self, inv_scale: float) -> None:
        self._unscale(torch.tensor(inv_scale), torch.zeros(()), allow_fp16=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        if self._alone:
            self.module.zero_grad(set_to_none)
            return
        if self._pipe.back.under_way:
            with self._joining.announced("abandon"):
                self._pipe.abandon()
        self._pipe.zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Bring all parameters up to date now, rather than at their first use."""
        if not self._alone:
            self._pipe.synchronize()

    def close(self) -> None:
        """Finish what is under way, and give module and optimizer back: they can be used alone, or wrapped anew.

        Every rank must call it. Gradients that no step() has used are dropped. After an error of the process group it
        raises that error again, and gives them back as they are.
        """
        if self._closed:
            return
        try:
            if not self._alone:
                self.zero_grad()
                self.synchronize()
                self._lent.collect()
                self._groups.part()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """Give module and optimizer back as they are, without communication: after an error on one rank."""
        self._closed = True
        ownership.disown(self.module)
        if not self._alone:
            self._alone = True
            self._pipe.close()
            self._opaque.close()
            self._lent.give_back()

    @property
    def overlap(self) -> Recorder:
        """Times of the last steps: what of communication was hidden and what exposed, by bucket."""
        return Recorder(0) if self._alone else self._pipe.recorder

    @property
    def bucket_bytes(self) -> list[int]:
        """How large the buckets are, in the order of use."""
        return [] if self._alone else [bucket.size_bytes for bucket in self._pipe.buckets]

    # Reading and writing the model as a whole.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, with its own keys."""
        self.synchronize()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Into the module, the same on every rank; keys may have the prefix ``module.`` of DDP."""
        self.synchronize()
        state = dict(state_dict)
        if state and all(key.startswith("module.") for key in state) and not hasattr(self.module, "module"):
            state = {key.removeprefix("module."): value for key, value in state.items()}
        return self.module.load_state_dict(state, strict=strict, assign=assign)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module, up to date."""
        self.synchronize()
        return super().named_parameters(*args, **kwargs)

    def train(self, mode: bool = True) -> DataParallel:
        """As of any module; up to date if that changes the mode."""
        if mode != self.training:
            self.synchronize()
        return super().train(mode)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the inner module in place."""
        self.module.compile(*args, **kwargs)
        if not self._alone:
            self._opaque.watch(self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy is one of the module alone: it takes no part in the training."""
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        """Pickle the module alone."""
        self.synchronize()
        return _itself, (self.module,)


def _itself(module: nn.Module) -> nn.Module:
    return module
