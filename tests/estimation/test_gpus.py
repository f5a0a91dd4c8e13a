"""GPUs go by the names that people and CUDA give them, or by the figures of a data sheet."""

import pytest
import torch

import recompute
from recompute.errors import ModelError
from recompute.estimation.gpus import GPUS, find_gpu, read_gpu

SPELLED = {
    "A100": ["a100", "A100 80GB", "NVIDIA A100-SXM4-80GB", "A100-80g"],
    "A100 PCIe": ["NVIDIA A100-PCIE-80GB", "a100 pcie"],
    "A100 40GB": ["NVIDIA A100-SXM4-40GB", "A100-PCIE-40GB", "a100 40 GiB"],
    "H100": ["h100", "H100 SXM", "NVIDIA H100 80GB HBM3"],
    "H100 PCIe": ["NVIDIA H100 PCIe", "h100-pcie"],
    "H200": ["h200", "NVIDIA H200"],
    "B200": ["NVIDIA B200", "b200"],
    "L4": ["NVIDIA L4", "l4"],
    "L40S": ["l40s", "NVIDIA L40S"],
    "A10": ["NVIDIA A10", "a10"],
    "RTX 4090": ["rtx4090", "RTX 4090", "4090", "NVIDIA GeForce RTX 4090"],
    "RTX 3090": ["NVIDIA GeForce RTX 3090", "rtx-3090"],
    "MI300X": ["AMD Instinct MI300X", "mi300x"],
}


def test_each_gpu_has_the_names_that_it_goes_by():
    assert SPELLED.keys() == GPUS.keys()
    for name, spellings in SPELLED.items():
        assert {find_gpu(spelling) for spelling in (name, *spellings)} == {GPUS[name]}, name


def test_the_figures_are_possible():
    for gpu in GPUS.values():
        assert gpu.float_flops < gpu.half_flops
        assert 50 < gpu.half_flops / gpu.bandwidth < 500, "operations a byte"
        assert gpu.capacity_nbytes % 2**30 == 0


def test_a_name_that_is_none_is_told_with_the_nearest_and_what_the_caller_can_pass_instead():
    found, other = r".*found '4080' \(did you mean 'RTX 4090'\?\)", r"\. Any other by its data sheet: "
    with pytest.raises(ModelError, match=f"^--gpu: {found}{other}--gpu-memory"):
        read_gpu("4080")
    with pytest.raises(ModelError, match=rf"^device: {found}{other}a recompute\.estimation"):
        recompute.plan(torch.nn.Linear(2, 2), torch.ones(1, 2), budget="1GiB", device="4080")


def test_figures_describe_a_gpu_or_replace_those_of_one():
    found = read_gpu(None, memory="24GiB", tflops=165, bandwidth="1008GB/s")
    assert found is not None
    assert (found.capacity_nbytes, found.half_flops, found.bandwidth) == (24 << 30, 165e12, 1008e9)
    smaller = read_gpu("h100", memory="40GiB")
    assert smaller == GPUS["H100"]._replace(capacity_nbytes=40 << 30)
    assert read_gpu(None) is None


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"memory": "24GiB"}, "--gpu-tflops, --gpu-bandwidth are missing"),
        ({"memory": "lots", "tflops": 1.0, "bandwidth": "1GB/s"}, "--gpu-memory: expected something like 24GiB; found"),
        ({"memory": "1GiB", "tflops": 1.0, "bandwidth": "fast"}, "--gpu-bandwidth: expected something like 1008GB/s"),
        ({"memory": "1GiB", "tflops": -1.0, "bandwidth": "1GB/s"}, "--gpu-tflops: expected a positive number"),
    ],
)
def test_figures_that_are_none_are_told(figures, message):
    with pytest.raises(ModelError, match=message):
        read_gpu(None, **figures)
