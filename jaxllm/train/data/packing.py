"""Which examples share a row: best-fit packing, which leaves hardly any padding."""

from bisect import bisect_left, insort

import numpy as np


def best_fit(length_P: np.ndarray, width: int, seed: int) -> list[np.ndarray]:
    """Rows of at most `width` columns, each a list of the numbers of its pieces.

    length_P: columns of each piece, from 1 to `width`. The longest come first, equal ones in an
    order drawn by the seed; each goes where it leaves the least room. (Best-fit decreasing, as
    Ding et al. 2024, arXiv 2404.10830, pack documents.) Time: `P log(width)`.
    """
    drawn_P = np.random.default_rng(seed).permutation(len(length_P))
    order_P = drawn_P[np.argsort(-length_P[drawn_P], kind="stable")]
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # rows by the columns that are left in them
    rooms: list[int] = []  # the keys of `with_room`, sorted
    for piece in order_P.tolist():
        length = int(length_P[piece])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, left = len(rows), width - length
            rows.append([])
        else:
            left = rooms[at]
            row = with_room[left].pop()
            if not with_room[left]:
                del with_room[left], rooms[at]
            left -= length
        rows[row].append(piece)
        if left:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(row)
    return [np.array(row, np.int64) for row in rows]
