"""What `recompute.estimate` says of training steps, beside what they take on this machine's device.

    python examples/estimate_against_measured.py                 # all cases: up to 80 GiB of a GPU's memory
    python examples/estimate_against_measured.py --only qwen3    # those whose name has it
    python examples/estimate_against_measured.py --tiny          # small ones, on the CPU too

Weights are random, everything is in bfloat16, the optimizer is AdamW, and gradients are freed between steps. It prints
a table, and writes it as JSON. On a CPU the columns differ, because estimates are for CUDA, which has other kernels.
Cases of adapters and of float8 need PEFT and torchao, and some bitsandbytes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tabulate import tabulate
from torch import nn
from torch.optim import AdamW

import recompute
from recompute.counters import describe_machine, memory_trace
from recompute.estimation.build_model import build
from recompute.profiling.dry_run import static_nbytes

GIB = 2**30
STEPS_BEFORE = 8  # by then regions run as captured code, whose kernels were compared with ATen's
OPTIMIZERS: dict[str, dict[str, bool]] = {
    "adamw": {"foreach": True},
    "adamw-loop": {"foreach": False},
    "adamw-fused": {"fused": True},
}


def llama(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
    )


def qwen3(layers: int = 28) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )


def gemma() -> transformers.GemmaConfig:
    return transformers.GemmaConfig(
        vocab_size=256000,
        hidden_size=2048,
        intermediate_size=16384,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
    )


OTHERS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "mistral-7b, 8 layers": (lambda: transformers.MistralConfig(num_hidden_layers=8), 1, 8192),
    "phi-3-mini, 16 layers": (lambda: transformers.Phi3Config(num_hidden_layers=16), 1, 4096),
    "gpt2-xl, 24 layers": (lambda: transformers.GPT2Config(n_embd=1600, n_head=25, n_layer=24), 8, 1024),
    "mixtral, 1024 wide, 8 layers": (
        lambda: transformers.MixtralConfig(
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=4,
        ),
        1,
        4096,
    ),
    "gemma-2-2b, 13 layers": (lambda: transformers.Gemma2Config(num_hidden_layers=13), 1, 4096),
    "gpt-neox, 2560 wide, 16 layers": (
        lambda: transformers.GPTNeoXConfig(
            hidden_size=2560, intermediate_size=10240, num_hidden_layers=16, num_attention_heads=32
        ),
        2,
        2048,
    ),
}
"""Of each family a configuration, the batch size and the sequence length."""


def tiny() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )


def is_in_a_layer(module: nn.Module, path: str) -> bool:
    return isinstance(module, nn.Linear) and "layers" in path


def with_lora(model: nn.Module) -> nn.Module:
    import peft

    lora = peft.LoraConfig(r=16, target_modules="all-linear")
    return peft.get_peft_model(model.requires_grad_(False), lora, autocast_adapter_dtype=False)  # type: ignore[arg-type]


def on_int8_of_torchao(model: nn.Module) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(), is_in_a_layer)
    return with_lora(model)


def on_nf4_of_torchao(model: nn.Module) -> nn.Module:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    for path, module in model.named_modules():
        if is_in_a_layer(module, path):
            module.weight = nn.Parameter(to_nf4(module.weight.detach()), requires_grad=False)  # type: ignore[arg-type]
    return with_lora(model)


def on_bitsandbytes(model: nn.Module, base: str) -> nn.Module:
    import bitsandbytes

    for path, old in list(model.named_modules()):
        if not is_in_a_layer(old, path):
            continue
        weight, new = old.weight.detach(), None
        sizes = {"input_features": old.in_features, "output_features": old.out_features, "bias": False}
        if base == "int8":
            new = bitsandbytes.nn.Linear8bitLt(**sizes, has_fp16_weights=False)
            new.weight = bitsandbytes.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
        else:
            new = bitsandbytes.nn.Linear4bit(**sizes, compute_dtype=torch.bfloat16, quant_type="nf4")
            kept = {"quant_type": "nf4", "compress_statistics": False}
            new.weight = bitsandbytes.nn.Params4bit(weight.cpu(), requires_grad=False, **kept)
        model.set_submodule(path, new.to(weight.device))
    model = with_lora(model)
    for each in model.parameters():  # PEFT makes float32 adapters beside codes of 8 bits
        each.data = each.data.bfloat16() if each.requires_grad else each.data
    return model


def in_float8(model: nn.Module, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    found = Float8LinearConfig.from_recipe_name(recipe)
    emulates = next(model.parameters()).device.type == "cpu"
    return convert_to_float8_training(model, config=replace(found, emulate=emulates), module_filter_fn=is_in_a_layer)


@dataclass(frozen=True)
class Form:
    """What trains, in place of all weights in bfloat16."""

    adapt: Callable[[nn.Module], nn.Module] = lambda model: model
    options: dict[str, Any] | None = None
    """Of ``recompute.estimate``, which is given the configuration; None: it is given the model that was adapted."""


FORMS = {
    "": Form(options={}),
    "LoRA": Form(with_lora, {"lora": 16, "base": "bfloat16"}),
    "LoRA, torchao's int8": Form(on_int8_of_torchao),
    "LoRA, torchao's nf4": Form(on_nf4_of_torchao),
    "LoRA, bitsandbytes' int8": Form(partial(on_bitsandbytes, base="int8"), {"lora": 16, "base": "int8"}),
    "LoRA, bitsandbytes' nf4": Form(partial(on_bitsandbytes, base="nf4"), {"lora": 16, "base": "nf4"}),
    "float8, tensorwise": Form(partial(in_float8, recipe="tensorwise")),
    "float8, rowwise": Form(partial(in_float8, recipe="rowwise")),
}


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], Any]
    seq_len: int
    policy: str
    optimizer: str = "adamw"
    batch_size: int = 1
    form: str = ""


def cases() -> list[Case]:
    llama_1b = ("llama-1b", lambda: llama(16, 2048, 8192, 32, 8))
    llama_8b_8 = ("llama-8b, 8 layers", lambda: llama(8, 4096, 14336, 32, 8))
    llama_8b = ("llama-8b", lambda: llama(32, 4096, 14336, 32, 8))
    found = [Case(*llama_1b, 4096, policy) for policy in ("none", "full", "auto")]
    found += [Case(*llama_8b_8, 8192, policy) for policy in ("none", "elementwise", "full")]
    found += [Case("qwen3-0.6b", qwen3, length, policy) for length in (2048, 8192) for policy in ("none", "auto")]
    found += [Case("gemma-2b", gemma, 4096, policy) for policy in ("none", "full")]
    found.append(Case(*llama_8b, 4096, "none"))
    found += [Case(*llama_8b, 4096, "full", optimizer) for optimizer in OPTIMIZERS]
    for name, (make, batch_size, length) in OTHERS.items():
        for policy in ("none", "elementwise", "auto"):
            found.append(Case(name, make, length, policy, "adamw-fused", batch_size))
    llama_8b_4 = ("llama-8b, 4 layers", lambda: llama(4, 4096, 14336, 32, 8))
    for form, policy in itertools.product(list(FORMS)[1:], ("none", "full", "elementwise", "auto")):
        found.append(Case(*llama_8b_4, 4096, policy, "adamw-fused", form=form))
    return found


def tiny_cases() -> list[Case]:
    return [Case("tiny", tiny, 64, policy) for policy in ("none", "full", "elementwise")] + [
        Case("tiny", tiny, 64, "elementwise", form=form) for form in FORMS if form
    ]


def built(case: Case, device: torch.device) -> tuple[nn.Module, Any]:
    sizes = {"sequence_length": case.seq_len, "batch_size": case.batch_size}
    return build(case.make(), **sizes, dtype=torch.bfloat16, device=device, adapt=FORMS[case.form].adapt)


def estimated(case: Case, device: torch.device) -> dict[str, int]:
    options = FORMS[case.form].options
    subject: Any = case.make()
    if options is None:
        subject, batch = built(case, device)
        options = {"batch": batch}
    found = recompute.estimate(
        subject,
        batch_size=case.batch_size,
        seq_len=case.seq_len,
        optimizer=case.optimizer,
        policy=case.policy,
        advise=False,
        **options,
    )
    steps = {"forward": 0, "backward": 0, "optimizer": found.moments["optimizer step"]}
    for name, nbytes in found.moments.items():
        if name != "optimizer step":
            phase = "backward" if name.startswith("backward") else "forward"
            steps[phase] = max(steps[phase], nbytes)
    return {"held": found.activation_bytes, **steps, "peak": found.peak_bytes, "first steps": found.most_bytes}


def measured(case: Case, device: torch.device) -> dict[str, int]:
    """Bytes of a late step, and the peak of those before it, in which policies learn, and kernels are compared."""
    model, batch = built(case, device)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = AdamW(trained, lr=1e-5, **OPTIMIZERS[case.optimizer])
    if case.policy != "none":
        recompute.apply(model, case.policy)
    peaks_before = []
    for _ in range(STEPS_BEFORE):
        with memory_trace(device) as trace:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks_before.append(trace.peak_nbytes)
    gc.collect()
    static = static_nbytes(model, optimizer, batch)  # on CUDA with cuBLAS's workspaces
    with memory_trace(device) as trace:
        loss = model(**batch).loss
        trace.mark("forward")
        loss.backward()
        del loss
        trace.mark("backward")
        optimizer.step()
        trace.mark("optimizer")
    peaks = {name: static + nbytes for name, nbytes in trace.span_peak_nbytes.items()}
    first = static + max(peaks_before[1:])  # the optimizer's states are made in the first of all
    return {"held": trace.held_nbytes["forward"], **peaks, "peak": static + trace.peak_nbytes, "first steps": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose model, training, policy and optimizer contain this")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument(
        "--out", type=Path, default=Path("results/estimate"), help="folder for estimates.json and estimates.md"
    )
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for case in tiny_cases() if options.tiny else cases():
        if options.only not in f"{case.name} {case.form} {case.policy} {case.optimizer}":
            continue
        said, took = estimated(case, device), measured(case, device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        facts = {key: value for key, value in asdict(case).items() if key != "make"}
        rows.append({**facts, "estimated": said, "measured": took, "error": said["peak"] / took["peak"] - 1})
        named = f"{case.name}, {case.form or 'all weights'}, {case.policy}, {case.optimizer}"
        print(f"{named}: {rows[-1]['error']:+.2%}", flush=True)
        (options.out / "estimates.md").write_text(table(rows) + "\n", encoding="utf-8")
        result = {"machine": describe_machine(device), "rows": rows}
        (options.out / "estimates.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """GiB, estimated / measured."""

    def both(row: dict[str, Any], key: str) -> str:
        return f"{row['estimated'][key] / GIB:.2f} / {row['measured'][key] / GIB:.2f}"

    columns = ["held", "forward", "backward", "optimizer", "peak", "first steps"]
    lines = [
        [row["name"], row["form"], row["seq_len"], row["policy"], row["optimizer"]]
        + [both(row, key) for key in columns]
        + [f"{row['error']:+.2%}"]
        for row in rows
    ]
    named = ["model", "trained", "sequence", "policy", "optimizer"]
    headers = [*named, *(f"{name}, GiB" for name in columns), "error of the peak"]
    return tabulate(lines, headers, "github", disable_numparse=True)


if __name__ == "__main__":
    main()
