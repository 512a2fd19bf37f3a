"""How a product is launched on a card: which variant of csrc/kernel.cu, on how many blocks.

A variant is compiled at first use, so that only those in use are. The rule is a table of what was
fastest on an H100, and then what fits. None of it changes a bit of a product.
"""

from collections.abc import Iterator
from typing import NamedTuple

MAX_ROWS = 64
_PARTS, _THREADS, _TILE_ROWS = 8, 256, 16  # as in csrc/ring.h
_UNIT_BYTES = 64
_RESERVED = 1024  # bytes of shared memory that a block takes besides its own
# Structs with pairs of units: bytes of `scale` and of `zero` for a unit.
_PAIRED = {"Q4K": (8, 0), "Q5K": (8, 16), "Q6K": (1, 40), "PackedBFloat16": (0, 32)}


class Rows(NamedTuple):
    """How a weight's rows are stored: a struct of csrc/formats.h."""

    bits: int  # 16: bfloat16
    group: int = 0  # columns that share a scale; 0: all of a row, or no scale
    scale: str = "float32"  # or float16
    has_zero: bool = False
    struct: str = ""  # if not one of integers or bfloat16

    @property
    def source(self) -> str:
        """The struct's name in C++."""
        if self.struct or self.bits == 16:
            return self.struct or "BFloat16"
        scale = "Half" if self.scale == "float16" else "Float"
        zero = ", true" if self.has_zero else ""
        return f"Int{self.bits}<{self.group}, {scale}{zero}>"

    @property
    def _unit(self) -> int:
        return _UNIT_BYTES * 8 // self.bits

    @property
    def _step(self) -> int:
        return 2 if self.struct in _PAIRED else 1

    def _units(self, columns: int) -> int:
        chunk = 8 if self.bits == 16 else max(128, self._unit * self._step)
        return -(-(-(-columns // chunk) * chunk) // self._unit)

    def _group_bytes(self, size: int, group: int) -> int:
        """Return the bytes of a stage for one value of `size` bytes in each group; 0: no groups."""
        return 32 * max(4, size * max(1, self._unit // group)) if group else 0

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage of a warp's ring: 128 of each of 16 rows, and its groups' values."""
        if self.struct in _PAIRED:
            sizes = [self._group_bytes(size, 128) for size in _PAIRED[self.struct] if size]
            return 128 * _TILE_ROWS + sum(sizes)
        scales = self._group_bytes(2 if self.scale == "float16" else 4, self.group)
        mask_group = 8 if self.struct.startswith("Sparse") else 0
        zeros = self._group_bytes(1, self.group if self.has_zero else mask_group)
        return 128 * _TILE_ROWS + scales + zeros

    def shared_bytes(self, rows: int, columns: int, cluster: int, tiles: int, stages: int) -> int:
        """Return the bytes of shared memory that a block takes, as csrc/product.h lays it out."""
        units = -(-self._units(columns) // (self._step * cluster)) * self._step
        narrow = self.bits == 16 or (0 < self.group <= 32 and self.struct not in ("Q4K", "Q5K"))
        stride = -(-units * self._unit * 2 // 128) * 128 + (64 if narrow else 16)
        sums = 2 * _PARTS * tiles * 512 + _PARTS * tiles * 32
        return _PARTS * stages * self.stage_bytes + sums + rows * stride


class Card(NamedTuple):
    """What a rule has to consider of a GPU."""

    multiprocessors: int
    shared_bytes: int  # of a block, at most
    capability: tuple[int, int]


class Launch(NamedTuple):
    """A variant of the kernel and its grid."""

    cluster: int  # blocks that share the columns
    tiles: int  # of 8 rows of x
    stages: int  # of each warp's ring
    blocks_per_sm: int
    grid: int  # blocks, a multiple of `cluster`
    shared_bytes: int  # of a block
    threads: int = _THREADS
    # Whether weights are read before the kernels before have ended, none of which may have written
    # them.
    is_early: bool = False

    def capped_grid(self, active_clusters: int) -> int:
        """Return the grid if only so many clusters run at once: the others would run after them."""
        return min(self.grid, self.cluster * max(1, active_clusters))


def plan_launch(weight: Rows, rows: int, columns: int, outputs: int, card: Card) -> Launch | None:
    """Return how to multiply `rows` rows of x by weights, or None if no variant applies.

    outputs: of all weights of the call together; each has a multiple of 16.
    """
    if not 1 <= rows <= MAX_ROWS or columns % 8 or card.capability < (8, 0):
        return None
    tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4 if rows <= 32 else 8
    cluster, stages, blocks = _fastest(weight.bits, rows, columns, outputs)
    for chosen, depth in _alternatives(cluster, stages, card.capability >= (9, 0)):
        shared = weight.shared_bytes(rows, columns, chosen, tiles, depth)
        if outputs % (_TILE_ROWS * chosen) or shared > card.shared_bytes:
            continue
        fitting = (card.shared_bytes + _RESERVED) // (shared + _RESERVED)
        blocks = min(blocks, fitting)
        at_once = max(1, card.multiprocessors * blocks // chosen)
        grid = chosen * min(outputs // (_TILE_ROWS * chosen), at_once)
        return Launch(chosen, tiles, depth, blocks, grid, shared)
    return None


def _fastest(bits: int, rows: int, columns: int, outputs: int) -> tuple[int, int, int]:
    """Return cluster, stages and blocks per multiprocessor that were fastest on an H100."""
    if rows == 1:
        if bits == 16 and columns >= 4096:
            return 1, 10, 1
        return 1, 3 if bits == 4 or (bits == 8 and columns < 4096) else 5, 2
    if rows <= 8:
        if columns > 5000:
            return (2, 5, 1) if bits != 4 and outputs > 2048 else (4, 3, 2)
        return 2, 5 if bits == 16 and columns < 4096 else 3, 2
    if rows <= 32:
        return 8, 4, 2 if rows <= 16 else 1
    return 8, 3 if bits == 16 else 2, 1


def _alternatives(cluster: int, stages: int, has_clusters: bool) -> Iterator[tuple[int, int]]:
    """Yield cluster and stages, the best first: rather fewer stages than more blocks of a cluster,
    down to 3, then fewer blocks of a cluster.
    """
    others = [c for c in (2, 4, 8) if c > cluster] + [c for c in (4, 2, 1) if c < cluster]
    clusters = [cluster, *others] if has_clusters else [1]
    depths = [s for s in (10, 5, 4, 3) if s <= stages] or [stages]
    for chosen in clusters:
        yield from ((chosen, depth) for depth in depths)
    yield from ((chosen, 2) for chosen in clusters if stages > 2)


def kernel_source(weight: Rows, launch: Launch, prologue: str, epilogue: str) -> str:
    """Return the C++ source of a variant, for a compiler that finds csrc.

    Args:
        weight: The weight's format.
        launch: Cluster, tiles, stages, and whether it is early.
        prologue: `Plain` or `RmsNorm` (csrc/prologues.h).
        epilogue: `Float32`, `Rounded`, `Residual` or `Gated<...>` (csrc/epilogues.h).
    """
    macros = {
        "FORMAT": weight.source,
        "CLUSTER": launch.cluster,
        "TILES": launch.tiles,
        "STAGES": launch.stages,
        "PROLOGUE": prologue,
        "EPILOGUE": epilogue,
        "EARLY": int(launch.is_early),
    }
    lines = [f"#define JAXLLM_{name} {value}" for name, value in macros.items()]
    return "\n".join([*lines, '#include "kernel.cu"', ""])
