"""A head whose words are shared by the ranks of a process group: rank r has rows of its weight, and reads these alone.

Ranks hold ranges of words in their order, as ``torch.chunk`` cuts them and as a DTensor is sharded. Every rank has all
tokens. With m, z: (M,), the maximum and the sum of exponentials of a rank's own words, the ranks exchange

    forward:   max(m), then the sums of z · exp(m - max(m)), of each target's score, and of what options need
    backward:  the sum of dhidden

and no logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed

from recompute.errors import KernelError
from recompute.kernels.loss_settings import Targets
from recompute.kernels.row_statistics import Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Words(NamedTuple):
    """The words that a rank has, as ``LossSettings`` has them."""

    group: str = ""
    first: int = 0
    vocabulary: int = 0


def words_of(op: str, weight: Tensor, group: ProcessGroup | None, vocabulary: int | None) -> Words:
    """The words of this rank, which has their rows in ``weight``.

    vocabulary: the words of all ranks; None: each has as many as this one.
    """
    if group is None:
        if vocabulary not in (None, len(weight)):
            raise KernelError(
                f"{op}: vocabulary is {vocabulary}, but weight has {len(weight)} words; expected group, too."
            )
        return Words()
    rank, ranks, rows = distributed.get_rank(group), distributed.get_world_size(group), len(weight)
    if rank < 0:
        raise KernelError(f"{op}: this process is not a rank of group. Call it on the group's ranks alone.")
    vocabulary = rows * ranks if vocabulary is None else int(vocabulary)
    most = -(-vocabulary // ranks)
    first = min(rank * most, vocabulary)
    if rows != min(most, vocabulary - first):
        raise KernelError(
            f"{op}: weight has {rows} rows on rank {rank} of {ranks}; expected {min(most, vocabulary - first)} of "
            f"{vocabulary} words, as torch.chunk cuts them. Pass `vocabulary`, the words of all ranks, if they differ."
        )
    return Words(group.group_name, first, vocabulary)


def local_parts(
    op: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, ProcessGroup | None, int | None]:
    """This rank's parts of all, the group that shares the words, and their number, where ``weight`` is a DTensor.

    The others may be DTensors of the same mesh, of any placement, or plain tensors that every rank has.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(weight, DTensor):
        raise KernelError(f"{op}: hidden, target or bias is a DTensor, and weight is not; expected a DTensor, too.")
    mesh = weight.device_mesh
    if mesh.ndim != 1 or (weight.placements[0] != Shard(0) and not weight.placements[0].is_replicate()):
        raise KernelError(
            f"{op}: weight is sharded {weight.placements} over {mesh}; expected Shard(0) over a mesh of one dimension."
        )
    shards = weight.placements[0] == Shard(0)

    def whole(tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        return tensor.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Replicate()])

    if bias is not None:
        if not isinstance(bias, DTensor):
            raise KernelError(f"{op}: weight is a DTensor, and bias is not; expected both or neither.")
        bias = bias.redistribute(mesh, weight.placements).to_local()
    group, vocabulary = (mesh.get_group(), weight.shape[0]) if shards else (None, None)
    return whole(hidden), weight.to_local(), whole(target), bias, group, vocabulary


def any_dtensor(*tensors: Any) -> bool:
    return any(type(each).__name__ == "DTensor" for each in tensors)  # importing the class would take a second


def over_ranks(statistics: Statistics, targets: Targets, rows: int) -> Statistics:
    """The statistics of all ranks' words, as if one block had them, from those of this rank's ``rows`` words."""
    labels, count, _, _, settings = targets
    group, own = _group(settings.group), statistics.of_rows()
    highest = own.maxima.clone()
    distributed.all_reduce(highest, distributed.ReduceOp.MAX, group=group)
    scaled, moments = own.scaled_to(highest)
    here = (labels >= settings.first) & (labels < settings.first + rows)
    sums = [scaled, own.target_logits.where(here, 0.0).view(-1, count).t()]
    if own.weighted_sums is not None:
        sums.append(own.weighted_sums)
    if moments is not None:
        sums.append(moments)
    table = torch.cat(sums)
    distributed.all_reduce(table, group=group)
    indices = own.indices
    if indices is not None:  # the first of those with the maximum
        indices = indices.where(own.maxima == highest, torch.iinfo(indices.dtype).max)
        distributed.all_reduce(indices, distributed.ReduceOp.MIN, group=group)
    return Statistics(
        *(highest, table[:1]),
        None if own.weighted_sums is None else table[1 + count : 2 + count],
        None if moments is None else table[-1:],
        *(indices, table[1 : 1 + count].t().reshape(-1)),
    )


def sum_over_ranks(tensor: Tensor | None, name: str) -> None:
    """Add up, in place, what each rank of the group of this name has; nothing where there is no group."""
    if tensor is not None and name:
        distributed.all_reduce(tensor, group=_group(name))


def _group(name: str) -> Any:
    from torch.distributed.distributed_c10d import _resolve_process_group  # a build may be without it

    return _resolve_process_group(name)  # type: ignore[arg-type]
