"""Hugging Face's Trainer, and those made of it as TRL's are, under a policy: a callback, and arguments that bring one.

    Trainer(model, arguments, callbacks=[RecomputeCallback("auto", logits=False)], ...)
    Trainer(model, RecomputeTrainingArguments(recompute_policy="auto", recompute_kwargs={"logits": False}, ...), ...)

The policy is on the model from the beginning of ``train()`` to its end. Its paths are those of the model itself,
without what PEFT or a data-parallel wrapper puts around it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, distributed, nn
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import integration_utils

from recompute.attach import AppliedPolicy, PolicyLike, apply, module_entries
from recompute.errors import UnsupportedError, warn
from recompute.kernel_runners import is_plain_linear
from recompute.planning.profiling import allocated_nbytes, start_peak
from recompute.policy.document import validate
from recompute.policy.loading import load_policy
from recompute.policy.matching import assign
from recompute.policy.model import Policy, Rule

logger = logging.getLogger(__name__)

_NAME = "recompute"
"""Under which the Trainer finds the callback among those that it reports to."""


class _Options(BaseModel):
    """What ``RecomputeCallback`` takes beside the policy: the keys of ``recompute_kwargs``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    kernels: bool | None = None
    logits: bool | None = None
    logs: bool = True


class RecomputeCallback(TrainerCallback):
    """Puts the Trainer's model under ``policy`` while it trains.

    policy: what ``recompute.apply`` takes: a preset's name, a path, a mapping or a ``Policy``.
    kernels: whether kernels stand in where they compute what a module does (True), or hooks regenerate everything
        (False); None for what each rule of the policy says (``via``).
    logits: False to compute the loss without logits, through linear + cross-entropy; True to have them in training;
        None for what the policy says. Without gradients, and in ``eval()`` mode, they are always there.
    logs: whether to add to the Trainer's logs, all since the log before:
        ``recompute_dropped_nbytes`` and ``recompute_kept_nbytes``, of a forward, on average, as ``stats()`` counts;
        ``token_accuracy`` of the last step and ``mean_token_accuracy`` of all of them, over all tokens of a step and of
        all devices, where the loss goes without logits;
        ``recompute_held_nbytes``, the most that a forward left, and ``recompute_peak_nbytes``, the most since training
        began, both on the device with the most; on CUDA alone.

    What runs before it in the list of callbacks does not see these in ``on_log``. ``state.log_history`` has them.

    Raises ``PolicyError`` for a bad policy or option, and, when the Trainer is made or begins to train,
    ``UnsupportedError`` where its other arguments would fight the policy.

    Should training end with an exception, the policy goes with the next ``train()``, with ``remove()``, or at the end
    of ``with RecomputeCallback(...) as callback:``.
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
        self._options = validate(_Options, given, label=type(self).__name__)
        self._is_in_arguments = False
        self.handle: AppliedPolicy | None = None
        """Of the policy, while it is on the model."""
        self._undo: list[Callable[[], None]] = []
        self._forwards = 0
        """Since the log before."""

    def remove(self) -> None:
        """Take the policy off the model, if it is on one."""
        for undo in reversed(self._undo):
            undo()
        self._undo, self.handle = [], None

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
        bare = _bare(model)
        _refuse_checkpointing_model(bare)
        handle = apply(bare, _adapted(self.policy, bare, self._options))
        self.handle = handle
        self._undo.append(handle.remove)
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._meter, self._memory = _TokenMeter(), _Memory(self._device)
        self._goes_without_logits = self._observes and handle.observe_losses(self._meter)
        if self._options.logs:
            self._undo.append(self._memory.watch(model))
        self._forwards, self._before = 0, handle.stats()
        logger.info("%r, until training ends", handle)

    @property
    def _observes(self) -> bool:
        return self._options.logs or self._options.logits is False

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After each backward of a step but the last."""
        self._forwards += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.handle is None:
            return
        self._forwards += 1
        if self._options.logits is False and self._meter.step is None and self._meter.total is None:
            warn(
                "logits=False has no effect: no cross-entropy was computed from the output of the model's head. Have "
                "the model compute its loss from `labels` (a `compute_loss_func` is given logits, and TRL's fused head "
                "goes without them by itself), or drop logits=False."
            )
            self._options = self._options.model_copy(update={"logits": None})  # said once
        self._meter.end_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if self.handle is None or not self._options.logs or logs is None or "loss" not in logs or not self._forwards:
            return
        found: dict[str, float] = {}
        before, now = self._before, self.handle.stats()
        if now.frames > before.frames:  # none ran in compiled code, of which the compiler alone knows
            found["recompute_dropped_nbytes"] = (now.dropped_nbytes - before.dropped_nbytes) // self._forwards
            found["recompute_kept_nbytes"] = (now.kept_nbytes - before.kept_nbytes) // self._forwards
        self._forwards, self._before = 0, now
        if self._goes_without_logits:
            found |= self._meter.accuracies(self._device)
        found |= self._memory.largest()
        for key, value in found.items():
            logs.setdefault(key, value)
            if state.log_history:
                state.log_history[-1].setdefault(key, value)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.remove()

    def _refuse(self, args: Any) -> None:
        if not self._is_in_arguments and getattr(args, "recompute_policy", None) is not None:
            raise UnsupportedError(
                "the Trainer has two policies: that of a RecomputeCallback among its callbacks, and that of "
                "recompute_policy in its arguments. Drop either."
            )
        refuse_arguments(args, self._options.logits)


class _CallbackOfArguments(RecomputeCallback):
    """What the Trainer makes by itself for ``recompute_policy``: it learns the policy when it sees the arguments."""

    def __init__(self) -> None:
        super().__init__("none")
        self._is_in_arguments = True

    def _refuse(self, args: Any) -> None:
        self.policy = load_policy(args.recompute_policy)
        self._options = _options_of(args)
        super()._refuse(args)


@dataclass
class RecomputeArguments:
    """Brings a policy along with any training arguments that it is mixed into, TRL's for one.

        @dataclass
        class MyConfig(RecomputeArguments, SFTConfig): ...

    The Trainer then needs no callback: it makes one, before those that report.
    """

    if TYPE_CHECKING:  # what this is mixed into has these
        ddp_find_unused_parameters: bool | None = None
        report_to: str | list[str] | None = None

    recompute_policy: dict | str | None = field(
        default=None,
        metadata={"help": "The policy to train under: a preset's name, a file's path, or a policy as a mapping."},
    )
    recompute_kwargs: dict | str | None = field(
        default=None,
        metadata={"help": "What RecomputeCallback takes beside the policy: kernels, logits and logs, as a mapping."},
    )

    def __post_init__(self) -> None:
        """Raises ``PolicyError`` for a bad policy or option, ``UnsupportedError`` where other arguments fight it."""
        for key in ("recompute_policy", "recompute_kwargs"):
            if isinstance(value := getattr(self, key), str) and value.startswith("{"):  # on the command line
                setattr(self, key, json.loads(value))
        options = _options_of(self)
        if self.recompute_policy is not None:
            load_policy(self.recompute_policy)
            if options.logits is False and getattr(self, "ddp_find_unused_parameters", None) is None:
                self.ddp_find_unused_parameters = False  # as the Trainer does beside its own checkpointing
        elif self.recompute_kwargs:
            raise UnsupportedError(
                f"recompute_kwargs is {self.recompute_kwargs!r}, and recompute_policy, which alone switches it on, is "
                "None. Give a policy ('elementwise', 'auto', a file's path), or drop recompute_kwargs."
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


def _register() -> None:
    integration_utils.INTEGRATION_TO_CALLBACK[_NAME] = _CallbackOfArguments


def _options_of(args: Any) -> _Options:
    return validate(_Options, args.recompute_kwargs or {}, label="recompute_kwargs")


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
                f"{key}=True runs every layer again as a whole, and leaves a policy nothing to choose. Set {key}=False "
                f"(TRL turns it on by default; the policy 'full' does the same), {drop_policy}."
            )
    sharding = getattr(args, "fsdp_config", None)
    if isinstance(sharding, dict) and str(sharding.get("activation_checkpointing", False)).lower() == "true":
        raise UnsupportedError(
            "activation_checkpointing in fsdp_config runs every layer again as a whole, and leaves a policy nothing to "
            f"choose. Take it out of fsdp_config, {drop_policy}."
        )
    if is_set("use_liger_kernel"):
        raise UnsupportedError(
            "use_liger_kernel=True replaces the modules that a policy's kernels stand in for, and what its hooks would "
            f"see. Set use_liger_kernel=False (kernels=True and logits=False do the same and more), {drop_policy}."
        )
    if logits is not False:
        return
    if getattr(args, "label_smoothing_factor", 0.0):
        raise UnsupportedError(
            f"label_smoothing_factor={args.label_smoothing_factor} has the Trainer compute the loss from whole logits, "
            "and logits=False goes without. Drop either."
        )
    if is_set("torch_compile"):
        raise UnsupportedError(
            "logits=False: torch_compile=True compiles the model with its loss, which is then computed from whole "
            "logits. Drop either."
        )
    if getattr(args, "n_gpu", 1) > 1:
        raise UnsupportedError(
            f"logits=False: DataParallel over {args.n_gpu} GPUs gathers all that the model returns, logits too. Start "
            "one process a GPU (`torchrun --nproc-per-node`), or drop logits=False."
        )
    is_ddp = getattr(args, "world_size", 1) > 1 and not is_set("fsdp") and not is_set("deepspeed")
    if is_ddp and getattr(args, "ddp_find_unused_parameters", None) is not False:
        raise UnsupportedError(
            "logits=False under DistributedDataParallel needs ddp_find_unused_parameters=False in the training "
            "arguments (the default is True): to find them it copies all that the model returns, logits too. Set it, "
            "or drop logits=False."
        )


def _refuse_checkpointing_model(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise UnsupportedError(
                f"{type(model).__name__} has its own checkpointing on (in {path or 'the model'}): it runs every layer "
                "again as a whole, and leaves a policy nothing to choose. Call model.gradient_checkpointing_disable(), "
                "or drop the policy (RecomputeCallback, or recompute_policy)."
            )


def _bare(model: nn.Module) -> nn.Module:
    """The model that was written as one: without what wraps it for parallelism or adapters."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # of torch.compile
            model = inner
        elif callable(get := getattr(model, "get_base_model", None)):  # of PEFT
            return get()
        else:
            return model


def _adapted(policy: Policy, model: nn.Module, options: _Options) -> Policy:
    """``policy`` as the options would have it for this model."""
    rules = list(policy.rules)
    if options.kernels is not None:
        via = "auto" if options.kernels else "hook"
        rules = [rule.model_copy(update={"via": via}) if rule.action == "recompute" else rule for rule in rules]
    if options.logits is not None:
        path = _path_of_head(model, options.logits)
        if path is None:
            return policy.model_copy(update={"rules": tuple(rules)})
        governed = assign(policy, module_entries(model, type(model).__name__)[0])
        index = governed.get(path)
        if not options.logits or index is not None:
            if index is not None and list(governed.values()).count(index) == 1:  # a rule for the head alone
                del rules[index]
            rules.insert(0, Rule(match=path, action="recompute", via="hook" if options.logits else "kernel"))
    return policy.model_copy(update={"rules": tuple(rules)})


def _path_of_head(model: nn.Module, logits: bool) -> str | None:
    """Of the Linear that makes logits. Raises ``UnsupportedError`` where there is none to go without."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    path = next((path for path, module in model.named_modules() if module is head), None)
    if not logits and (path is None or not is_plain_linear(head)):
        found = "no output embeddings" if head is None else f"{type(head).__name__} at {path!r}, or hooks on it"
        raise UnsupportedError(
            f"logits=False: expected a language model whose head is a plain nn.Linear; {type(model).__name__} has "
            f"{found}. Take the adapter or the hook off the head (in PEFT: no 'lm_head' in target_modules or "
            "modules_to_save), or drop logits=False."
        )
    return path


class _TokenMeter:
    """Counts tokens, and those whose arg-max is the target, where they are: nothing waits for the device."""

    def __init__(self) -> None:
        self.step: Tensor | None = None
        """(right, all) of the step under way, int64."""
        self.last: Tensor | None = None
        self.total: Tensor | None = None

    def __call__(self, argmax: Tensor, target: Tensor, ignore_index: int) -> None:
        counts = target != ignore_index
        found = torch.stack([((argmax == target) & counts).sum(), counts.sum()])
        self.step = found if self.step is None else self.step + found.to(self.step.device)

    def end_step(self) -> None:
        if self.step is not None:
            self.total = self.step if self.total is None else self.total + self.step
            self.last, self.step = self.step, None

    def accuracies(self, device: torch.device) -> dict[str, float]:
        """Of the last step and of all since this was last asked for, over the tokens of all ranks, which all ask."""
        none = torch.zeros(2, dtype=torch.int64, device=device)
        counts = torch.cat([none if each is None else each.to(device) for each in (self.last, self.total)])
        self.last = self.total = None
        last_right, last, right, every = _over_ranks(counts, distributed.ReduceOp.SUM).tolist()
        found = {"token_accuracy": (last_right, last), "mean_token_accuracy": (right, every)}
        return {key: part / whole for key, (part, whole) in found.items() if whole}


class _Memory:
    """What forwards leave on a device, and the most that was there; nothing where no allocator counts."""

    def __init__(self, device: torch.device):
        self._device = device
        self._before = self._held = 0

    def watch(self, model: nn.Module) -> Callable[[], None]:
        """Look before and after each of the model's forwards in training, until what is returned is called."""
        if allocated_nbytes(self._device) is None:
            return lambda: None
        start_peak(self._device)
        before = model.register_forward_pre_hook(lambda *_: self._look(ends=False))
        after = model.register_forward_hook(lambda *_: self._look(ends=model.training))

        def stop() -> None:
            before.remove()
            after.remove()

        return stop

    def _look(self, *, ends: bool) -> None:
        found = allocated_nbytes(self._device)
        now = 0 if found is None else found[0]
        if ends:
            self._held = max(self._held, now - self._before)
        self._before = now

    def largest(self) -> dict[str, float]:
        """Of all ranks, which all ask."""
        found = allocated_nbytes(self._device)
        if found is None:
            return {}
        nbytes = torch.tensor([self._held, found[1]], device=self._device)
        held, peak = _over_ranks(nbytes, distributed.ReduceOp.MAX).tolist()
        self._held = 0
        return {"recompute_held_nbytes": held, "recompute_peak_nbytes": peak}


def _over_ranks(values: Tensor, operation: Any) -> Tensor:
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(values, operation)
    return values
