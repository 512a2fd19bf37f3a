"""The CUDA products of decoding, run on a CPU from their own sources (stand_in/stand_in.h)."""

import itertools
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.cuda.launch import Card, Launch, Rows, kernel_source, plan_launch
from jaxllm.weights.formats import parse_format
from jaxllm.weights.types.block_weight import BLOCK_TYPES, BlockWeight
from jaxllm.weights.types.nf4 import LEVELS
from tests.gpu.cuda_stand_in import BF16, CSRC, Kernels, Variant

COLUMNS = 1400  # in parts of unequal size, and not of whole units in bfloat16
OUTPUTS = 128
DAILY = [Rows(16), Rows(8), Rows(4, 64, "float16", True)]
NF4 = Rows(4, 64, struct="Nf4")
SPARSE = {"bfloat16": Rows(8, struct="Sparse<16>"), "int8": Rows(4, struct="Sparse<8>")}
PACKED = Rows(8, struct="PackedBFloat16")
SUPER = {
    "Q4_K": Rows(4, 32, struct="Q4K"),
    "Q5_K": Rows(4, 32, struct="Q5K"),
    "Q6_K": Rows(4, 16, struct="Q6K"),
}
MORE = [NF4, PACKED, *SPARSE.values(), *SUPER.values(), Rows(8, 32), Rows(4, 128, "float16", True)]
FORMATS = [
    *(rows := [*DAILY, *MORE]),
    *(
        format
        for scale in ("float16", "float32")
        for format in (
            *(Rows(8, group, scale) for group in (0, 32, 64, 128)),
            *(Rows(4, group, scale, zero) for group in (32, 64, 128) for zero in (False, True)),
        )
        if format not in rows
    ),
]


def _formats(daily: Sequence[Rows], more: Sequence[Rows]) -> list[Any]:
    """Return all formats, named as in C++; those of neither list are for `make test-full`."""
    full, some = [pytest.mark.full], [pytest.mark.more]
    marks = {
        format: [] if format in daily else some if format in more else full for format in FORMATS
    }
    return [pytest.param(x, id=x.source, marks=marks[x]) for x in FORMATS]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("variants"))


class Weight(NamedTuple):
    """A random weight."""

    arrays: dict[str, np.ndarray]  # as stored: weight, scale, zero
    dense: np.ndarray  # float64 [O, K]

    def fields(self, index: int = 0) -> dict[str, np.ndarray]:
        """Return its arrays as those of the kernel's weight of this index."""
        return {f"{name}{index}": array for name, array in self.arrays.items()}


def _random_weight(rows: Rows, outputs: int, columns: int, seed: int = 0) -> Weight:
    rng = np.random.default_rng(seed)
    if rows.bits == 16:
        weight = rng.normal(size=(outputs, columns)).astype(BF16)
        return Weight({"weight": weight}, weight.astype(np.float64))
    width = -(-columns // 128) * 128
    for dtype, format in SPARSE.items():
        if rows == format:
            kept = rng.random((outputs, columns // 4, 4)).argsort(axis=2) < 2
            dense = rng.normal(size=(outputs, columns)) * kept.reshape(outputs, columns)
            stored = parse_format(f"{dtype}-2:4").quantize(jnp.asarray(dense.astype(BF16)))
            arrays = stored.cuda_matrix().arrays
            dense = np.asarray(stored.to_dense(), np.float64)
            return Weight({name: np.asarray(x) for name, x in arrays.items()}, dense)
    if rows == PACKED:
        dense = rng.normal(size=(outputs, width))
        dense *= rng.choice([1, 1e-9, 1e5], dense.shape, p=[0.99, 0.005, 0.005])  # escapes
        dense[:, columns:] = 1
        packed = parse_format("bf16-packed").quantize(jnp.asarray(dense.astype(BF16)))
        arrays = packed.list_escapes().cuda_matrix().arrays
        dense = np.asarray(packed.to_dense(), np.float64)[:, :columns]
        return Weight({name: np.asarray(x) for name, x in arrays.items()}, dense)
    for type, format in SUPER.items():
        if rows == format:
            return _random_blocks(type, outputs, columns, rng)
    low = -(1 << rows.bits - 1)
    code = rng.integers(low, -low, (outputs, width)).astype(np.int8)
    group = rows.group or width
    scale = rng.uniform(0.5, 1.5, (outputs, width // group)) * rng.choice([-1, 1], (outputs, 1))
    scale = scale.astype(rows.scale)
    zero = rng.integers(0, 16, scale.shape).astype(np.uint8)
    centered = code.astype(np.float64)
    if rows.has_zero:
        centered += 8 - np.repeat(zero.astype(np.float64), group, axis=1)
    if rows == NF4:
        centered = np.array(LEVELS).astype(BF16).astype(np.float64)[code + 8]
    code[:, columns:] = 0  # what is there counts for nothing, because x is 0
    if rows == NF4:
        block = (code + 8).reshape(outputs, -1, 2, 32)
        code = (block[:, :, 0] | block[:, :, 1] << 4).reshape(outputs, -1)
    elif rows.bits == 4:
        code = (code[:, ::2] & 15) | (code[:, 1::2] << 4)
    arrays = {"weight": code, "scale": scale} | ({"zero": zero} if rows.has_zero else {})
    dense = centered * np.repeat(scale.astype(np.float64), group, axis=1)
    return Weight(arrays, dense[:, :columns])


def _random_blocks(type: str, outputs: int, columns: int, rng: np.random.Generator) -> Weight:
    """Return a weight of any bytes, but with factors of blocks that give weights of about 1."""
    count, nbytes = -(-columns // 256), BLOCK_TYPES[type].nbytes
    blocks = rng.integers(0, 256, (outputs, count, nbytes), np.uint8)
    for at, size in [(208, 1e-3)] if type == "Q6_K" else [(0, 2e-3), (2, 1e-2)]:
        factor = rng.normal(0, size, (outputs, count, 1)).astype(np.float16)
        blocks[..., at : at + 2] = factor.view(np.uint8)
    rows = jnp.asarray(blocks.reshape(outputs, -1))
    stored = BlockWeight(rows, type, count * 256).split_bytes()
    dense = np.asarray(stored.to_dense(), np.float64)[:, :columns]
    return Weight({name: np.asarray(x) for name, x in stored.data.items()}, dense)


def _random(*shape: int, seed: int = 1, mean: float = 0.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, 1, shape).astype(BF16)


def _error(got: np.ndarray, expected: np.ndarray) -> float:
    difference = np.linalg.norm(got.astype(np.float64) - expected)
    return float(difference / np.linalg.norm(expected))


def _product(
    kernels: Kernels,
    variant: Variant,
    x: np.ndarray,
    weight: Weight,
    clusters: int = 2,
    seed: int = 1,
) -> np.ndarray:
    y = np.full((len(x), len(weight.dense)), np.nan, np.float32)
    kernels.run(variant, clusters, {"y0": y}, seed=seed, x=x, **weight.fields())
    return y


def _check_rows(
    kernels: Kernels, rows: Rows, columns: int, variants: Sequence[tuple[Variant, int]]
) -> None:
    """Compare products of some rows with float64, and their bits with those of one row alone."""
    weight = _random_weight(rows, OUTPUTS, columns)
    x = _random(64, columns)
    expected = x.astype(np.float64) @ weight.dense.T
    alone = [_product(kernels, Variant(rows), x[n : n + 1], weight, 3)[0] for n in range(9)]
    for variant, count in variants:
        y = _product(kernels, variant, x[:count], weight, seed=count)
        assert _error(y, expected[:count]) < 1e-5
        np.testing.assert_array_equal(y[:9], alone[:count])


@pytest.mark.parametrize("rows", _formats(DAILY, MORE))
def test_rows_have_bits_of_one_alone(kernels: Kernels, rows: Rows) -> None:
    """Products equal float64's, and a row's bits are the same in every variant and among others."""
    one = Variant(rows)
    shared = Variant(rows, 2, 2, 4, is_early=False)
    _check_rows(kernels, rows, COLUMNS, [(one, 1), (one, 3), (one, 8), (shared, 9), (shared, 16)])


@pytest.mark.parametrize("rows", _formats([], DAILY))
def test_many_rows_have_bits_of_one_alone(kernels: Kernels, rows: Rows) -> None:
    """The same for clusters of 8, up to 64 rows, and other depths of the ring."""
    variants = [(Variant(rows, 8, 8, 2), 64), (Variant(rows, 8, 4, 5), 17), (Variant(rows, 4), 5)]
    _check_rows(kernels, rows, 1160, variants)
    _check_rows(kernels, rows, 264, variants)  # fewer units than parts


def _normed(x: np.ndarray, norm: np.ndarray, epsilon: float) -> np.ndarray:
    wide = x.astype(np.float64)
    mean = (wide**2).mean(axis=1, keepdims=True)
    return wide * norm.astype(np.float64) / np.sqrt(mean + epsilon)


@pytest.mark.parametrize("cluster", [1, pytest.param(4, marks=pytest.mark.more)])
def test_residual_is_added(kernels: Kernels, cluster: int) -> None:
    """y is the residual + the rounded sums."""
    rows, columns = Rows(8), 264
    weight, x = _random_weight(rows, OUTPUTS, columns), _random(3, columns)
    residual = _random(3, OUTPUTS, seed=2)
    y = np.full(residual.shape, np.nan, BF16)
    kernels.run(
        Variant(rows, cluster, epilogue="Residual"), 2, {"y0": y}, residual=residual, x=x,
        **weight.fields(),
    )  # fmt: skip
    product = x.astype(np.float64) @ weight.dense.T
    assert _error(y, residual.astype(np.float64) + product) < 6e-3


@pytest.mark.parametrize(
    ("rows", "cluster", "activation"),
    [
        (Rows(16), 1, "Silu"),
        pytest.param(Rows(16), 8, "GeluTanh", marks=pytest.mark.more),
        pytest.param(PACKED, 8, "GeluTanh", marks=pytest.mark.more),
        pytest.param(SUPER["Q6_K"], 2, "Silu", marks=pytest.mark.more),
    ],
)
def test_gate_and_up_follow_norm(
    kernels: Kernels, rows: Rows, cluster: int, activation: str
) -> None:
    """y is activation(gate) * up of the normed rows: the epsilon and the norm's weight count."""
    columns, epsilon = 520, 0.5
    gate, up = (_random_weight(rows, OUTPUTS, columns, seed) for seed in (0, 5))
    x, norm = _random(9, columns), _random(1, columns, seed=3, mean=1.0)
    y = np.full((9, OUTPUTS), np.nan, BF16)
    kernels.run(
        Variant(rows, cluster, 2, 3, "RmsNorm", f"Gated<{activation}>"), 2, {"y0": y}, epsilon,
        norm=norm, x=x, **gate.fields(0), **up.fields(1),
    )  # fmt: skip
    normed = _normed(x, norm, epsilon)
    sums = normed @ gate.dense.T
    inner = np.sqrt(2 / np.pi) * (sums + 0.044715 * sums**3)
    of = sums / (1 + np.exp(-sums)) if activation == "Silu" else sums / 2 * (1 + np.tanh(inner))
    assert _error(y, of * (normed @ up.dense.T)) < 1e-2


@pytest.mark.more
def test_normed_rows_have_bits_of_one_alone(kernels: Kernels) -> None:
    """The sums of squares have one order too, in blocks alone and in clusters."""
    columns = 2320  # a part has more than 32 chunks
    weight = _random_weight(Rows(16), OUTPUTS, columns)
    x, norm = _random(19, columns), _random(1, columns, seed=3, mean=1.0)
    ys = []
    for cluster, tiles, of_rows in ((1, 1, slice(18, 19)), (8, 4, slice(None))):
        variant = Variant(Rows(16), cluster, tiles, prologue="RmsNorm")
        ys.append(np.full((len(x[of_rows]), OUTPUTS), np.nan, np.float32))
        kernels.run(variant, 1, {"y0": ys[-1]}, norm=norm, x=x[of_rows], **weight.fields())
    np.testing.assert_array_equal(ys[0][0], ys[1][18])
    exact = _normed(x, norm, 1e-5) @ weight.dense.T
    assert _error(ys[1], exact) < 6e-3


@pytest.mark.parametrize("cluster", [2, pytest.param(1, marks=pytest.mark.more)])
def test_three_weights_follow_one_norm(kernels: Kernels, cluster: int) -> None:
    """Queries, keys and values of rows whose norm's weight has an offset: one launch, and none of
    its tiles is of two weights.
    """
    rows, columns, outputs = Rows(4, 64), 512, (96, 48, 16)
    weights = [_random_weight(rows, n, columns, seed) for seed, n in enumerate(outputs)]
    x, norm = _random(3, columns), _random(1, columns, seed=3)
    products = [np.full((3, n), np.nan, BF16) for n in outputs]
    fields = {k: v for i, weight in enumerate(weights) for k, v in weight.fields(i).items()}
    kernels.run(
        Variant(rows, cluster, 1, 3, "RmsNorm", "Rounded"), 2,
        {f"y{i}": y for i, y in enumerate(products)}, offset=1.0, norm=norm, x=x, **fields,
    )  # fmt: skip
    normed = _normed(x, norm.astype(np.float64) + 1, 1e-5)
    for y, weight in zip(products, weights, strict=True):
        assert _error(y, normed @ weight.dense.T) < 6e-3


H100, A100, L4 = (
    Card(132, 232448, (9, 0)),
    Card(108, 166912, (8, 0)),
    Card(58, 101376, (8, 9)),
)
SHAPES = [  # outputs and columns
    (2560, 2048), (2048, 5632), (32000, 2048), (22016, 4096), (4096, 11008), (16, 8), (112, 96),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bits", "rows", "columns", "expected"),
    [
        (16, 1, 4096, (1, 1, 10, 1, 132)),
        (8, 1, 2048, (1, 1, 3, 2, 256)),
        (8, 1, 4096, (1, 1, 5, 2, 256)),
        (16, 8, 2048, (2, 1, 5, 2, 256)),
        (8, 8, 11008, (2, 1, 5, 1, 132)),
        (4, 8, 11008, (4, 1, 3, 2, 256)),
        (4, 16, 4096, (8, 2, 4, 2, 256)),
        (8, 32, 4096, (8, 4, 4, 1, 128)),
    ],
)
def test_plan_is_fastest_measured(
    bits: int, rows: int, columns: int, expected: tuple[int, ...]
) -> None:
    """On an H100, cluster, stages, blocks and grid are those that were fastest there."""
    weight = next(x for x in DAILY if x.bits == bits)
    launch = plan_launch(weight, rows, columns, 4096, H100)
    assert launch is not None and launch[:5] == expected


@pytest.mark.parametrize("card", [H100, A100, L4])
def test_plans_fit_card(card: Card) -> None:
    """Every plan fits shared memory, covers all rows, and has clusters only where they exist."""
    plans = 0
    for weight, rows, (outputs, columns) in itertools.product(FORMATS, (1, 3, 9, 40, 64), SHAPES):
        launch = plan_launch(weight, rows, columns, outputs, card)
        if launch is None:
            smallest = weight.shared_bytes(rows, columns, 1, -(-rows // 8), 2)
            assert smallest > card.shared_bytes or outputs % 128
            continue
        plans += 1
        assert launch.shared_bytes <= card.shared_bytes and rows <= 8 * launch.tiles
        assert outputs % (16 * launch.cluster) == launch.grid % launch.cluster == 0
        assert 0 < launch.grid <= outputs // 16
        assert launch.cluster == 1 or card is H100
        assert launch.capped_grid(1) == launch.cluster and launch.capped_grid(999) == launch.grid
    assert plans > len(FORMATS) * len(SHAPES)


def test_plan_refuses_what_no_variant_does() -> None:
    """More rows than 64, columns that are no multiple of 8, rows of no whole tile, older cards."""
    weight, turing = Rows(8), H100._replace(capability=(7, 5))
    assert plan_launch(weight, 64, 512, 128, H100)
    assert plan_launch(weight, 65, 512, 128, H100) is None
    assert plan_launch(weight, 1, 516, 128, H100) is None
    assert plan_launch(weight, 1, 512, 24, H100) is None
    assert plan_launch(weight, 1, 512, 128, turing) is None


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("arch", ["80", "86", "89", "90a", "100a", "120"])
def test_variants_compile_without_spills(arch: str, tmp_path: Path) -> None:
    """Each variant compiles and keeps no registers in memory, though a multiprocessor's 65,536 are
    enough for two blocks of up to 16 rows at once.
    """
    cluster = 8 if int(arch.rstrip("a")) >= 90 else 1
    weights = Rows(16), Rows(8), Rows(4, 32), Rows(4, 128, "float16", True), PACKED, *SUPER.values()
    for weight, tiles in itertools.product(weights, (1, 2, 8)):
        launch = Launch(cluster, tiles, 3, 1, 0, 0, is_early=True)
        source = tmp_path / "variant.cu"
        source.write_text(kernel_source(weight, launch, "RmsNorm", "Gated<Silu>"))
        command = ["nvcc", "-std=c++17", f"-arch=sm_{arch}", "-Xptxas", "-v", "-cubin", "-I", CSRC]
        done = subprocess.run(
            [*command, source, "-o", tmp_path / "variant"], capture_output=True, text=True
        )
        assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
        assert "0 bytes stack frame, 0 bytes spill" in done.stderr, (weight, tiles, done.stderr)
        used = re.findall(r"Used (\d+) registers", done.stderr)
        assert int(*used) * 256 * (2 if tiles <= 2 else 1) <= 65536, (weight, tiles, used)
