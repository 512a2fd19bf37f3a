"""The base class of weights, and the protocol of their formats.

A weight stands for an array `[..., O, I]`: a matrix, or a stack of them. Products take one matrix;
use `jax.vmap` for a stack.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.ops import cuda
from jaxllm.ops.native import Matrix
from jaxllm.weights.safetensors import empty_aligned, first_non_finite

PartialShape = tuple[int | None, ...]  # None: of any size
ArraySpecs = dict[str, tuple[PartialShape, Any]]  # shape and dtype of each array of a weight
ReadBlocks = Callable[[], Iterable[np.ndarray]]  # each call starts at the first block
LinearFn = Callable[..., jax.Array]  # inputs [R, I] and a weight to float32 [R, O]
# Rows [A, D], their experts [A], and the function from both to [A, D] that runs local experts.
RunExperts = Callable[[jax.Array, jax.Array, Callable[..., jax.Array]], jax.Array]
BLOCK_ROWS = 512  # rows of a block, which is quantized at once
INPUT_BLOCK = 128  # columns of x that share a scale if x is rounded to int8 and rows have one scale


class LocalExperts(NamedTuple):
    """A device's experts of a stack `[E, O, I]`, and the communication around them.

    Attributes:
        stack: The experts; a weight.
        run: Runs each row's expert where it is.
        reduce: Sums the products of the stack over devices, or anything linear in them.
    """

    stack: Any
    run: RunExperts = lambda x_AD, expert_A, run: run(x_AD, expert_A)
    reduce: Callable[[jax.Array], jax.Array] = lambda y: y


class WeightBase:
    """A weight in a storage format: a frozen dataclass that is a pytree of arrays."""

    input_block: int = INPUT_BLOCK  # columns of x that share a scale if x is rounded to int8
    supports_int8_inputs = False  # whether `Precision.int8_inputs` applies to products with it
    # Whether it is a device's shard, whose products communicate: `apply_with` then passes further
    # arguments on to `linear`.
    is_sharded = False
    trainable_fields: ClassVar[tuple[str, ...]] = ()  # but for integers
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def is_composite(self) -> bool:
        """Whether it multiplies by `apply_with`, with products of other weights."""
        return False

    @property
    def has_parts(self) -> bool:
        """Whether it consists of weights that may have other formats each."""
        return self.is_composite

    @property
    def has_row_scale(self) -> bool:
        """Whether its field `scale`, `[O, 1]`, multiplies whole rows."""
        return False

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., O, I]`."""
        raise NotImplementedError

    @property
    def dtype(self) -> Any:
        """The dtype that `to_dense` returns by default."""
        return jnp.dtype(jnp.float32)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of weights that it stands for."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(int(x.nbytes) for x in jax.tree.leaves(self))

    @property
    def format(self) -> str:
        """The full name of its format."""
        raise NotImplementedError

    def to_dense(self, dtype: Any = None) -> jax.Array:
        """Return the weights as an array of `shape`."""
        raise NotImplementedError

    def take(self, index: jax.Array) -> jax.Array:
        """Return rows of a matrix by index, `[..., I]`; NaN for an index outside of it."""
        raise NotImplementedError

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        """Return `x @ weight.T` in plain JAX, float32 `[R, O]`; it defines all other paths."""
        raise NotImplementedError

    def apply_with(self, x_RI: jax.Array, linear: LinearFn, *args: Any) -> jax.Array:
        """Return `x @ weight.T` of a composite, float32 `[R, O]`; `linear` multiplies its parts.

        args: further arguments of `linear`, for shards.
        """
        raise NotImplementedError

    def apply_norm(self, x: jax.Array, norm: Callable[..., jax.Array]) -> jax.Array:
        """Return `norm(x, weight, mean=)` of a vector; mean: of the squares, None: computed."""
        return norm(x, self.to_dense())

    def local_experts(self) -> LocalExperts:
        """Return the experts of a stack that this device has."""
        return LocalExperts(self)

    def native_matrix(self) -> Matrix | None:
        """Return the arrays as the native kernels take them; None if they do not support it."""
        return None

    def cuda_matrix(self) -> cuda.Matrix | None:
        """Return the arrays as a GPU's kernels take them; None if they do not support it."""
        return None

    def for_training_step(self, key: jax.Array, step: jax.Array) -> "WeightBase":
        """Return the weight as training step `step` uses it. `key` is for random draws."""
        return self

    def array_fields(self) -> dict[str, Any]:
        """Return its fields that are arrays or weights, if they are set."""
        fields = [f for f in dataclasses.fields(self) if f.metadata.get("pytree_node", True)]
        return {f.name: x for f in fields if (x := getattr(self, f.name)) is not None}

    def arrays(self) -> dict[str, jax.Array]:
        """Return its arrays by name, as a file stores them."""
        return {
            f".{field}{name}": array
            for field, part in self.array_fields().items()
            for name, array in (
                part.arrays() if isinstance(part, WeightBase) else {"": part}
            ).items()
        }

    def with_rows(self, index: np.ndarray) -> Any:
        """Take the rows `index` `[n]`, in this order; their values stay, bit for bit."""
        raise ConfigError(f"{self.format} weights cannot be sliced")

    def with_columns(self, begin: int, end: int) -> Any:
        """Take the columns from `begin` to before `end`, likewise.

        Raises:
            ConfigError: if columns cannot be sliced there, for example inside a group.
        """
        raise ConfigError(f"{self.format} weights cannot be sliced")

    def concatenate(self, appended: Sequence[Any], axis: int) -> Any:
        """Concatenate it and the weights `appended` it, along rows (axis 0) or columns (axis 1).

        This inverts `with_rows` and `with_columns`, bit for bit.

        Raises:
            ConfigError: if they cannot be concatenated.
        """
        raise ConfigError(f"{self.format} weights cannot be concatenated")


class Format:
    """A weight format: makes weights from numbers or from a file.

    Attributes:
        is_data_dependent: Whether the sizes of its arrays depend on the weight's values, so that
            shards are quantized anew.
        sliceable_axes: The axes, 0 rows and 1 columns, along which slicing and quantizing commute.
        dense_format: For a format that leaves out zeros, the format of the same weight with them.
        speed_warning: What to log before a weight is stored that this machine decodes slowly.
    """

    is_data_dependent = False
    sliceable_axes: ClassVar[tuple[int, ...]] = (0,)
    dense_format: ClassVar[str | None] = None
    speed_warning: ClassVar[str | None] = None

    @property
    def name(self) -> str:
        """The full name."""
        raise NotImplementedError

    @property
    def lossless_dtype(self) -> str:
        """The dtype that holds all its values exactly, for use when it is dequantized."""
        return "float32"

    def quantize(self, array: jax.Array) -> Any:
        """Quantize an array `[..., O, I]`. Raises ConfigError if the format cannot hold it."""
        rows = np.asarray(array).reshape(math.prod(array.shape[:-1]), array.shape[-1])
        starts = range(0, len(rows), BLOCK_ROWS)
        return self.quantize_blocks(array.shape, lambda: (rows[i : i + BLOCK_ROWS] for i in starts))

    def quantize_blocks(self, shape: tuple[int, ...], blocks: ReadBlocks) -> Any:
        """Quantize blocks `[n, I]` of the rows of a matrix of `shape`, to the bits of `quantize`.

        Memory besides the result: one block.
        """
        raise NotImplementedError

    def drop_zeros(self, weight: Any) -> Any:
        """Return a weight of `dense_format` in this format, without rounding it again."""
        raise NotImplementedError

    def array_specs(self, shape: tuple[int, ...]) -> ArraySpecs:
        """Return the shape and dtype of each array of a weight of `shape`."""
        raise NotImplementedError

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> Any:
        """Return the weight of `shape` with these arrays; nothing is checked."""
        raise NotImplementedError

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Raise CheckpointError for invalid values, which kernels would trust.

        Args:
            arrays: the arrays of the weight at `path` in a file, of the right shapes and dtypes.
        """

    def from_file(self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]) -> Any:
        """Return the weight at `path` with these arrays from a file, whose shapes were checked.

        Raises:
            CheckpointError: as `check_arrays` does.
        """
        self.check_arrays(path, shape, arrays)
        return self.from_arrays(shape, to_device(arrays))


def nan_out_of_range(rows: jax.Array, index: jax.Array, count: int) -> jax.Array:
    """Return rows `[N, D]`, taken by `index`, as `[..., D]`; NaN for an index beyond `count`.

    An index that only the device sees cannot raise; NaN makes it visible.
    """
    inside = ((index >= 0) & (index < count)).reshape(-1, 1)
    return jnp.where(inside, rows, jnp.nan).reshape(*index.shape, rows.shape[1])


def check_finite(path: str, arrays: Mapping[str, np.ndarray], *names: str) -> None:
    """Raise CheckpointError if one of the named arrays of the weight at `path` is not finite."""
    for name in names:
        if first_non_finite(arrays[name]) is not None:
            raise CheckpointError(f"{path}{name} holds NaN or infinity")


def to_device(arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Put arrays on the device, without a copy if possible."""
    return {name: jax.device_put(array, may_alias=True) for name, array in arrays.items()}


def fill_arrays(
    specs: Mapping[str, tuple[tuple[int, ...], Any]],
    blocks: Iterable[np.ndarray],
    make: Callable[[Any], Iterable[Any]],
) -> dict[str, np.ndarray]:
    """Fill arrays of the shapes and dtypes `specs` with what `make` returns for each block.

    Args:
        make: returns the rows of each array, in order. They are copied before the next block is
            read.
    """
    arrays = {name: empty_aligned(shape, dtype) for name, (shape, dtype) in specs.items()}
    rows = [x.reshape(-1, x.shape[-1] if x.ndim else 1) for x in arrays.values()]
    done = 0
    for block in blocks:
        for array, part in zip(rows, make(block), strict=True):
            array[done : done + len(block)] = part
        done += len(block)
    return arrays


def pad_groups(x_OG: jax.Array, groups: int) -> jax.Array:
    """Pad an array `[..., O, G]` with one entry per group to `groups` groups, with 0."""
    return jnp.pad(x_OG, [*[(0, 0)] * (x_OG.ndim - 1), (0, groups - x_OG.shape[-1])])


def group_slice(name: str, begin: int, end: int, columns: int, group: int) -> slice:
    """Return the groups of the columns from `begin` to before `end`; a row's last may be short.

    Raises:
        ConfigError: if that would split a group.
    """
    if begin % group or (end % group and end != columns):
        raise ConfigError(
            f"columns {begin} to {end} of {name} would split a group of {group} columns"
        )
    return slice(begin // group, -(-end // group))


def round_up(n: int, to: int) -> int:
    """Round `n` up to a multiple of `to`."""
    return -(-n // to) * to
