"""What policies and their peers cost in whole training steps so short that Python sets the pace:

    python examples/ablation/host_time.py --in-turn --json host-time.json
    python examples/ablation/host_time.py --tiny --models gpt2-xl --ways elementwise  # small ones, on the CPU, too

A way with "+graph" behind its name is one CUDA graph of the whole of forward and backward:

    python examples/ablation/host_time.py --models llama-60m --ways none+graph elementwise+graph auto+graph

Models have random weights in bfloat16, the same for each way. A step is forward, backward, fused AdamW and the release
of the gradients. Its time is the median from an idle device to an idle device. The time of forward is that until the
call returns, even if the device is not done. Bytes are those above parameters, gradients and optimizer states. Before
the warm-up, a first step with deterministic algorithms tells whether a way's loss and gradients are those of `none`,
bit for bit; of a graph, those of `none+graph`.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

# Python looks in a script's folder first, and kernels.py there is not the `kernels` that transformers looks for.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

# ruff: noqa: E402
import torch
import transformers
from tabulate import tabulate
from torch import Tensor
from torch.optim import AdamW
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama import modeling_llama

from recompute import counters
from recompute.ablation.peers import BASELINE, COMPILED, is_peer, under
from recompute.ablation.trials import seeded
from recompute.compiled.generated.generated_kernel import wait_for_kernels
from recompute.counters import resolve_device
from recompute.diagnostics.comparing_runs import deterministic, relative_error, same_bits
from recompute.errors import PolicyError
from recompute.estimation.build_model import build
from recompute.policy.loading import load_policy

Row = dict[str, Any]

CHECKPOINTING = "gradient-checkpointing"  # transformers' own, of each layer
WAYS = (BASELINE, CHECKPOINTING, "elementwise", "auto")
PEERS = ("torch-selective", "liger", "torch-compile-selective")
GRAPH = "+graph"
"""Follows the name of a policy or a peer whose forward and backward are captured in a CUDA graph."""
GRAPHED = (BASELINE, "elementwise", "auto")
GRAPH_WARMUP = 10  # steps before the capture, in which policies settle
SEED, LEARNING_RATE = 0, 1e-5
MEASURES = {
    "ms a step": ".1f",
    "of none's": ".2f",
    "CPU ms a forward": ".1f",
    "peak GiB": ".3f",
    "held GiB": ".3f",
    "same loss": "",
    "same gradients": "",
    "error of gradients": ".1e",
}
"""The columns after a way's name, and the formats of their numbers."""


@dataclass(frozen=True)
class Case:
    """A model, and the batch that it is given at each step."""

    config: str
    """The name of a class of transformers."""
    sizes: dict[str, int]
    """Its arguments, where they are not its defaults."""
    batch_size: int
    sequence_length: int
    ways: tuple[str, ...] = WAYS
    """`none` among them."""
    is_layers_alone: bool = False
    """Whether embedding, last norm, head and loss are left out."""

    def make(self, device: torch.device) -> tuple[Any, dict[str, Any]]:
        """The model in training mode, and keyword arguments with which it returns a loss: the same each time."""
        config = getattr(transformers, self.config)(**self.sizes)
        with seeded(SEED, device):
            model, batch = build(
                config,
                sequence_length=self.sequence_length,
                batch_size=self.batch_size,
                dtype=torch.bfloat16,
                device=device,
            )
            return model, only_layers(model, batch["input_ids"]) if self.is_layers_alone else batch


LLAMA = {
    "vocab_size": 256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
LLAMA_60M = {
    "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1376,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
MIXTRAL = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3584, "num_local_experts": 8,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
PYTHIA = {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 16,
}  # fmt: skip
GPT2_XL = {"hidden_size": 1600, "num_hidden_layers": 24, "num_attention_heads": 25}
CASES = {
    "llama-1b-layers": Case("LlamaConfig", LLAMA, 1, 4096, (*WAYS, *PEERS), is_layers_alone=True),
    "mixtral-small": Case("MixtralConfig", MIXTRAL, 1, 4096),
    "gemma-2-2b": Case("Gemma2Config", {"num_hidden_layers": 13}, 1, 4096),
    "gpt-neox": Case("GPTNeoXConfig", PYTHIA, 2, 2048),
    "phi-3": Case("Phi3Config", {"num_hidden_layers": 16}, 1, 4096),
    "gpt2-xl": Case("GPT2Config", GPT2_XL, 8, 1024),
    "llama-60m": Case("LlamaConfig", LLAMA_60M, 1, 512, (*WAYS, *PEERS, *(way + GRAPH for way in GRAPHED))),
}
TINY_LENGTH = 64
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def only_layers(model: Any, ids: Tensor) -> dict[str, Any]:
    """Have a Llama run its decoder layers alone; returns what to give it then: hidden states, and rotary embeddings.

    It stays the LlamaForCausalLM that Liger knows how to change.
    """
    decoder = model.get_decoder()
    hidden = torch.randn(*ids.shape, model.config.hidden_size, dtype=model.dtype, device=model.device)
    rotary = decoder.rotary_emb(hidden, torch.arange(ids.shape[1], device=model.device)[None])

    def forward(hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> CausalLMOutput:
        hidden = hidden.detach().requires_grad_()  # as an embedding's; a new tensor each time, to collect no gradients
        for layer in decoder.layers:
            hidden = layer(hidden, position_embeddings=rotary)
        return CausalLMOutput(loss=hidden.mean())

    model.forward = forward
    return {"hidden": hidden, "rotary": rotary}


class EagerStep:
    """Forward and backward, launched op by op."""

    def __init__(self, model: Any, batch: dict[str, Any]):
        self.model = model
        self.batch = batch

    def run(self) -> tuple[Tensor, float | None]:
        """The loss, and the seconds until forward has returned."""
        start = counters.host_seconds()
        loss = self.model(**self.batch).loss
        seconds = counters.host_seconds() - start
        loss.backward()
        return loss.detach(), seconds

    def release_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)


class GraphedStep(EagerStep):
    """Forward and backward as one CUDA graph, which writes loss and gradients into the same memory each time."""

    def __init__(self, model: Any, batch: dict[str, Any]):
        if not torch.cuda.is_available():
            raise RuntimeError(f"{GRAPH}: expected a CUDA device; there is none")
        super().__init__(model, self._with_mask(batch))
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # what is made once, such as the workspaces of cuBLAS, is made before
            for _ in range(GRAPH_WARMUP):
                super().run()
                wait_for_kernels()
        torch.cuda.current_stream().wait_stream(beside)
        self.model.zero_grad(set_to_none=True)  # so that the graph makes the gradients
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss, _ = super().run()

    @staticmethod
    def _with_mask(batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with attention's mask. Some versions of transformers make it in graphs alone.

        Regions run as captured code where they are called in the graph as they were before it.
        """
        if "input_ids" not in batch:
            return batch
        ids = batch["input_ids"]
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        return batch | {"attention_mask": mask[None, None]}

    def run(self) -> tuple[Tensor, float | None]:
        self._graph.replay()
        return self._loss, None

    def release_gradients(self) -> None:
        """They belong to the graph."""


def first_step(step: EagerStep, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the gradients of all parameters: zeros where there are none."""
    with seeded(SEED, device):
        loss, _ = step.run()
    parameters = step.model.parameters()
    return loss, [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]


def compared(found: tuple[Tensor, list[Tensor]], reference: tuple[Tensor, list[Tensor]]) -> Row:
    (loss, gradients), (expected_loss, expected) = found, reference
    return {
        "same loss": same_bits(loss, expected_loss),
        "same gradients": all(map(same_bits, gradients, expected)),
        "error of gradients": relative_error(gradients, expected),
    }


def train(step: EagerStep, optimizer: AdamW, device: torch.device) -> tuple[float, float | None]:
    """Take a whole step; returns the seconds that it takes, and those until forward returns."""
    start = counters.wall_seconds(device)
    _, forward_seconds = step.run()
    optimizer.step()
    step.release_gradients()
    return counters.wall_seconds(device) - start, forward_seconds


@dataclass
class Trial:
    """What all ways to train a model have in common."""

    case: Case
    device: torch.device
    warmup: int
    steps: int
    references: dict[bool, tuple[Tensor, list[Tensor]]] = field(default_factory=dict)
    """The first step of `none`, once it ran, by whether it ran in a graph. There transformers masks in another way."""

    def rows(self, *, in_turn: bool) -> list[Row]:
        """What each way measured. in_turn: whether all ways train at once, by taking one step each in turn."""
        rows: list[Row] = [{"way": way, **dict.fromkeys(MEASURES)} for way in self.case.ways]
        runs = [self.run(row) for row in rows]
        for group in [runs] if in_turn else [[run] for run in runs]:
            take_turns(group)
            gc.collect()  # models of transformers form reference cycles
            torch.cuda.empty_cache()
        plain = next(row for row in rows if row["way"] == BASELINE)["ms a step"]
        for row in rows:
            if plain and row["ms a step"]:
                row["of none's"] = row["ms a step"] / plain
        return rows

    def run(self, row: Row) -> Iterator[None]:
        """Train a model in the way that `row` names, and fill it in; pauses after each step."""
        try:
            yield from self._train(row)
        except Exception as error:
            # A policy, a peer, a compiler or memory may fail, each in its own way. The other ways go on.
            row["error"] = f"{type(error).__name__}: {error}"

    def _train(self, row: Row) -> Iterator[None]:
        device = self.device
        way, is_graphed = row["way"].removesuffix(GRAPH), row["way"].endswith(GRAPH)
        make_step = GraphedStep if is_graphed else EagerStep
        model, batch = self.case.make(device)
        if way == CHECKPOINTING:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with nullcontext() if way == CHECKPOINTING else under(way, model):
            optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
            with deterministic(device.type == "cuda"):
                first = first_step(make_step(model, batch), device)
            if way == BASELINE:
                self.references[is_graphed] = first
            if is_graphed in self.references:
                row |= compared(first, self.references[is_graphed])
            del first
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield
            step, taken = make_step(model, batch), []
            for _ in range(self.warmup + self.steps):
                taken.append(train(step, optimizer, device))
                yield
            whole, forward = zip(*taken[self.warmup :], strict=True)
            row["ms a step"] = statistics.median(whole) * 1e3
            if is_graphed:  # it holds its memory from step to step, and has no forward of its own
                return
            model(**batch).loss.backward()  # so that the gradients are there before bytes are counted
            memory = counters.step_memory(lambda: model(**batch).loss, device)
        row |= {
            "CPU ms a forward": statistics.median(forward) * 1e3,
            "peak GiB": memory.peak_bytes / 2**30,
            "held GiB": memory.activation_bytes_held / 2**30,
        }


def take_turns(runs: Sequence[Iterator[None]]) -> None:
    """Have each run take a step, then each the next one, until all are done.

    Liger changes transformers' module of Llama. Such changes are there in the turns of the run that made them alone.
    """
    module = vars(modeling_llama)
    own = {run: dict(module) for run in runs}
    while own:
        for run in list(own):
            module.update(own[run])
            if next(run, "done"):
                del own[run]
            else:
                own[run] = dict(module)


def known_way(name: str) -> str:
    way = name.removesuffix(GRAPH)
    if way != CHECKPOINTING and not is_peer(way):
        try:
            load_policy(way.removesuffix(COMPILED))
        except PolicyError as error:
            known = ", ".join([CHECKPOINTING, *PEERS])
            raise argparse.ArgumentTypeError(
                f"expected one of {known}, or a policy, and {GRAPH} behind it or not: {error}"
            ) from error
    return name


def table(rows: Sequence[Row]) -> str:
    shown = [
        {key: textwrap.shorten(value, 120) if key == "error" else value for key, value in row.items()} for row in rows
    ]
    return tabulate(shown, "keys", "github", floatfmt=("", *MEASURES.values(), ""), missingval="-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    ways = f"{BASELINE} always runs; default: {', '.join(WAYS)}, and for llama-1b-layers {', '.join(PEERS)}"
    parser.add_argument("--ways", nargs="+", type=known_way, metavar="WAY", help=f"policies or peers; {ways}")
    parser.add_argument("--steps", type=int, default=20, help="of each way, of which the medians are taken")
    parser.add_argument("--warmup", type=int, default=8, help="steps before them, in which policies settle")
    parser.add_argument(
        "--in-turn", action="store_true", help="a step of each way, round by round: holds a model for each at once"
    )
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    options = parser.parse_args()
    if options.steps < 1 or options.warmup < 0:
        parser.error(f"expected --steps of at least 1, --warmup of at least 0; found {options.steps}, {options.warmup}")

    device = resolve_device("auto")
    liger = next((found.version for found in distributions(name="liger-kernel")), None)
    machine = {**counters.describe_machine(device), "liger-kernel": liger}
    models: dict[str, Any] = {}
    for name in options.models:
        case = CASES[name]
        case = replace(case, ways=tuple(dict.fromkeys((BASELINE, *(options.ways or case.ways)))))
        if options.tiny:
            case = replace(case, sizes=case.sizes | TINY, sequence_length=TINY_LENGTH)
        rows = Trial(case, device, options.warmup, options.steps).rows(in_turn=options.in_turn)
        models[name] = {**asdict(case), "rows": rows}
        print(f"{name}, batch {case.batch_size}, sequence {case.sequence_length}\n\n{table(rows)}\n", flush=True)
        if options.json:  # after each model: what comes may be interrupted
            options.json.parent.mkdir(parents=True, exist_ok=True)
            results = {"command": shlex.join(sys.argv), "machine": machine, "models": models}
            options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(", ".join(f"{key} {value}" for key, value in machine.items() if value is not None))


if __name__ == "__main__":
    main()
