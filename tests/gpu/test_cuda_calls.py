"""Programs with CUDA kernels, run on a CPU: XLA calls the same handler as on a GPU, and a stand-in
for the driver runs the kernels' sources.
"""

import ctypes
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal, jaxprs_in_params

import jaxllm
from jaxllm.errors import ConfigError
from jaxllm.ops import cuda, flash, native
from jaxllm.ops.cuda import compiler, driver, nvrtc
from jaxllm.ops.cuda.launch import Card, Launch, Rows, kernel_source, plan_launch
from jaxllm.ops.target import Program, trace_for
from jaxllm.weights.formats import as_weight, for_accelerator, parse_format
from jaxllm.weights.linear import linears
from jaxllm.weights.paths import map_leaves
from jaxllm.weights.precision import Precision
from scripts.benchmarks import gpu_kernels
from tests.gpu.cuda_stand_in import Array, Kernels, Product
from tests.tiny_models import random_model, tokens

MORE = ("bfloat16", "int8", "bf16-packed", "bfloat16-2:4", "int8-2:4", "q4_k", "q5_k", "q6_k")
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(driver.Config),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


@pytest.fixture
def launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    """Let kernels run on this CPU; return what each launch does before and after its product."""
    if (loaded := native.load_kernels()) is None:
        pytest.skip("the native library was not built")
    kernels = Kernels(tmp_path_factory.mktemp("kernels"))
    libraries, plans, ways = list[Any](), list[Launch](), list[str]()
    done, mistakes = list[str](), list[str]()
    memory = Array(0, None, 1 << 62)  # all of it, as far as the stand-in looks

    @LAUNCH
    def launch(config: Any, kernel: int, arguments: Any, extra: Any) -> int:
        grid, shared = config.contents.grid[0], config.contents.shared_bytes
        product = ctypes.cast(arguments[0], ctypes.POINTER(Product))
        anywhere = ctypes.byref(memory)
        if mistake := libraries[kernel - 1].launch(product, grid, shared, 1, anywhere, 1):
            mistakes.append(mistake.decode())
        attributes = [config.contents.attributes[i].id for i in range(config.contents.count)]
        plan = plans[kernel - 1]
        if attributes != [4] * (plan.cluster > 1) + [6] * plan.is_early:  # as in cuda.h
            mistakes.append(f"attributes {attributes} of {plan}")
        done.append(ways[kernel - 1])
        return 0

    def prepare_launch(source: str, launched: Launch) -> dict[str, np.generic]:
        libraries.append(kernels.compile(source))
        plans.append(launched)
        ways.append(" ".join(re.findall("#define JAXLLM_(?:PRO|EPI)LOGUE (.*)", source)))
        key = compiler.find_key(source, "cpu")
        loaded.jaxllm_cuda_add(ctypes.c_int64(key), ctypes.c_void_p(len(libraries)), launch)
        return cuda.describe_launch(key, launched, launched.capped_grid(2))

    capsule = jax.ffi.pycapsule(loaded.jaxllm_cuda_product_cpu)
    jax.ffi.register_ffi_target(cuda.TARGET, capsule, platform="cpu")
    monkeypatch.setattr(cuda, "find_problem", lambda: None)
    monkeypatch.setattr(cuda, "PLATFORM", "cpu")
    monkeypatch.setattr(cuda, "prepare_launch", prepare_launch)
    jax.clear_caches()
    yield done
    jax.clear_caches()
    assert mistakes == []


def _weight(fmt: str, rows: int, columns: int) -> Any:
    weight = jax.random.normal(jax.random.key(rows), (rows, columns), jnp.bfloat16)
    if fmt.endswith("2:4"):
        weight = jnp.where(jnp.arange(columns)[None] % 4 % 3 == 0, weight, jnp.bfloat16(0))
    return weight if fmt == "bfloat16" else for_accelerator(parse_format(fmt).quantize(weight))


@pytest.mark.parametrize(
    "fmt",
    ["int4-g64-zp-f16", "nf4", *(pytest.param(x, marks=pytest.mark.more) for x in MORE)],
)
def test_linears_equal_plain_products(launches: list[str], fmt: str) -> None:
    """Weights of whole tiles share a launch; XLA multiplies by the others. Levels of nf4 are
    rounded to bfloat16.
    """
    columns = 256 if fmt in ("nf4", "bf16-packed") or fmt.endswith("_k") else 200
    weights = [_weight(fmt, rows, columns) for rows in (64, 32, 20)]
    x_RI = jax.random.normal(jax.random.key(0), (3, columns), jnp.bfloat16)
    products = jax.block_until_ready(linears(x_RI, [(weight, None) for weight in weights]))
    assert len(launches) == 1
    for weight, y in zip(weights, products, strict=True):
        dense = np.asarray(as_weight(weight).to_dense(), np.float64)
        expected = np.asarray(x_RI, np.float64) @ dense.T
        is_rounded = fmt == "nf4" or y.shape[1] == 20
        np.testing.assert_allclose(y, expected, atol=0.2 if is_rounded else 1e-4)


def test_packed_rows_of_many_escapes_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels add the escapes of a row one by one, so there may not be many. Files do not have what
    only kernels read.
    """
    monkeypatch.setattr(cuda, "find_problem", lambda: None)
    weight = jax.random.normal(jax.random.key(0), (128, 4096), jnp.bfloat16)
    some, many = (parse_format("bf16-packed").quantize(weight.at[0, :n].set(0)) for n in (40, 80))
    assert cuda.fits((64, 4096), [for_accelerator(some).cuda_matrix()])
    assert for_accelerator(some).arrays().keys() == some.arrays().keys()
    np.testing.assert_array_equal(for_accelerator(many), weight.at[0, :80].set(0))


def test_each_of_a_batch_is_a_row(launches: list[str]) -> None:
    """Under `vmap` over the inputs there is one launch, with as many rows."""
    weight = _weight("int8", 32, 64)
    x_BRI = jax.random.normal(jax.random.key(0), (3, 2, 64), jnp.bfloat16)
    y = jax.vmap(lambda x_RI: linears(x_RI, [(weight, None)])[0])(x_BRI)
    together = linears(x_BRI.reshape(6, 64), [(weight, None)])[0]
    np.testing.assert_array_equal(y.reshape(6, 32), together)
    assert len(launches) == 2


def _tiny_model(family: str, formats: Mapping[str, str]) -> tuple[Any, Any]:
    """Return a model of one layer. formats: of weights that are no bfloat16, by a part of their
    path.
    """
    model, params = random_model(
        family, precision=Precision.uniform("bfloat16"), spread=0.1, hidden_size=64,
        intermediate_size=96, vocab_size=128, head_dim=8, num_hidden_layers=1,
    )  # fmt: skip

    def store(path: str, x: jax.Array) -> Any:
        fmt = next((formats[part] for part in formats if part in path), None)
        return parse_format(fmt).quantize(x) if fmt else x.astype(jnp.bfloat16)

    return model, map_leaves(store, params)


def _take_step(family: str, formats: Mapping[str, str], **options: Any) -> jax.Array:
    """Return the logits of a step of a tiny model."""
    model, params = _tiny_model(family, formats)
    cache, token_B = jaxllm.init_cache(model, 2, 16), jnp.array([3, 1])
    return jaxllm.decode_step(model, params, cache, token_B, **options).logits


NORMED, GATED, ADDED = "RmsNorm Rounded", "RmsNorm Gated<Silu>", "Plain Residual"
LAYERS = [  # family, formats, and the launches of a layer
    ("llama", {"k_proj": "int8"}, [NORMED, NORMED, ADDED, GATED, ADDED]),
    ("llama", {"up_proj": "int8"}, [NORMED, ADDED, NORMED, NORMED, ADDED]),
    ("qwen3", {}, [NORMED, ADDED, GATED, ADDED]),
    ("gemma2", {}, ["Plain Float32"] * 4),
]


@pytest.mark.parametrize(
    ("family", "formats", "layer"),
    [LAYERS[0], *(pytest.param(*case, marks=pytest.mark.more) for case in LAYERS[1:])],
)
def test_step_equals_plain_step(
    launches: list[str], monkeypatch: pytest.MonkeyPatch, family: str,
    formats: Mapping[str, str], layer: list[str],
) -> None:  # fmt: skip
    """A step with kernels: a layer is four launches that do what is between its products, and the
    final norm and the logits are one. Weights of two formats that multiply the same rows are two.
    """
    with_kernels = jax.block_until_ready(_take_step(family, formats))
    assert launches == [*layer, "RmsNorm Float32"]
    launches.clear()
    read = jax.block_until_ready(_take_step(family, formats, read=["blocks.0.mlp.pre"]))
    assert set(launches) == {"Plain Float32"}  # layers with sites are not fused
    launches.clear()
    monkeypatch.setattr(cuda, "find_problem", lambda: "off")
    jax.clear_caches()
    plain = _take_step(family, formats)
    assert launches == []
    np.testing.assert_allclose(read, plain, atol=0.02)
    np.testing.assert_allclose(with_kernels, plain, atol=0.03)


@pytest.mark.parametrize("rows", [1, 8])
def test_early_launch_has_same_bits(launches: list[str], rows: int) -> None:
    """It differs in when it starts, so in what the driver is given; with and without clusters."""
    matrix = as_weight(_weight("bfloat16", 32, 64)).cuda_matrix()
    x_RI = jax.random.normal(jax.random.key(0), (rows, 64), jnp.bfloat16)
    assert matrix is not None
    late, early = (cuda.launch(x_RI, [matrix], is_early=is_early) for is_early in (False, True))
    np.testing.assert_array_equal(jax.block_until_ready(late), early)
    assert len(launches) == 2


def _find_early(jaxpr: Any, arguments: Iterable[Any], found: list[tuple[bool, bool]]) -> None:
    """Add for each launch whether it is early, and whether its weights are the program's arguments.

    arguments: the variables of `jaxpr` that are.
    """
    arguments = set(arguments)
    for eqn in jaxpr.eqns:
        given = [not isinstance(x, Literal) and x in arguments for x in eqn.invars]
        if eqn.params.get("target_name") == cuda.TARGET:
            attributes = dict(eqn.params["attributes"])
            places = getattr(attributes["places"], "val", attributes["places"])
            read = zip(given, (cuda.POINTERS[i] for i in places), strict=False)  # results are last
            weights = [x for x, name in read if name[:-1] in ("weight", "scale", "zero")]
            found.append((bool(attributes["early"]), all(weights)))
        for inner in jaxprs_in_params(eqn.params):
            skipped = len(eqn.invars) - len(inner.invars)  # an index, or what a condition reads
            _find_early(inner, itertools.compress(inner.invars, given[skipped:]), found)


@pytest.mark.more
def test_weights_of_early_launches_are_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """If asked for, launches in layers are early in programs of ours that are in no other one: no
    kernel of those writes weights.
    """
    programs, choose = list[tuple[Program, Any]](), Program.choose

    def record(program: Program, args: Any) -> Any:
        shapes = jax.tree.map(lambda x: jax.typeof(x) if isinstance(x, jax.Array) else x, args)
        programs.append((program, shapes))
        return choose(program, args)

    monkeypatch.setattr(flash, "find_problem", lambda: "off")
    monkeypatch.setattr(Program, "choose", record)
    model, params = _tiny_model("llama", {"k_proj": "int8"})
    jaxllm.generate(model, params, tokens(2, 5), max_new_tokens=4)
    request = jaxllm.Request(id=0, prompt=[3, 4], max_new_tokens=3)
    assert list(jaxllm.serve(model, params, [request], rows=2, capacity=16))

    def find(mode: str, jitted: Callable[..., Any]) -> list[tuple[bool, bool]]:
        found = list[tuple[bool, bool]]()
        monkeypatch.setenv(cuda.ENV, mode)
        with trace_for("cuda"):
            for program, args in programs:
                jaxpr = jitted(program, args).trace(*args).jaxpr.jaxpr
                _find_early(jaxpr, jaxpr.invars, found)
        return found

    early = [are_arguments for is_early, are_arguments in find("early", choose) if is_early]
    assert len(early) >= 12 and all(early)  # two loops of a layer and the logits
    nested = find("early", lambda program, args: program._plain)
    assert len(nested) >= 12 and not any(is_early for is_early, _ in nested)
    assert not any(is_early for is_early, _ in find("1", choose))
    monkeypatch.setenv("JAXLLM_GPU_OPTIONS", "0")
    assert len(early) == sum(is_early for is_early, _ in find("early", choose))


def test_fields_are_those_of_the_kernels() -> None:
    """The host fills the struct that the kernels read, field by field."""
    text = (compiler.SOURCES / "arguments.h").read_text()
    found = re.findall(r"^  [\w *]+[ *](\w+)(\[WEIGHTS\])?;", text, re.MULTILINE)
    fields = (name + i for name, several in found for i in ("012" if several else ("",)))
    assert tuple(fields) == (*cuda.POINTERS, *cuda.NUMBERS)


def test_why_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are off by default, and each reason for doing without them has its words."""
    monkeypatch.delenv(cuda.ENV, raising=False)
    assert "JAXLLM_GPU_KERNELS=1 turns them on" in str(cuda.find_problem())
    monkeypatch.setenv(cuda.ENV, "1")
    assert cuda.find_problem() == "there is no NVIDIA GPU"
    with trace_for("cuda"):
        assert cuda.find_problem() is None or not native.is_enabled()
        monkeypatch.setattr(cuda, "is_present", lambda: True)
        monkeypatch.setattr(nvrtc, "load_nvrtc", lambda: None)
        assert "pip install nvidia-cuda-nvrtc" in str(cuda.find_problem())


@pytest.mark.skipif(nvrtc.load_nvrtc() is None, reason="NVRTC is not installed")
def test_kernel_compiles_without_a_gpu() -> None:
    """NVRTC finds the sources and makes an ELF file of the kernel's machine code."""
    launch = plan_launch(Rows(4, 64), 1, 2048, 2048, Card(132, 232448, (9, 0)))
    assert launch is not None
    source = kernel_source(Rows(4, 64), launch, "Plain", "Float32")
    code = compiler.compile_kernel(source, "sm_90a")
    assert code.startswith(b"\x7fELF") and b"jaxllm_product" in code
    with pytest.raises(ConfigError, match="JAXLLM_GPU_KERNELS=0 does without"):
        compiler.compile_kernel("no C++", "sm_90a")


@pytest.mark.more
def test_benchmark_checks_and_times(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows, of all formats, for what would be run on a GPU; a wrong kernel ends the run."""
    monkeypatch.setenv(cuda.ENV, "1")
    monkeypatch.setattr(gpu_kernels, "ROWS", (1, 3))
    monkeypatch.setattr(gpu_kernels, "CACHE_BYTES", 1)
    rows = list(gpu_kernels.check([(32, 256)]))
    cases = itertools.product(gpu_kernels.FORMATS, ("1", "3"))
    assert [tuple(row.strip("| ").split(" | ")[::2][:2]) for row in rows] == list(cases)
    assert all(row.endswith("True |") for row in rows)
    monkeypatch.setattr(gpu_kernels, "FORMATS", ("int8",))
    assert len(list(gpu_kernels.time_products([(32, 64)]))) == 2
    wrong = lambda x, weight: 1.01 * linears(x, [(weight, None)])[0]  # noqa: E731
    monkeypatch.setattr(gpu_kernels, "multiply", wrong)
    with pytest.raises(AssertionError, match="a kernel is wrong"):
        list(gpu_kernels.check([(32, 64)]))
