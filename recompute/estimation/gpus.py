"""GPUs by their data sheets, under the names that people and CUDA give them."""

from __future__ import annotations

import re
from typing import NamedTuple

from recompute.errors import BudgetError, ModelError
from recompute.policy.document import nearest
from recompute.units import parse_budget

_GIB = 2**30


class Gpu(NamedTuple):
    """A GPU's limits, by its data sheet."""

    half_flops: float
    """FLOPs a second in bfloat16 and float16, without sparsity, with sums in float32."""
    float_flops: float
    """FLOPs a second in float32."""
    bandwidth: float
    """Bytes a second of its memory."""
    capacity_nbytes: int
    """About the bytes of memory that CUDA reports."""
    capability: tuple[int, int] = (9, 0)
    """CUDA's compute capability, on which kernels depend; for an AMD GPU one with about the same kernels."""
    name: str = "a GPU"
    link: float | None = None
    """Bytes a second to its host, and as many back at once; None where that is not known."""


_PCIE = {4: 32e9, 5: 64e9}
"""Bytes a second each way over the 16 lanes of a generation of PCI Express."""


def _gpu(
    name: str, half_tflops: float, float_tflops: float, tera_bandwidth: float, gib: int, pcie: int, at: tuple[int, int]
) -> Gpu:
    return Gpu(half_tflops * 1e12, float_tflops * 1e12, tera_bandwidth * 1e12, gib * _GIB, at, name, _PCIE[pcie])


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("H200", 989, 67, 4.8, 139, 5, (9, 0)),
        _gpu("H100", 989, 67, 3.35, 79, 5, (9, 0)),
        _gpu("H100 PCIe", 756, 51, 2.0, 79, 5, (9, 0)),
        _gpu("A100", 312, 19.5, 2.04, 79, 4, (8, 0)),
        _gpu("A100 PCIe", 312, 19.5, 1.935, 79, 4, (8, 0)),
        _gpu("A100 40GB", 312, 19.5, 1.555, 39, 4, (8, 0)),
        _gpu("B200", 2250, 75, 8.0, 178, 5, (10, 0)),
        _gpu("L40S", 362, 91.6, 0.864, 44, 4, (8, 9)),
        _gpu("L4", 121, 30.3, 0.3, 22, 4, (8, 9)),
        _gpu("A10", 125, 31.2, 0.6, 22, 4, (8, 6)),
        _gpu("RTX 4090", 165, 82.6, 1.008, 23, 4, (8, 9)),
        _gpu("RTX 3090", 71, 35.6, 0.936, 23, 4, (8, 6)),
        _gpu("MI300X", 1307, 163, 5.3, 191, 5, (8, 0)),
    )
}
"""Teraflops dense, terabytes a second, GiB, the generation of PCI Express, of 16 lanes, and the compute capability.

H100 and A100 without a suffix are the SXM forms, A100 with 80 GB.

Sources: NVIDIA's data sheets "H200 Tensor Core GPU", "H100 Tensor Core GPU" (SXM and PCIe), "A100 Tensor Core GPU"
(SXM and PCIe, 40 and 80 GB), "HGX B200" (an eighth of it; bandwidth and PCI Express as in "DGX B200"), "L40S", "L4" and
"A10", where figures with sparsity are halved; the white papers "NVIDIA Ada GPU Architecture" (RTX 4090) and "NVIDIA
Ampere GA102 GPU Architecture" (RTX 3090), in both FP16 with FP32 accumulate; AMD's data sheet "Instinct MI300X
Accelerator". Data sheets add up both directions of PCI Express: 128 GB/s for generation 5, 64 GB/s for 4.
"""

_MAKERS = re.compile(r"nvidia|geforce|tesla|amd|instinct|radeon|tensor|core|gpu|hbm\d*e?|sxm\d*|oam")
_SPELLINGS = {
    "a10080gb": "A100",
    "a100pcie80gb": "A100 PCIe",
    "a100pcie40gb": "A100 40GB",
    "h10080gb": "H100",
    "h100pcie80gb": "H100 PCIe",
    "h200141gb": "H200",
    "b200180gb": "B200",
    "4090": "RTX 4090",
    "3090": "RTX 3090",
    "mi300": "MI300X",
}


def find_gpu(name: str, option: str = "gpu", other: str = "") -> Gpu:
    """The GPU of this name. Case and its maker's additions do not matter: "rtx4090", "NVIDIA A100-SXM4-80GB".

    Raises ``ModelError`` for one that is not in ``GPUS``. It calls the name ``option``, and says that ``other``
    describes any other GPU by its data sheet.
    """
    key = _key(name)
    known = {_key(each): each for each in GPUS} | _SPELLINGS
    if key not in known:
        guess = nearest(key, known)
        if match := re.search("'(.*)'", guess):
            guess = guess.replace(match[1], known[match[1]])
        by_figures = other and f". Any other by its data sheet: {other}"
        raise ModelError(f"{option}: expected one of {', '.join(GPUS)}; found {name!r}{guess}{by_figures}")
    return GPUS[known[key]]


def _key(name: str) -> str:
    plain = re.sub("[^a-z0-9]", "", _MAKERS.sub("", name.lower()))
    return re.sub(r"(\d{2,})gi?b?$", r"\1gb", plain)


def read_gpu(
    name: str | None, *, memory: str | None = None, tflops: float | None = None, bandwidth: str | None = None
) -> Gpu | None:
    """The GPU that a command line describes: by name, by figures, or by a name with some figures replaced.

    memory: such as "24GiB".
    tflops: without sparsity, in the dtype that is trained in.
    bandwidth: such as "1008GB/s".

    Returns None where nothing is given. Raises ``ModelError`` for what cannot be read, or is not enough.
    """
    figures = {"--gpu-memory": memory, "--gpu-tflops": tflops, "--gpu-bandwidth": bandwidth}
    missing = [option for option, value in figures.items() if value is None]
    if name is None and len(missing) == len(figures):
        return None
    if name is None and missing:
        raise ModelError(f"gpu: expected --gpu, or all of {', '.join(figures)}; {', '.join(missing)} are missing")
    gpu = Gpu(0.0, 0.0, 0.0, 0, name="GPU of these figures")
    if name is not None:
        gpu = find_gpu(name, "--gpu", "--gpu-memory 24GiB --gpu-tflops 165 --gpu-bandwidth 1008GB/s")
    if tflops is not None:
        if not 0 < tflops < 1e6:
            raise ModelError(f"--gpu-tflops: expected a positive number of TFLOP/s, dense; found {tflops:g}")
        gpu = gpu._replace(half_flops=tflops * 1e12, float_flops=tflops * 1e12)
    if bandwidth is not None:
        gpu = gpu._replace(bandwidth=float(read_size("--gpu-bandwidth", bandwidth.removesuffix("/s"), "1008GB/s")))
    if memory is not None:
        gpu = gpu._replace(capacity_nbytes=read_size("--gpu-memory", memory, "24GiB"))
    return gpu


def read_size(option: str, text: str, example: str) -> int:
    """The bytes that an option of a command line names. Raises ``ModelError`` with ``example`` if it names none."""
    try:
        return parse_budget(text)
    except BudgetError as error:
        raise ModelError(f"{option}: expected something like {example}; found {text!r}") from error
