"""What a leaf of the parameters is, whatever kind of weight it holds, and what its format is.

A leaf stands for an array `[..., O, I]`: a matrix, or a stack of them. Products are with one
matrix; `jax.vmap` takes a stack apart.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.ops.native import Matrix
from jaxllm.weights.files import aligned

Shape = tuple[int | None, ...]  # None: of any size
Blocks = Callable[[], Iterable[np.ndarray]]  # from the first block each time
Linear = Callable[[jax.Array, Any], jax.Array]  # of inputs [R, I] and a weight, float32 [R, O]
V = TypeVar("V")
ROWS = 512  # of a matrix that a block has: what is quantized at a time


class Leaf:
    """A weight stored in a form of its own: a frozen pytree whose arrays are its pieces.

    rounds_inputs: whether `Precision.int8_inputs` applies to products with it. has_kernels: whether
    the native kernels know it (`matrix`); elsewhere `product` does it all. composed: whether it is
    made of other weights, and a product with it of products with them (`through`). trained: its
    fields that training can change; what they hold of integers stays.
    """

    rounds_inputs = False
    composed = False
    trained: ClassVar[tuple[str, ...]] = ()

    @property
    def has_kernels(self) -> bool:
        return False

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., O, I]`."""
        raise NotImplementedError

    @property
    def dtype(self) -> Any:
        """The format that `dense` gives by default."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many weights it stands for."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """What they take."""
        return sum(int(x.nbytes) for x in jax.tree.leaves(self))

    @property
    def format(self) -> str:
        """The name of its format, in full."""
        raise NotImplementedError

    def dense(self, dtype: Any = None) -> jax.Array:
        """The numbers themselves, an array of `shape`."""
        raise NotImplementedError

    def take(self, index: jax.Array) -> jax.Array:
        """Rows of a matrix by number, `[..., I]`; NaN for a number outside it."""
        raise NotImplementedError

    def product(self, x_RI: jax.Array) -> jax.Array:
        """`x @ weight.T` in plain JAX, float32 `[R, O]`: what every other way of it means."""
        raise NotImplementedError

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        """Where it is composed, `x @ weight.T`, float32 `[R, O]`, by `linear` of its parts."""
        raise NotImplementedError

    def training(self, key: jax.Array, step: jax.Array) -> "Leaf":
        """Itself as step `step` of training multiplies with it; key: for what it draws."""
        return self

    def fits_gpu(self, x_RI: jax.Array) -> bool:
        """Whether `gpu_product` takes these inputs."""
        return False

    def gpu_product(self, x_RI: jax.Array) -> jax.Array:
        """The same product by a kernel for GPUs."""
        raise NotImplementedError

    def matrix(self) -> Matrix:
        """The pieces as the native kernels take them, where they know this kind of leaf."""
        raise NotImplementedError

    def widened(self, dtype: Any) -> tuple[Matrix, jax.Array | None]:
        """A matrix for the kernels to expand to `dtype`, and what its product's `[O]` are times."""
        return self.matrix(), None

    def pieces(self) -> dict[str, jax.Array]:
        """Its arrays, as a file holds them."""
        raise NotImplementedError

    def with_rows(self, index: np.ndarray) -> Any:
        """The weight of these rows `[n]`, in this order: what they stand for stays, bit for bit.

        Raises ConfigError where rows cannot be taken apart.
        """
        raise ConfigError(f"rows of {self.format} cannot be taken apart")

    def with_columns(self, begin: int, end: int) -> Any:
        """The weight of the columns from `begin` to before `end`, likewise.

        Raises ConfigError where columns cannot be taken apart there: inside a group, say.
        """
        raise ConfigError(f"columns of {self.format} cannot be taken apart")

    def with_more(self, after: Sequence[Any], axis: int) -> Any:
        """The weight of whose rows (axis 0) or columns (axis 1) it and those `after` it are parts,
        in this order: the way back from `with_rows` and `with_columns`, bit for bit.

        Raises ConfigError where they cannot be put together.
        """
        raise ConfigError(f"parts of {self.format} cannot be put together")


class Format(Protocol):
    """A format that a weight can have: how leaves of it are made, from numbers or from a file.

    exact_in: the dtype whose numbers it is known to hold, for whoever takes quantization back.
    """

    @property
    def name(self) -> str:
        """In full."""
        ...

    @property
    def exact_in(self) -> str: ...

    def make(self, array: jax.Array) -> Any:
        """A leaf of `array`'s numbers `[..., O, I]`. Raises ConfigError where it cannot."""
        ...

    def collect(self, shape: tuple[int, ...], blocks: Blocks) -> Any:
        """What `make` makes, bit for bit, of numbers of `shape` that come as blocks `[n, I]` of
        its rows. Memory beside the leaf: a block.
        """
        ...

    def expected(self, shape: tuple[int, ...]) -> dict[str, tuple[Shape, Any]]:
        """The shape and dtype of each piece of a leaf of `shape`."""
        ...

    def of_pieces(self, shape: tuple[int, ...], pieces: Mapping[str, Any]) -> Any:
        """The leaf of `shape` that these pieces make: nothing of them is checked."""
        ...

    def assemble(self, path: str, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]) -> Any:
        """The leaf at `path` from its pieces, whose shapes have been checked.

        Raises CheckpointError for numbers that no leaf has: kernels trust them.
        """
        ...


def or_nan(rows: jax.Array, index: jax.Array, count: int) -> jax.Array:
    """Rows `[N, D]` taken by `index`, as `[..., D]`; NaN where it names none of `count`.

    An id that only the device sees cannot be refused: NaN makes it show instead of another row.
    """
    inside = ((index >= 0) & (index < count)).reshape(-1, 1)
    return jnp.where(inside, rows, jnp.nan).reshape(*index.shape, rows.shape[1])


def check_finite(path: str, pieces: Mapping[str, np.ndarray], *names: str) -> None:
    """Raise CheckpointError where one of these pieces of the leaf at `path` is not finite."""
    for name in names:
        if not np.isfinite(pieces[name].astype(np.float32)).all():
            raise CheckpointError(f"{path}{name} holds NaN or infinity")


def on_device(pieces: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """A leaf's pieces on the device, where they lie if that is possible."""
    return {key: jax.device_put(piece, may_alias=True) for key, piece in pieces.items()}


def collected(
    expected: Mapping[str, tuple[tuple[int, ...], Any]],
    blocks: Iterable[np.ndarray],
    make: Callable[[Any], Iterable[Any]],
) -> dict[str, np.ndarray]:
    """Pieces of the shapes and dtypes `expected`, filled with what `make` gives of each block.

    make: the rows of each piece, in their order. They are copied before the next block is read, and
    what is kept has its true size.
    """
    pieces = {name: aligned(shape, dtype) for name, (shape, dtype) in expected.items()}
    rows = [piece.reshape(-1, piece.shape[-1] if piece.ndim else 1) for piece in pieces.values()]
    done = 0
    for block in blocks:
        for piece, part in zip(rows, make(block), strict=True):
            piece[done : done + len(block)] = part
        done += len(block)
    return pieces


def rows_of(tree: V, index: np.ndarray) -> V:
    """Pieces `[..., O, X]` with these rows alone."""
    taken: V = jax.tree.map(lambda x: x[..., index, :], tree)
    return taken


def joined(parts: Sequence[V], axis: int = 0) -> V:
    """Pieces `[..., O, X]` of several, their rows (axis 0) or columns (axis 1) side by side."""
    whole: V = jax.tree.map(lambda *x: jnp.concatenate(x, axis=axis - 2), *parts)
    return whole


def filled(x_OG: jax.Array, groups: int) -> jax.Array:
    """What groups have, `[..., O, G]`, with 0 for those that are added to the last chunk."""
    return jnp.pad(x_OG, [*[(0, 0)] * (x_OG.ndim - 1), (0, groups - x_OG.shape[-1])])


def on_borders(name: str, begin: int, end: int, columns: int, group: int) -> slice:
    """The groups of columns from `begin` to before `end`; the last of a row may be shorter.

    Raises ConfigError where that is inside a group.
    """
    if begin % group or (end % group and end != columns):
        raise ConfigError(
            f"columns {begin} to {end} of {name} begin or end inside a group of {group} columns"
        )
    return slice(begin // group, -(-end // group))


def up(n: int, to: int) -> int:
    """`n` rounded up to a multiple of `to`."""
    return -(-n // to) * to
