"""A Hugging Face decoder trained by two processes with DeepSpeed."""

import os

import torch
import torch.distributed as dist
from engine_testing import bits
from two_parts import VOCABULARY, decoder

import recompute


def losses(stage, rules):
    """Of some steps under ZeRO, bit by bit; and the bytes that a policy dropped."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = decoder()
    handle = recompute.apply(model, rules) if rules else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(10 + dist.get_rank())
    found = []
    for _ in range(3):
        ids = torch.randint(0, VOCABULARY, (2, 12))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found.append(bits(loss))
    return found, handle.stats().dropped_nbytes if handle else 0
