"""Static bytes by hand: recipes, optimizers, and what each sharding divides and adds."""

import pytest

from recompute.errors import EstimateError
from recompute.estimation.static_memory import (
    DTYPE_RECIPES,
    OPTIMIZERS,
    SHARDINGS,
    ParameterShape,
    check_sharding,
    read_option,
    shard_shapes,
    share_of,
    static_nbytes,
)

LAYERS = [ParameterShape((1024, 512), unit=f"layers.{index}") for index in range(4)]
HEAD = ParameterShape((2048, 512))
MODEL = [HEAD, *LAYERS]
COUNT = 2048 * 512 + 4 * 1024 * 512


def static(dtype="bfloat16", optimizer="adamw", parameters=MODEL, **shared):
    return static_nbytes(parameters, recipe=DTYPE_RECIPES[dtype], optimizer=OPTIMIZERS[optimizer], **shared)


def bytes_a_parameter(found):
    return [nbytes / COUNT for nbytes in (found.parameters, found.gradients, found.optimizer)]


@pytest.mark.parametrize(
    ("dtype", "parameter", "gradient", "optimizer"),
    [("bfloat16", 2, 2, 4), ("bfloat16-autocast", 4, 4, 8), ("bfloat16-mixed", 2, 2, 12), ("float32", 4, 4, 8)],
)
def test_bytes_of_a_parameter_under_adamw(dtype, parameter, gradient, optimizer):
    assert bytes_a_parameter(static(dtype)) == [parameter, gradient, optimizer]
    assert static(dtype).buffers == {}


def test_mixed_precision_takes_sixteen_bytes_a_parameter_and_zero_3_divides_all_of_them():
    assert static("bfloat16-mixed").total == 16 * COUNT
    for devices in (2, 8, 64):
        found = static("bfloat16-mixed", sharding="zero3", devices=devices)
        assert sum(bytes_a_parameter(found)) == 16 / devices


@pytest.mark.parametrize(
    ("sharding", "parameters", "gradients", "optimizer"),
    [("ddp", 2, 2, 12), ("zero1", 2, 2, 3), ("zero2", 2, 0.5, 3), ("zero3", 0.5, 0.5, 3), ("fsdp2", 0.5, 0.5, 3)],
)
def test_what_each_sharding_divides(sharding, parameters, gradients, optimizer):
    """The table of ZeRO's paper, figure 1, for 4 devices."""
    found = static("bfloat16-mixed", sharding=sharding, devices=4)
    assert bytes_a_parameter(found) == [parameters, gradients, optimizer]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_one_device_shares_nothing_and_needs_no_buffers(sharding):
    assert static(sharding=sharding) == static()


def test_the_buffers_that_shardings_add():
    layer, head = 1024 * 512, 2048 * 512

    def added(sharding, dtype="bfloat16"):
        return {name: each.nbytes for name, each in static(dtype, sharding=sharding, devices=4).buffers.items()}

    assert added("ddp") == {"DDP's buckets": 2 * COUNT}
    assert added("zero2") == {"reduce bucket": 2 * COUNT, "gather bucket": 2 * COUNT}  # smaller than its largest size
    assert added("fsdp2") == {
        "gathered parameters": 2 * (head + 2 * layer),
        "gradients to reduce": 2 * (head + layer),
    }
    assert added("fsdp2", "bfloat16-autocast") == added("fsdp2")  # what is gathered is cast first
    found = static(parameters=[ParameterShape((1_000_000, 2_000))], sharding="zero3", devices=8)
    assert {name: each.nbytes for name, each in found.buffers.items()} == {
        "gathered parameters": 2 * 10**9,
        "reduce bucket": 10**9,
    }


def test_buffers_live_in_their_phases_alone():
    found = static(sharding="fsdp2", devices=4)
    own = found.parameters + found.optimizer
    gathered, reduced = (found.buffers[name].nbytes for name in ("gathered parameters", "gradients to reduce"))
    assert found.in_phase("forward") == own + gathered
    assert found.in_phase("backward") == own + gathered + reduced
    assert found.in_phase("optimizer") == own


@pytest.mark.parametrize(("name", "states"), [("sgd", 0), ("sgd-momentum", 1), ("adamw-fused", 2), ("adamw-loop", 2)])
def test_states_of_optimizers(name, states):
    assert static(optimizer=name).optimizer == 2 * states * COUNT
    assert static("float32", optimizer=name).optimizer == 4 * states * COUNT


def test_states_of_eight_bits_have_a_scale_a_block_and_small_ones_stay_wide():
    found = static(optimizer="adamw-8bit", parameters=[ParameterShape((300, 300)), ParameterShape((4095,))])
    assert found.optimizer == 2 * (90_000 + 352 * 4) + 2 * 4 * 4095


def test_frozen_parameters_have_neither_gradients_nor_states():
    found = static("float32", parameters=[ParameterShape((100,), trains=False), ParameterShape((10,))])
    assert (found.parameters, found.gradients, found.optimizer) == (440, 40, 80)


def test_rows_are_divided_up():
    parameters = [ParameterShape((3, 10), unit="layers.0"), ParameterShape(())]
    assert shard_shapes(parameters, "fsdp2", 2) == [(2, 10), ()]
    assert shard_shapes(parameters, "zero1", 2) == [(16,)]
    assert shard_shapes(parameters, "ddp", 2) == [(3, 10), ()]
    assert share_of("zero2", 8)(9) == 2
    assert share_of("zero1", 8)(9) == 9


@pytest.mark.parametrize(
    ("sharding", "devices", "message"),
    [
        ("none", 0, "devices: expected a whole number, at least 1; found 0"),
        ("fsdp2", -1, "devices: expected a whole number, at least 1; found -1"),
        ("none", 4, "devices: found 4 devices with sharding none; expected sharding to be one of ddp, zero1"),
        ("fdsp2", 4, r"sharding: expected one of none, ddp, .*; found 'fdsp2' \(did you mean 'fsdp2'\?\)"),
    ],
)
def test_shardings_that_there_are_not(sharding, devices, message):
    with pytest.raises(EstimateError, match=message):
        check_sharding(sharding, devices)


def test_names_are_suggested():
    with pytest.raises(EstimateError, match=r"optimizer: .* found 'adamv' \(did you mean 'adamw'\?\)"):
        read_option("optimizer", "adamv", OPTIMIZERS)


@pytest.mark.parametrize(
    ("what", "options", "names", "meant"),
    [
        ("dtype", DTYPE_RECIPES, ["bf16"], "bfloat16"),
        ("dtype", DTYPE_RECIPES, ["FP32"], "float32"),
        ("dtype", DTYPE_RECIPES, ["bf16_mixed"], "bfloat16-mixed"),
        ("dtype", DTYPE_RECIPES, ["amp"], "bfloat16-autocast"),
        ("optimizer", OPTIMIZERS, ["adam", "AdamW", "adamw_torch"], "adamw"),
        ("optimizer", OPTIMIZERS, ["adam8bit", "adamw_bnb_8bit"], "adamw-8bit"),
        ("sharding", SHARDINGS, ["fsdp", "FSDP", "FSDP2", "fsdp-2"], "fsdp2"),
        ("sharding", SHARDINGS, ["ZeRO-3", "zero_3", "zero 3"], "zero3"),
    ],
)
def test_what_people_call_an_option_is_that_option(what, options, names, meant):
    assert {read_option(what, name, options) for name in names} == {meant}
