"""``Trainer(strategy=PacelineStrategy())``: Lightning trains with ``paceline.DataParallel``.

Works with ``lightning`` and with ``pytorch_lightning``: import the one you use first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

from paceline.errors import UnsupportedError, UsageError
from paceline.train.dear.wrapper import DataParallel

_old_name = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
DDPStrategy: Any = import_module(
    ("pytorch_lightning" if _old_name else "lightning.pytorch") + ".strategies"
).DDPStrategy


class PacelineStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's DDPStrategy with ``paceline.DataParallel`` in the place of DDP::

        trainer = Trainer(accelerator="cpu", devices=2, strategy=PacelineStrategy(sharded=True))
        trainer.fit(module, batches)

    ``sharded``, ``bucket_mb``, ``tuning_file``, ``broadcast_buffers``, ``elementwise`` and ``log_overlap_every`` are
    options of DataParallel. The rest is Lightning's: ``timeout``, ``start_method``, ``process_group_backend`` (on CPUs
    "paceline" by default), ``cluster_environment``, ``precision_plugin`` and so on. The module has one optimizer, which
    may have several parameter groups.
    """

    def __init__(
        self,
        *,
        sharded: bool = False,
        bucket_mb: float | str | None = None,
        tuning_file: str | None = None,
        broadcast_buffers: bool = True,
        elementwise: bool | None = None,
        log_overlap_every: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        unknown = sorted(self._ddp_kwargs) + [
            name for name in kwargs if name.startswith(("ddp_comm", "model_averaging"))
        ]
        if unknown:
            raise UsageError(f"PacelineStrategy has no option {', '.join(unknown)}: options of DDP do not apply to it")
        self._options: dict[str, Any] = {
            "sharded": sharded,
            "bucket_mb": bucket_mb,
            "tuning_file": tuning_file,
            "broadcast_buffers": broadcast_buffers,
            "elementwise": elementwise,
            "log_overlap_every": log_overlap_every,
        }
        self._failed = False

    def _get_process_group_backend(self) -> Any:
        if self._process_group_backend is None and self.root_device.type == "cpu":
            return "paceline"
        return super()._get_process_group_backend()

    def configure_ddp(self) -> None:
        """The module is wrapped together with its optimizer, in setup_optimizers()."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the optimizer and the schedulers, and wrap module and optimizer."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise UnsupportedError(
                f"configure_optimizers() returned {len(self.optimizers)} optimizers, and PacelineStrategy serves one: "
                'put all parameters into one optimizer, as parameter groups, or use strategy="ddp"'
            )
        self._failed = False
        self.model = DataParallel(self.lightning_module, self.optimizers[0], **self._options)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication."""
        with self.model.no_sync() if isinstance(self.model, DataParallel) else nullcontext():
            yield

    def on_exception(self, exception: BaseException) -> None:
        """Other ranks may not come to the end of the training: do not wait for them."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Give module and optimizer back, with the whole state of the optimizer."""
        if isinstance(self.model, DataParallel):
            if self._failed:
                self.model._give_back()
            else:
                self.model.close()
            self.model = self.lightning_module
        super().teardown()
