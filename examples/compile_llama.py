"""One policy in eager and in compiled code: python examples/compile_llama.py --policy elementwise"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import recompute
from recompute.counters import step_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="elementwise", help="a preset, or the path of a policy file")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; inductor needs a C++ compiler")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = torch.randint(256, (8, 128), generator=torch.Generator().manual_seed(0)).to(device)

    for code in ("eager", "compiled"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **shape)).to(device)
        if code == "compiled":
            for layer in model.model.layers:  # one graph serves them all
                layer.compile(fullgraph=True, backend=options.backend)

        def loss_of(model: LlamaForCausalLM = model) -> torch.Tensor:
            return model(input_ids=ids, labels=ids).loss

        loss_of().backward()  # the first step compiles
        before = step_memory(loss_of, device).activation_bytes_held / 2**20
        recompute.apply(model, options.policy)  # before or after compiling: it is compiled anew
        loss_of().backward()
        after = step_memory(loss_of, device).activation_bytes_held / 2**20
        print(f"{code}: {before:.1f} MiB held after forward without a policy, {after:.1f} MiB under {options.policy}")


if __name__ == "__main__":
    main()
