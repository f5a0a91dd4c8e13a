"""Hugging Face's Trainer, and others made of it such as TRL's, under a policy: a callback, and arguments that make one.

    Trainer(model, arguments, callbacks=[RecomputeCallback("auto", logits=False)], ...)
    Trainer(model, RecomputeTrainingArguments(recompute_policy="auto", recompute_kwargs={"logits": False}, ...), ...)

The policy is on the model from the beginning of ``train()`` to its end. Its paths are those of the model inside of
PEFT's and data-parallel wrappers. FSDP2 and DeepSpeed's ZeRO have prepared it by then.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import integration_utils

from recompute.attach.apply import PolicyLike
from recompute.compiled.under_torch_compile import unwrapped
from recompute.errors import UnsupportedError
from recompute.integrations.training import HoldsPolicy, Options, PolicyInTraining
from recompute.policy.document import validate
from recompute.policy.loading import load_policy
from recompute.substitution.lazy_tensors import LazyTensor

logger = logging.getLogger(__name__)

_NAME = "recompute"
"""The Trainer finds the callback by this name among those that it reports to."""

_ADVICE = (
    "Have the model compute its loss from `labels`, or write it as functions of the logits that kernels compute, as "
    "`log_softmax` and `gather` (the handle's `explain()` says which others had them made)"
)


class RecomputeCallback(HoldsPolicy, TrainerCallback):
    """Puts the Trainer's model under ``policy`` while it trains.

    policy: as ``recompute.apply`` takes it: a preset's name, a path, a mapping or a ``Policy``.
    kernels, logits: as ``integrations.training.Options`` explains them.
    logs: whether to add the figures of ``Options`` to the Trainer's logs. Callbacks that run before this one do not see
        these in ``on_log``. ``state.log_history`` has them.

    Raises ``PolicyError`` for a bad policy or option, and, when the Trainer is made or begins to train,
    ``UnsupportedError`` where its other arguments would fight the policy.

    If training ends with an exception, the policy stays on the model until the next ``train()``, ``remove()``, or the
    end of ``with RecomputeCallback(...) as callback:``.
    """

    def __init__(
        self,
        policy: PolicyLike = "elementwise",
        *,
        kernels: bool | None = None,
        logits: bool | None = None,
        logs: bool = True,
    ):
        self.policy = load_policy(policy)
        given = {"kernels": kernels, "logits": logits, "logs": logs}
        self._options = validate(Options, given, label=type(self).__name__)
        self._is_in_arguments = False

    def __enter__(self) -> RecomputeCallback:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._refuse(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._refuse(args)
        self.remove()
        model: nn.Module = given["model"]
        if getattr(args, "torch_compile", False):
            _refuse_cache(model)
        self._training = PolicyInTraining(unwrapped(model), self.policy, self._options, _ADVICE)
        self._training.undo += [self._training.memory.watch(model), _keep_lazy_in_trl()]
        logger.info("%r, until training ends", self.handle)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer calls this after each backward of a step except the last one."""
        if self._training is not None:
            self._training.end_forward()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._training is not None:
            self._training.end_forward()
            self._training.end_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if self._training is None or not self._options.logs or logs is None or "loss" not in logs:
            return
        for key, value in self._training.logs().items():
            logs.setdefault(key, value)
            if state.log_history:
                state.log_history[-1].setdefault(key, value)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.remove()

    def _refuse(self, args: Any) -> None:
        if not self._is_in_arguments and getattr(args, "recompute_policy", None) is not None:
            raise UnsupportedError(
                "the Trainer has two policies: a RecomputeCallback among its callbacks, and recompute_policy in its "
                "arguments. Drop one of them."
            )
        refuse_arguments(args, self._options.logits)


class _CallbackOfArguments(RecomputeCallback):
    """The callback that the Trainer itself makes for ``recompute_policy``.

    The Trainer gives it no policy: it finds that in the training arguments, which it sees later.
    """

    def __init__(self) -> None:
        super().__init__("none")
        self._is_in_arguments = True

    def _refuse(self, args: Any) -> None:
        self.policy = load_policy(args.recompute_policy)
        self._options = _options_of(args)
        super()._refuse(args)


@dataclass
class RecomputeArguments:
    """Adds a policy to the training arguments that it is mixed into, such as TRL's.

        @dataclass
        class MyConfig(RecomputeArguments, SFTConfig): ...

    The Trainer then makes the callback by itself, and puts it before those that report.
    """

    if TYPE_CHECKING:  # the class that this is mixed into has these
        ddp_find_unused_parameters: bool | None = None
        report_to: str | list[str] | None = None

    recompute_policy: dict | str | None = field(
        default=None,
        metadata={"help": "The policy to train under: a preset's name, a file's path, or a policy as a mapping."},
    )
    recompute_kwargs: dict | str | None = field(
        default=None,
        metadata={"help": "RecomputeCallback's other options: kernels, logits and logs, as a mapping."},
    )

    def __post_init__(self) -> None:
        """Raises ``PolicyError`` for a bad policy or option, ``UnsupportedError`` where other arguments fight it."""
        for key in ("recompute_policy", "recompute_kwargs"):
            if isinstance(value := getattr(self, key), str) and value.startswith("{"):  # JSON from the command line
                setattr(self, key, json.loads(value))
        options = _options_of(self)
        if self.recompute_policy is not None:
            load_policy(self.recompute_policy)
            if options.logits is False and getattr(self, "ddp_find_unused_parameters", None) is None:
                self.ddp_find_unused_parameters = False  # the Trainer does so, too, for its own checkpointing
        elif self.recompute_kwargs:
            raise UnsupportedError(
                f"recompute_kwargs is {self.recompute_kwargs!r}, but recompute_policy is None, so it has no effect. "
                "Set recompute_policy ('elementwise', 'auto', a file's path), or drop recompute_kwargs."
            )
        super().__post_init__()  # type: ignore[misc]  # of the arguments that this is mixed into
        if self.recompute_policy is not None:
            refuse_arguments(self, options.logits)
            _register()
            reports: Any = getattr(self, "report_to", None) or []
            self.report_to = [_NAME, *(each for each in reports if each != _NAME)]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _register()


@dataclass
class RecomputeTrainingArguments(RecomputeArguments, TrainingArguments):
    """``TrainingArguments`` with ``recompute_policy`` and ``recompute_kwargs``.

    From Python, YAML, JSON or the command line (``HfArgumentParser``), where a mapping is written as JSON. Raises as
    ``RecomputeCallback`` does, when made.
    """


def _keep_lazy_in_trl() -> Callable[[], None]:
    """Keep TRL's functions from giving lazy logits to a kernel of theirs. Returns a function that ends this."""
    utils, name = sys.modules.get("trl.trainer.utils"), "_supports_trl_loss_kernel"
    supports = getattr(utils, name, None)
    if supports is None:
        return lambda: None

    def supports_made(logits: Any, *args: Any, **kwargs: Any) -> bool:
        return not (isinstance(logits, LazyTensor) and logits.is_lazy) and supports(logits, *args, **kwargs)

    setattr(utils, name, supports_made)
    return lambda: setattr(utils, name, supports)


def _register() -> None:
    integration_utils.INTEGRATION_TO_CALLBACK[_NAME] = _CallbackOfArguments


def _options_of(args: Any) -> Options:
    return validate(Options, args.recompute_kwargs or {}, label="recompute_kwargs")


def refuse_arguments(args: Any, logits: bool | None) -> None:
    """Raise ``UnsupportedError`` where training arguments would fight a policy, and say which to drop.

    args: a ``TrainingArguments``, or what has some of its attributes.
    """

    def is_set(name: str) -> bool:
        return bool(getattr(args, name, None))

    drop_policy = "or drop the policy (RecomputeCallback, or recompute_policy)"
    for key in ("gradient_checkpointing", "activation_checkpointing"):  # its name until transformers 5.22, and since
        if is_set(key):
            raise UnsupportedError(
                f"{key}=True runs every layer again as a whole, so a policy has no effect. Set {key}=False (TRL turns "
                f"it on by default; the policy 'full' does the same), {drop_policy}."
            )
    sharding = getattr(args, "fsdp_config", None)
    if isinstance(sharding, dict) and str(sharding.get("activation_checkpointing", False)).lower() == "true":
        raise UnsupportedError(
            "activation_checkpointing in fsdp_config runs every layer again as a whole, so a policy has no effect. "
            f"Remove it from fsdp_config, {drop_policy}."
        )
    if is_set("use_liger_kernel"):
        raise UnsupportedError(
            "use_liger_kernel=True replaces the modules that a policy would act on. Set use_liger_kernel=False "
            f"(kernels=True and logits=False do the same and more), {drop_policy}."
        )
    if logits is not False:
        return
    if getattr(args, "label_smoothing_factor", 0.0):
        raise UnsupportedError(
            f"label_smoothing_factor={args.label_smoothing_factor} makes the Trainer compute the loss from logits, "
            "which logits=False leaves out. Drop one of the two."
        )
    if is_set("torch_compile"):
        raise UnsupportedError(
            "torch_compile=True compiles the model with its loss, which is then computed from logits, and logits=False "
            "leaves these out. Drop one of the two."
        )
    if getattr(args, "n_gpu", 1) > 1:
        raise UnsupportedError(
            f"logits=False: DataParallel over {args.n_gpu} GPUs gathers all outputs of the model, logits too. Start "
            "one process for each GPU (`torchrun --nproc-per-node`), or drop logits=False."
        )
    is_ddp = getattr(args, "world_size", 1) > 1 and not is_set("fsdp") and not is_set("deepspeed")
    if is_ddp and getattr(args, "ddp_find_unused_parameters", None) is not False:
        raise UnsupportedError(
            "logits=False under DistributedDataParallel needs ddp_find_unused_parameters=False in the training "
            "arguments. With True, the default, all outputs of the model are copied, logits too. Set it, or drop "
            "logits=False."
        )


def _refuse_cache(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    of_text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "use_cache", False) or getattr(of_text, "use_cache", False):
        raise UnsupportedError(
            f"torch_compile=True: {type(model).__name__} writes to a key/value cache (use_cache=True in its config, or "
            "in the training arguments), so compiled layers cannot run again. Set use_cache=False in both, or drop "
            "torch_compile or the policy (RecomputeCallback, or recompute_policy)."
        )
