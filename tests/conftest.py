"""For every test: which tier it is in, and where kernels run. tests/README.md says how to choose a tier."""

import functools
import gc
import importlib.util
import os

import hypothesis
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when triton is imported
    # Else each seed waits for devices that are not here, with the stack that it came from: that took 3 ms.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None
torch.set_num_threads(1)  # the tensors are small, and threads of several workers get in each other's way

CAN_INTERPRET = not HAS_CUDA and importlib.util.find_spec("triton") is not None


hypothesis.settings.register_profile("quick", max_examples=30, deadline=None)
hypothesis.settings.register_profile(
    "ci", max_examples=200, deadline=None, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.register_profile("exhaustive", max_examples=500, deadline=None)


def pytest_xdist_auto_num_workers():
    """As many processes as ``-n auto`` stands for. On CUDA one: tests measure its memory, and some need much of it."""
    return 0 if HAS_CUDA else min(os.cpu_count() or 1, 4)


@pytest.hookimpl(tryfirst=True)  # hypothesis loads the profile that the command line names afterwards
def pytest_configure(config):
    hypothesis.settings.load_profile("quick" if config.option.markexpr else "exhaustive")


@pytest.hookimpl(tryfirst=True)  # pytest deselects by markers afterwards
def pytest_collection_modifyitems(config, items):
    _mark_slow_under_the_interpreter(items)
    if not HAS_CUDA:
        _deselect(config, items, "gpu")


def pytest_collection_finish():
    """Modules and tests live to the end: the garbage collector, which tests often call, need not look at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _what_a_file_leaves_behind_lives_on():
    """So the garbage collector need not look at it either: compilers' caches would make each file slower than the last.

    By the end of all tests, the collector would take a tenth of their time.
    """
    yield
    gc.collect()
    gc.freeze()


def _mark_slow_under_the_interpreter(items):
    """Of each test the interpreter runs the first case by default. The others, with other numbers, are slow.

    Of tests over ops it runs the first case of every third op, of the next test those of the next ops: each op has its
    turn in a third of the tests. Errors are compared for all.
    """
    seen, tests, ops = set(), {}, {}
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if params.get("device") != "interpreter":
            continue
        test, op = item.nodeid.partition("[")[0], str(params.get("case"))
        turn = tests.setdefault(test, len(tests)) + ops.setdefault(op, len(ops))
        is_due = "case" not in params or turn % 3 == 0 or "::test_errors_" in test
        if (test, op) in seen or not is_due:
            item.add_marker(pytest.mark.slow)
        seen.add((test, op))


def _deselect(config, items, marker):
    gone = [item for item in items if marker in item.keywords]
    items[:] = [item for item in items if marker not in item.keywords]
    config.hook.pytest_deselected(items=gone)


@pytest.fixture(
    params=["reference", *(["interpreter"] if CAN_INTERPRET else []), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request, monkeypatch):
    """Where to run an op, in each way it can: as plain PyTorch, interpreted on the CPU, compiled on CUDA."""
    if request.param == "interpreter":
        _interpret_kernels(monkeypatch)
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture
def deterministic(monkeypatch):
    """Torch's algorithms give the same bits each time, on CUDA too."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _interpret_kernels(monkeypatch):
    from triton.runtime import interpreter

    from recompute.kernels import launch

    def uses_triton(*tensors):
        return all(tensor is None or tensor.dtype in launch.TRITON_DTYPES for tensor in tensors)

    _change_the_language_once()
    convert = interpreter._convert_float

    # Conversions that the interpreter gets wrong: it cuts bits off for bfloat16, scales bfloat16's subnormal numbers,
    # and in fp8 carries into the wrong bit and makes a number of NaN. PyTorch converts as GPUs do.
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}

    def convert_as_gpus_do(data, source, target, mode):
        if str(source) in dtypes and str(target) in dtypes:
            converted = torch.tensor(data).view(dtypes[str(source)]).to(dtypes[str(target)])
            return converted.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[converted.itemsize]).numpy()
        return convert(data, source, target, mode)

    monkeypatch.setattr(launch, "uses_triton", uses_triton)
    monkeypatch.setattr(interpreter, "_convert_float", convert_as_gpus_do)


@functools.cache
def _change_the_language_once():
    """Have the interpreter change Triton's language once, and not for each call: that takes most of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_language, patched = interpreter._patch_lang, set()

    def patch_language_once(function):
        seen = function.__globals__.values()
        modules = frozenset(each for each in (tl, tl.core) if any(each is value for value in seen))
        if modules not in patched:
            patched.add(modules)
            patch_language(function)
            tl.tensor.__index__ = lambda self: self.handle.data.item()  # Triton 3.6 does what NumPy 2.4 refuses
        return interpreter._LangPatchScope()  # of which nothing is to be restored

    interpreter._patch_lang = patch_language_once
