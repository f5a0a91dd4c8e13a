"""Lightning's Trainer under a policy: a callback.

    Trainer(callbacks=[RecomputeCallback("auto", logits=False)], ...).fit(module, ...)

The policy is on the LightningModule, or on a part of it, from the start of ``fit`` to its end, also if that is an
exception. ``validate``, ``test`` and ``predict`` run without it, and so do searches for a batch size or a learning rate
before the first step (``BatchSizeFinder``, ``LearningRateFinder``).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from recompute.attach.apply import PolicyLike
from recompute.attach.runners import RootRunner
from recompute.compiled.under_torch_compile import unwrapped
from recompute.engine.checkpoint.module_state import RUNNER
from recompute.errors import UnsupportedError
from recompute.integrations.training import HoldsPolicy, Options, PolicyInTraining
from recompute.policy.document import nearest, validate
from recompute.policy.loading import load_policy

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import FSDPStrategy, Strategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{__name__} needs Lightning, and there is no module {error.name}: pip install 'torch-recompute[lightning]'",
        name=error.name,
    ) from error

logger = logging.getLogger(__name__)

_ADVICE = "Have training_step compute the loss by F.cross_entropy or the model's own `labels`, from the head's output"


class RecomputeCallback(HoldsPolicy, Callback):
    """Puts the Trainer's LightningModule under ``policy`` while ``fit`` runs.

    policy: as ``recompute.apply`` takes it: a preset's name, a path, a mapping or a ``Policy``. Its paths are those of
        the LightningModule's modules: for a model in ``self.model`` "model.layers.0" or, at any depth, "**.layers.*".
    module: the path of the LightningModule's part that is to be under the policy ("model"). The policy's paths are then
        those of this part, as without Lightning.
    kernels, logits: as ``integrations.training.Options`` explains them.
    logs: whether to log the figures of ``Options``, by the LightningModule's ``log_dict``, when the Trainer logs.
        ``recompute_held_nbytes`` is the most that a ``training_step`` left, less the gradients that it freed, where it
        runs backward itself.

    Raises ``PolicyError`` for a bad policy or option, and, when ``fit`` begins, ``UnsupportedError`` where the strategy
    or the model would fight the policy.
    """

    def __init__(
        self,
        policy: PolicyLike = "elementwise",
        *,
        module: str | None = None,
        kernels: bool | None = None,
        logits: bool | None = None,
        logs: bool = True,
    ):
        self.policy = load_policy(policy)
        self.module = module
        given = {"kernels": kernels, "logits": logits, "logs": logs}
        self._options = validate(Options, given, label=type(self).__name__)
        self._has_stepped = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # now, since later the strategy has wrapped the modules
            _refuse_strategy(trainer.strategy)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.remove()
        is_compiled = pl_module._compiler_ctx is not None
        if is_compiled and self._options.logits is False:
            raise UnsupportedError(
                "logits=False: the LightningModule is compiled with its loss, which is then computed from logits. "
                "Pass the module that is not compiled to fit, or drop logits=False."
            )
        target = _part_of(pl_module, self.module)
        self._training = PolicyInTraining(target, self.policy, self._options, _ADVICE)
        root = vars(target).get(RUNNER)
        if isinstance(root, RootRunner) and not is_compiled:
            self._training.undo.append(_run_training_step_in(root, pl_module))
        self._training.undo.append(_forward_left_behind(pl_module))
        self._has_stepped = False
        logger.info("%r, until fit ends", self.handle)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._training is not None:
            self._training.memory.look(ends=False)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Lightning calls this between ``training_step`` and backward, if it frees gradients there."""
        if self._training is not None:
            self._training.memory.look(ends=True)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._training is not None:
            self._training.memory.look(ends=True)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._has_stepped = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._training is None:
            return
        self._training.end_forward()
        if not self._has_stepped and pl_module.automatic_optimization:  # gradients are being accumulated
            return
        self._has_stepped = False
        self._training.end_step()
        # Lightning's own monitors ask this, too: it drops figures that are logged at other steps.
        if self._options.logs and not trainer.barebones and trainer._logger_connector.should_update_logs:
            found = {
                key: torch.tensor(float(value), dtype=torch.float64) for key, value in self._training.logs().items()
            }
            pl_module.log_dict(found, on_step=True, on_epoch=False, batch_size=1)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.remove()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A tuner that ends ``fit`` calls this and not ``on_fit_end``."""
        self.remove()


def _refuse_strategy(strategy: Strategy) -> None:
    if not isinstance(strategy, FSDPStrategy):
        return
    if strategy._activation_checkpointing_kwargs:
        raise UnsupportedError(
            "activation_checkpointing_policy of FSDPStrategy runs every module that it names again as a whole, so a "
            "policy has no effect there. Drop it, and use ModelParallelStrategy and fully_shard (FSDP2) in place of "
            "FSDPStrategy; or drop the RecomputeCallback."
        )
    raise UnsupportedError(
        "FSDPStrategy shards by FSDP1, whose wrappers hide the model's modules and their names from a policy. Use "
        "ModelParallelStrategy and fully_shard in configure_model (FSDP2), DDPStrategy, or drop the RecomputeCallback."
    )


def _part_of(module: LightningModule, path: str | None) -> nn.Module:
    """The module that is to be under the policy."""
    if path is None:
        return module
    paths = dict(module.named_modules())
    if path not in paths:
        raise UnsupportedError(
            f"module={path!r}: expected the path of a module of {type(module).__name__}{nearest(path, paths)}; it has "
            f"{', '.join(repr(name) for name, _ in module.named_children()) or 'none'}."
        )
    return unwrapped(paths[path])


def _run_training_step_in(root: RootRunner, module: LightningModule) -> Callable[[], None]:
    """Have ``training_step`` open the scope that a model's forward opens, since it may call parts of the model alone.

    Returns a function that undoes this.
    """
    step = module.training_step
    before = vars(module).get("training_step")
    scope = RootRunner(root.statistics)

    @functools.wraps(step)
    def training_step(self: LightningModule, *args: Any, **kwargs: Any) -> Any:
        # A copy of the LightningModule has this function, too, and has to run a training_step of its own.
        inner = step if self is module else functools.partial(type(self).training_step, self)
        return scope.run(self, inner, args, kwargs)

    module.__dict__["training_step"] = MethodType(training_step, module)

    def undo() -> None:
        if before is None:
            module.__dict__.pop("training_step", None)
        else:
            module.__dict__["training_step"] = before

    return undo


def _forward_left_behind(module: LightningModule) -> Callable[[], None]:
    """Returns a function that removes the forward that DDPStrategy leaves on the instance.

    It replaces forward for a while, and puts it back by setting the class's forward on the instance.
    """
    ours = type(module).forward

    def undo() -> None:
        if getattr(vars(module).get("forward"), "__func__", None) is ours:
            del module.__dict__["forward"]

    return undo
