"""A head and the log-probabilities of given words, and the entropy of all words, without the logits as a whole.

With hidden: (M, H), weight: (V, H), target y: (M,) or (M, K), computed in float32 from the logits on:

    logits    = hidden @ weightᵀ + bias                                                     (M, V)
    s         = softcap · tanh(scale · logits / softcap) / temperature                      (M, V)
                or scale · logits / temperature, and p = softmax(s)
    log_probs = s[y] - log(sum(exp(s), over V))                                             (M,) or (M, K)
    entropy   = -sum(p · log(p), over V)                                                    (M,)

    ds        = sum(dlog_probs · (onehot(y) - p), over K) - dentropy · p · (log(p) + entropy)  (M, V)

A log-probability is a cross-entropy with its sign changed, of each token for itself. So this is what
``linear_cross_entropy`` does, which says how logits are made, held and turned into gradients: forward reads each block
of them once, for the entropy too, and backward once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.linear_cross_entropy import head_losses
from recompute.kernels.linears import check_head
from recompute.kernels.loss_settings import check_target, checked_settings
from recompute.kernels.word_shards import any_dtensor, local_parts, words_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    ignore_index: int = -100,
    adapter: tuple[Tensor, Tensor] | None = None,
    group: ProcessGroup | None = None,
    vocabulary: int | None = None,
    logits_bytes: float | None = None,
    hold_logits: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """``log_softmax(linear(hidden, weight, bias).float() / temperature, -1).gather(-1, target)``, without the logits.

    Gradients, autocast, determinism and second derivatives are as of ``linear_cross_entropy``.

    Args:
        hidden: (..., H), float16, bfloat16, float32 or float64, of any strides.
        weight: (V, H), of the dtype of ``hidden`` (any of these under autocast).
        target: (...), or (..., K) for several words of each token, as a teacher's top-k: int64 classes, each of them
            any number of times, or ``ignore_index``.
        bias: (V,), of the dtype of ``hidden``.
        temperature: divides what the softmax is taken of.
        scale: multiplies the logits, as in Cohere's models; in Granite's it is 1 / ``logits_scaling``.
        softcap: scaled logits are capped to ``softcap * tanh(logits / softcap)``, as in Gemma's models.
        entropy: also return the entropy of each token's distribution.
        ignore_index: a target that has the log-probability 0 and no gradient. Where a token has no other target, nor
            has its entropy.
        adapter, group, vocabulary, logits_bytes, hold_logits: as of ``linear_cross_entropy``.

    Returns:
        Log-probabilities of the target's shape; and the entropies, (...), if asked. Both are float32 (float64 of
        float64) and may have gradients. Saved for backward are the arguments and two float32 a token, or three with
        entropies; and held, until the first backward, the logits that it need not make again.

    Raises:
        KernelError: for other shapes, dtypes or options, mixed dtypes, or tensors on several devices.
        IndexError: as ``cross_entropy`` does.

    >>> linear_log_probs(torch.ones(2, 8), torch.zeros(4, 8), torch.tensor([1, 3]))  # -log(4)
    tensor([-1.3863, -1.3863])
    """
    op = "linear_log_probs"
    if any_dtensor(hidden, weight, target, bias):
        hidden, weight, target, bias, group, vocabulary = local_parts(op, hidden, weight, target, bias)
    launch.check(op, hidden=hidden, weight=weight, bias=bias)
    check_head(op, "", hidden, weight, bias, adapter)
    tokens = hidden.shape[:-1]
    several = isinstance(target, Tensor) and target.dim() == hidden.dim()
    if several and target.shape[-1] == 0:
        raise KernelError(f"{op}: target has shape {tuple(target.shape)}; expected at least one word a token.")
    shape = (*tokens, target.shape[-1]) if several else tokens
    words = words_of(op, weight, group, vocabulary)
    check_target(op, target, None, shape, words.vocabulary or len(weight), hidden.device)
    settings = checked_settings(op, ignore_index, 0.0, 0.0, softcap, "none", False, False, scale, temperature)
    settings = settings._replace(with_entropy=bool(entropy), **words._asdict())
    operands = (hidden, weight, bias, adapter, target, None)
    losses, _, _, entropies = head_losses(op, *operands, settings, logits_bytes, hold_logits)
    log_probs = 0.0 - losses  # and not -losses, which has zeros with a sign
    return log_probs if entropies is None else (log_probs, entropies)
