"""Pages: rows whose texts differ in length share one pool of cache slots.

The cache's tail then has a row for each page, and a text is in the pages of its row, one after
another (`Microbatch.page_RP`). Positions alone decide what attention reads, so pages change no bit.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jaxllm.cache.kv import EMPTY, MAX_SLOTS, KVCache, cache_nbytes, init_cache
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.files import machine_memory
from jaxllm.runtime.validation import check_int
from jaxllm.weights.model import Model

PAGE = 256  # slots


class PageTable(NamedTuple):
    """Which pages each row has.

    Attributes:
        size: Slots of a page.
        total: Number of pages; this number stands for no page.
        per_row: Pages of a full row.
        free: Pages of no row.
        held: Pages of each row, in the order of its text.
    """

    size: int
    total: int
    per_row: int
    free: tuple[int, ...]
    held: Mapping[int, tuple[int, ...]]

    def reserve(self, row: int, slots: int, spare: int = 0) -> "PageTable | None":
        """Return the table in which a row has pages for so many slots; None if there are too few.

        spare: number of pages that must be left, if the row needs more.
        """
        held = self.held.get(row, ())
        missing = -(-slots // self.size) - len(held)
        if missing <= 0:
            return self
        if missing + spare > len(self.free):
            return None
        taken, free = self.free[:missing], self.free[missing:]
        return self._replace(free=free, held={**self.held, row: (*held, *taken)})

    def list_pages(self, places: Mapping[int, int], size: int) -> np.ndarray:
        """Return the pages of rows, int32 `[size, P]`. places: of each row in the result."""
        page_RP = np.full((size, self.per_row), self.total, np.int32)
        for row, r in places.items():
            held = self.held.get(row, ())
            page_RP[r, : len(held)] = held
        return page_RP


def open_cache(
    model: Model, rows: int, capacity: int, slots: int | None, multiple: int
) -> tuple[PageTable | None, KVCache]:
    """Return an empty cache with `slots` slots for all rows together, in pages of a multiple of
    `multiple`; or with `capacity` for each row, and no table, if that is not more.

    Raises:
        CapacityError: If one text could be longer than all slots.
        ConfigError: If the model is sharded.
    """
    size = multiple * max(1, PAGE // multiple)
    per_row = -(-capacity // size)
    if slots is None or slots // size >= rows * per_row:
        return None, init_cache(model, rows, capacity)
    slots = check_int("slots", slots, 1, MAX_SLOTS, CapacityError)
    if slots < capacity:
        raise CapacityError(
            f"slots={slots} is less than the capacity of one row, {capacity}. Raise slots, or lower"
            " capacity"
        )
    if model.is_sharded:
        raise ConfigError("slots does not support a model that is sharded. Use fewer rows")
    count = max(slots // size, per_row)
    pages = PageTable(size, count, per_row, tuple(range(count)), {})
    return pages, init_cache(model, rows, 1).replace(tail=init_cache(model, count, size).tail)


def fit_slots(model: Model, rows: int, capacity: int) -> int:
    """Return `rows * capacity`, or the slots of half the device's memory if that is less; at least
    `capacity`. A sharded model has all.
    """
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit") or machine_memory()
    if memory is None or model.is_sharded:
        return rows * capacity
    each = cache_nbytes(model.config, 1, 1, model.precision.cache)
    return max(capacity, min(rows * capacity, memory // 2 // each))


def free_pages(pages: PageTable, cache: KVCache, row: int) -> tuple[PageTable, KVCache]:
    """Return the table and the cache without the text of a row."""
    held = dict(pages.held)
    taken = held.pop(row, ())
    page_P = np.full(pages.per_row, pages.total, np.int32)
    page_P[: len(taken)] = taken
    tail = cache.tail.replace(position_BS=_clear_pages(cache.tail.position_BS, page_P))
    return pages._replace(free=(*pages.free, *taken), held=held), cache.replace(tail=tail)


@partial(jax.jit, donate_argnums=0)
def _clear_pages(position_BS: jax.Array, page_P: jax.Array) -> jax.Array:
    return position_BS.at[page_P].set(EMPTY, mode="drop")


def find_slot(pages: PageTable | None, row: int, slot: int) -> tuple[np.int32, np.int32]:
    """Return the row of the cache's tail that has a row's slot, and the slot's number there."""
    if pages is None:
        return np.int32(row), np.int32(slot)
    page, at = divmod(slot, pages.size)
    return np.int32(pages.held[row][page]), np.int32(at)
