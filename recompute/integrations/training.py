"""The shared parts of trainers' callbacks: they put a policy on a model while it trains, and log its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, distributed, nn

from recompute.attach.apply import AppliedPolicy, apply
from recompute.attach.module_entries import module_entries
from recompute.attach.own_checkpointing import find_checkpointing, how_to_turn_off, said_of
from recompute.counters import allocated_nbytes, start_peak
from recompute.errors import UnsupportedError, warn
from recompute.policy.matching import assign
from recompute.policy.rules import Policy, Rule
from recompute.substitution.head import is_head, why_no_head


class Options(BaseModel):
    """The options of a ``RecomputeCallback`` beside the policy.

    kernels: True for kernels wherever they can stand in, False for hooks alone; None: as each rule says (``via``).
    logits: False to compute the loss without logits, by a kernel, which rounds in its own way whatever the policy; True
        to have them in training; None: as the policy says. They are made where other code reads them, as in evaluation.
    logs: whether to add figures to the trainer's logs, of the steps since the log before:

        - ``recompute_eager_nbytes`` (held without the policy), ``recompute_kept_nbytes`` (held with it),
          ``recompute_dropped_nbytes`` and ``recompute_regenerated_nbytes``: means over forwards with their backwards,
          as ``stats()`` counts.
        - ``token_accuracy`` of the last step and ``mean_token_accuracy`` of all these steps, over the tokens of all
          devices. Only where the loss goes without logits.
        - ``recompute_held_nbytes``, the most that a forward left, and ``recompute_peak_nbytes``, the most since
          training began. Both are those of the device with the most. On CUDA alone.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    kernels: bool | None = None
    logits: bool | None = None
    logs: bool = True


class PolicyInTraining:
    """A policy on a model until ``remove()``, and its figures since ``logs()`` was last called.

    model: trains on one device.
    policy: the user's. Where ``options`` say otherwise, they count.
    advice: how to compute the loss for ``logits=False`` to have an effect. A warning says so if it has none.

    Raises ``UnsupportedError`` where the model's own checkpointing is on, or where ``logits=False`` finds no head that
    can go without logits; and what ``apply`` raises.
    """

    def __init__(self, model: nn.Module, policy: Policy, options: Options, advice: str):
        if found := find_checkpointing(model):
            raise UnsupportedError(
                f"{said_of(found, type(model).__name__)} {how_to_turn_off(found)}, or drop the policy "
                "(RecomputeCallback, or recompute_policy)."
            )
        self.handle = apply(model, _adapted(policy, model, options))
        self.undo: list[Callable[[], None]] = [self.handle.remove]
        """``remove()`` calls these, last first."""
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.memory = Memory(self._device, watches=options.logs)
        self._options, self._advice = options, advice
        self._meter = TokenMeter()
        observes = options.logs or options.logits is False
        self._goes_without_logits = observes and self.handle.observe_losses(self._meter, self._meter.read_logits)
        self._forwards, self._before = 0, self.handle.stats()

    def remove(self) -> None:
        for undo in reversed(self.undo):
            undo()

    def end_forward(self) -> None:
        """Call this after each forward that is trained on, and its backward."""
        self._forwards += 1

    def end_step(self) -> None:
        """Call this after the last of the forwards whose gradients one step of the optimizer takes."""
        if self._options.logits is False and self._meter.reads_logits:
            why = "the logits were read, but no loss that kernels compute was computed from them"
            if self._meter.has_losses:
                why = "code beside the loss read the logits, so they were computed"
            warn(f"logits=False has no effect: {why}. {self._advice}, or drop logits=False.")
            self._options = self._options.model_copy(update={"logits": None})  # so that it is said once
        self._meter.end_step()

    def logs(self) -> dict[str, float]:
        """Bytes and token accuracies by the keys that the callbacks document; nothing where no forward has ended.

        Either all ranks call this or none, as they exchange their counts.
        """
        if not self._forwards:
            return {}
        found: dict[str, float] = {}
        now = self.handle.stats()
        between = now - self._before
        if between.frames:  # there are none in compiled code, where the compiler decides what to save
            for what in ("eager", "dropped", "kept", "regenerated"):
                found[f"recompute_{what}_nbytes"] = getattr(between, f"{what}_nbytes") // self._forwards
        self._forwards, self._before = 0, now
        if self._goes_without_logits:
            found |= self._meter.accuracies(self._device)
        return found | self.memory.largest()


class HoldsPolicy:
    """A callback that puts a policy on a model, and takes it off again."""

    _training: PolicyInTraining | None = None

    @property
    def handle(self) -> AppliedPolicy | None:
        """The policy's handle while it is on the model; else None."""
        return None if self._training is None else self._training.handle

    def remove(self) -> None:
        """Take the policy off the model, if it is on one."""
        if self._training is not None:
            self._training.remove()
            self._training = None


def _adapted(policy: Policy, model: nn.Module, options: Options) -> Policy:
    """``policy`` as the options would have it for this model."""
    rules = list(policy.rules)
    if options.kernels is not None:
        via = "auto" if options.kernels else "hook"
        rules = [rule.model_copy(update={"via": via}) if rule.action == "recompute" else rule for rule in rules]
    if options.logits is not None and (paths := _paths_of_head(model, options.logits)):
        governed = assign(policy, module_entries(model, type(model).__name__)[0])
        index = governed.get(paths[0])
        if not options.logits or index is not None:
            if index is not None and {path for path, rule in governed.items() if rule == index} <= {*paths}:
                del rules[index]  # it is for the head alone
            rules.insert(0, Rule(match=paths, action="recompute", via="hook" if options.logits else "kernel"))
    return policy.model_copy(update={"rules": tuple(rules)})


def _paths_of_head(model: nn.Module, logits: bool) -> list[str]:
    """The path of the Linear that makes logits, and those of an adapter's parts on it; none if there is no head.

    Raises ``UnsupportedError`` for several, or, if there are to be no logits, where no plain Linear makes them.
    """
    names = {module: path for path, module in model.named_modules()}
    heads = {names[head]: head for head in _heads(model) if head in names}
    if len(heads) > 1:
        raise UnsupportedError(
            f"logits={logits}: expected one head; {type(model).__name__} has {', '.join(map(repr, heads))}. If the "
            "callback takes a `module`, name the part of the model with the head that you mean. Or drop logits, and "
            "give the head a rule in the policy."
        )
    path, head = next(iter(heads.items()), (None, None))
    if path is None or head is None or is_head(head):
        paths = [] if path is None else [path]
    else:
        entries, modules = module_entries(model, type(model).__name__)
        paths = [each.path for each in entries if each.is_head and each.path.startswith(f"{path}.")] or [path]
        paths = paths if logits or all(is_head(modules[each]) for each in paths) else []
    if not logits and not paths:
        found = "no output embeddings" if head is None else f"at {path!r} {why_no_head(head)}"
        raise UnsupportedError(
            f"logits=False: expected a language model whose head is a plain nn.Linear, or one with a LoRA adapter; "
            f"{type(model).__name__} has {found}. Take the hook off the head, quantize all but the head, or drop "
            "logits=False."
        )
    return paths


def _heads(module: nn.Module) -> Iterator[nn.Module]:
    """The heads that the outermost modules name as theirs, as models of transformers do."""
    get = getattr(module, "get_output_embeddings", None)
    if callable(get) and (head := get()) is not None:
        yield head
    else:
        for child in module.children():
            yield from _heads(child)


class TokenMeter:
    """Counts tokens, and those whose arg-max is the target, on the tokens' device, so that nothing waits for it."""

    def __init__(self) -> None:
        self.step: Tensor | None = None
        """The two counts (right, all) of the step under way, int64."""
        self.last: Tensor | None = None
        self.total: Tensor | None = None
        self.has_losses = False
        """Whether any loss was computed without logits."""
        self.reads_logits = False
        """Whether logits were computed all the same."""

    def read_logits(self) -> None:
        self.reads_logits = True

    def __call__(self, argmax: Tensor | None, target: Tensor, ignore_index: int) -> None:
        self.has_losses = True
        if argmax is None:
            return
        counts = target != ignore_index
        found = torch.stack([((argmax == target) & counts).sum(), counts.sum()])
        self.step = found if self.step is None else self.step + found.to(self.step.device)

    def end_step(self) -> None:
        if self.step is not None:
            self.total = self.step if self.total is None else self.total + self.step
            self.last, self.step = self.step, None

    def accuracies(self, device: torch.device) -> dict[str, float]:
        """The accuracies of the last step, and of all steps since the last call, over the tokens of all ranks.

        All ranks have to call this.
        """
        none = torch.zeros(2, dtype=torch.int64, device=device)
        counts = torch.cat([none if each is None else each.to(device) for each in (self.last, self.total)])
        self.last = self.total = None
        last_right, last, right, every = _over_ranks(counts, distributed.ReduceOp.SUM).tolist()
        found = {"token_accuracy": (last_right, last), "mean_token_accuracy": (right, every)}
        return {key: part / whole for key, (part, whole) in found.items() if whole}


class Memory:
    """Measures the bytes that forwards leave on a device, and the peak there; nothing where no allocator counts."""

    def __init__(self, device: torch.device, *, watches: bool):
        self._device = device
        self._before = self._held = 0
        self._watches = watches and allocated_nbytes(device) is not None
        if self._watches:
            start_peak(device)

    def watch(self, model: nn.Module) -> Callable[[], None]:
        """Look before and after each of the model's forwards in training. Returns a function that ends this."""
        if not self._watches:
            return lambda: None
        before = model.register_forward_pre_hook(lambda *_: self.look(ends=False))
        after = model.register_forward_hook(lambda *_: self.look(ends=model.training))

        def stop() -> None:
            before.remove()
            after.remove()

        return stop

    def look(self, *, ends: bool) -> None:
        """Note how many bytes are there now.

        ends: whether a forward left the difference to the last look.
        """
        found = allocated_nbytes(self._device) if self._watches else None
        now = 0 if found is None else found[0]
        if ends:
            self._held = max(self._held, now - self._before)
        self._before = now

    def largest(self) -> dict[str, float]:
        """The most of any rank. All ranks have to call this."""
        found = allocated_nbytes(self._device) if self._watches else None
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
