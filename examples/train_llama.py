"""Train a small byte-level Llama under a policy: python examples/train_llama.py --policy auto --steps 20

--large trains one of the shape of Llama 1B on pieces of 4096 bytes, in bf16: for a GPU.
"""

from __future__ import annotations

import argparse
import inspect
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import recompute
from recompute.counters import step_memory
from recompute.diagnostics.timeline import Timeline

SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    use_cache=False,
)
LARGE = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    use_cache=False,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="elementwise", help="a preset, or the path of a policy file")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeline", type=Path, help="a .json to write a step's memory to, and a .png beside it")
    parser.add_argument("--large", action="store_true", help="the shape of Llama 1B, sequence 4096, bf16")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config, batch, length = (LARGE, 1, 4096) if options.large else (SMALL, 8, 128)
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16 if options.large else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 if options.large else 1e-3)
    text = torch.tensor(list(inspect.getsource(argparse).encode()), device=device)
    batches = text[: len(text) // (batch * length) * batch * length].view(-1, batch, length)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return model(input_ids=batch, labels=batch).loss

    plain = step_memory(lambda: loss_of(batches[0]), device)
    handle = recompute.apply(model, options.policy)
    lean = step_memory(lambda: loss_of(batches[0]), device)

    for step in range(options.steps):
        optimizer.zero_grad()
        loss = loss_of(batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")

    handle.time_regeneration()
    before = handle.stats()
    with nullcontext() if options.timeline is None else Timeline(model) as timeline:
        loss_of(batches[0]).backward()
    if timeline is not None:
        timeline.save(options.timeline)  # for ui.perfetto.dev
        timeline.plot().savefig(options.timeline.with_suffix(".png"))

    print(handle.explain())
    print(f"a step: {handle.stats() - before}")
    held, left = plain.activation_bytes_held / 2**20, lean.activation_bytes_held / 2**20
    print(f"held after forward: {held:.1f} MiB without a policy, {left:.1f} MiB under {options.policy}")


if __name__ == "__main__":
    main()
