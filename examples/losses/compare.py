"""Time and memory of each loss at an 8B model's size: of logits, by Liger where it has the loss, and without logits.

python examples/losses/compare.py --out losses.json

A step is forward and backward of head and loss alone, from hidden states that are there. The peak is what is allocated
beside these and the weights; gradients are a part of it.

    plain            the examples' losses, from logits in float32
    on lazy logits   the same code; a kernel stands in for the head (as under the policy `auto`)
    ours             the examples as they are
    Liger            its fused loss of that name, which may differ in what it adds
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distillation
import dpo
import grpo
import kto
import orpo
import simpo
import torch
from torch import Tensor, nn
from toy import DEVICE, IGNORED

import recompute

HEAD = {"rules": [{"match": "lm_head", "action": "recompute", "via": "kernel"}]}
OURS = {each: each.log_probs for each in (dpo, kto, orpo, simpo)} | {grpo: grpo.log_probs_and_entropies}
WAYS = ("plain", "on lazy logits", "ours", "Liger")
DISTILLATIONS = {
    "distillation": "jsd",
    "forward KL": "forward_kl",
    "reverse KL": "reverse_kl",
    "total variation": "total_variation",
}
LOSSES = ("DPO", "KTO", "ORPO", "SimPO", "GRPO", *DISTILLATIONS)
STEPS = 7


class Model(nn.Module):
    """A head, and hidden states that somebody else has computed."""

    def __init__(self, batch: int, length: int, hidden: int, words: int):
        super().__init__()
        self.lm_head = nn.Linear(hidden, words, bias=False, device=DEVICE, dtype=torch.bfloat16)
        self.states = nn.Parameter(torch.randn(batch, length, hidden, device=DEVICE, dtype=torch.bfloat16))

    def model(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=self.states)


def plain_log_probs(model: Any, ids: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    logits = model.lm_head(model.model(ids).last_hidden_state[:, :-1]).float() / temperature
    found = logits.log_softmax(-1).gather(-1, labels[:, 1:].clamp_min(0)[..., None])[..., 0]
    return found * (labels[:, 1:] != IGNORED)


def plain_with_entropies(model: Any, ids: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = model.lm_head(model.model(ids).last_hidden_state[:, :-1]).float() / temperature
    log_p = logits.log_softmax(-1)
    words = labels[:, 1:].clamp_min(0)[..., None]
    return log_p.gather(-1, words)[..., 0], -(log_p.exp() * log_p).sum(-1)


def plain_distillation(
    student: Any, teacher: Any, ids: Tensor, labels: Tensor, kind: str = "jsd", beta: float = 0.1
) -> Tensor:
    log_p = student.lm_head(student.model(ids).last_hidden_state[:, :-1]).float().log_softmax(-1)
    with torch.no_grad():
        log_q = teacher.lm_head(teacher.model(ids).last_hidden_state[:, :-1]).float().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        rows = (q * (log_q - log_p)).sum(-1)
    elif kind == "reverse_kl":
        rows = (p * (log_p - log_q)).sum(-1)
    elif kind == "total_variation":
        rows = 0.5 * (p - q).abs().sum(-1)
    else:
        log_both = (p * (1 - beta) + q * beta).log()
        rows = (1 - beta) * (p * (log_p - log_both)).sum(-1) + beta * (q * (log_q - log_both)).sum(-1)
    counts = labels[:, 1:] != IGNORED
    return (rows * counts).sum() / counts.sum()


def steps_of(
    policy: Model, reference: Model, batch: tuple[Tensor, Tensor], distill: Callable[..., Tensor]
) -> dict[str, Callable[[], Tensor]]:
    ids, labels = batch
    half = torch.arange(len(ids), device=DEVICE) % 2 == 0
    sampled = torch.full(labels[:, 1:].shape, -11.0, device=DEVICE)
    return {
        "DPO": lambda: dpo.dpo_loss(policy, reference, ids, labels),
        "KTO": lambda: kto.kto_loss(policy, reference, batch, batch, half),
        "ORPO": lambda: orpo.orpo_loss(policy, ids, labels),
        "SimPO": lambda: simpo.simpo_loss(policy, ids, labels),
        "GRPO": lambda: grpo.grpo_loss(policy, batch, sampled, half.float()[:, None]),
        **{name: partial(distill, policy, reference, ids, labels, kind) for name, kind in DISTILLATIONS.items()},
    }


def ligers(policy: Model, reference: Model, batch: tuple[Tensor, Tensor]) -> dict[str, Callable[[], Tensor]]:
    from liger_kernel import chunked_loss

    ids, labels = batch
    targets, counts = labels[:, 1:].contiguous(), labels[:, 1:] != IGNORED
    half = torch.arange(len(ids), device=DEVICE) % 2 == 0

    def operands(model: Model) -> tuple[Tensor, Tensor]:
        return model.lm_head.weight, model.states[:, :-1]

    weight, taught = (each.detach() for each in operands(reference))
    of_reference = {"ref_input": taught, "ref_weight": weight}
    of_dpo, of_kto = chunked_loss.LigerFusedLinearDPOLoss(), chunked_loss.LigerFusedLinearKTOLoss(use_ref_model=True)
    of_orpo = chunked_loss.LigerFusedLinearORPOLoss()
    of_simpo = chunked_loss.LigerFusedLinearSimPOLoss(beta=2.0, gamma=1.0, compute_nll_loss=False)
    of_grpo = chunked_loss.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, temperature=0.9, loss_type="bnpo")
    betas = {"distillation": 0.1, "forward KL": 0.0, "reverse KL": 1.0}
    of_jsd = {
        name: chunked_loss.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta)
        for name, beta in betas.items()
    }
    kl, sampled = torch.zeros((), device=DEVICE), torch.full(targets.shape, -11.0, device=DEVICE)

    def by_grpo() -> Tensor:
        weight, states = operands(policy)
        words = targets.clamp_min(0)
        return of_grpo(states, weight, words, counts.float(), half.float(), old_per_token_logps=sampled)[0]

    def by_jsd(name: str) -> Tensor:
        weight_, states = operands(policy)
        return of_jsd[name](states.flatten(0, 1), weight_, taught.flatten(0, 1), weight, targets.flatten())

    return {
        "DPO": lambda: of_dpo(*operands(policy), targets, **of_reference)[0],
        "KTO": lambda: of_kto(*reversed(operands(policy)), targets, preference_labels=half, kl=kl, **of_reference)[0],
        "ORPO": lambda: of_orpo(*operands(policy), targets)[0],
        "SimPO": lambda: of_simpo(*operands(policy), targets)[0],
        "GRPO": by_grpo,
        **{name: partial(by_jsd, name) for name in of_jsd},
    }


def use(log_probs: bool) -> None:
    """Have the examples' losses make log-probabilities of logits, or as they are written."""
    for module, ours in OURS.items():
        name = "log_probs" if hasattr(module, "log_probs") else "log_probs_and_entropies"
        setattr(module, name, ours if log_probs else plain_log_probs if name == "log_probs" else plain_with_entropies)


def measured(step: Callable[[], Tensor], parameters: list[Tensor], steps: int) -> dict[str, Any]:
    on_cuda = DEVICE.type == "cuda"
    seconds, peak, loss = [], None, None
    for index in range(2 + steps):
        for each in parameters:
            each.grad = None
        before = torch.cuda.memory_allocated() if on_cuda else 0
        if on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = step()
        loss.backward()
        if on_cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        if index > 1:
            seconds.append(time.perf_counter() - begin)
        loss = loss.item()
    return {"seconds": statistics.median(seconds), "extra_peak_nbytes": peak, "value": loss}


def attempt(step: Callable[[], Tensor], parameters: list[Tensor], steps: int) -> dict[str, Any]:
    try:
        return measured(step, parameters, steps)
    except (RuntimeError, TypeError, ValueError) as error:  # of memory, or of a peer: the others still get their rows
        return {"failure": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, default=(8, 1024, 4096, 128256), help="batch length hidden words")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    given = parser.parse_args()
    batch, length, _, words = given.shape
    torch.manual_seed(0)
    policy, reference = Model(*given.shape), Model(*given.shape).requires_grad_(False)
    ids = torch.randint(words, (batch, length), device=DEVICE)
    labels = ids.clone()
    labels[:, : length // 8] = IGNORED
    given_batch, parameters = (ids, labels), list(policy.parameters())
    rows = []
    for way in given.ways:
        handles = [recompute.apply(model, HEAD) for model in (policy, reference)] if way == "on lazy logits" else []
        use(log_probs=way == "ours")
        try:
            if way == "Liger":
                steps = ligers(policy, reference, given_batch)
            else:
                distill = distillation.distillation_loss if way == "ours" else plain_distillation
                steps = steps_of(policy, reference, given_batch, distill)
        except ImportError as error:
            print(f"{way}: {error}")
            continue
        for loss in [name for name in given.losses if name in steps]:
            rows.append({"loss": loss, "way": way, **attempt(steps[loss], parameters, given.steps)})
            print(rows[-1])
        for handle in handles:
            handle.remove()
    use(log_probs=True)
    if given.out is not None:
        device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
        about = {"command": shlex.join(["python", *sys.argv]), "date": date.today().isoformat(), "device": device}
        about |= {"torch": torch.__version__, "shape": list(given.shape), "dtype": "bfloat16"}
        given.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
