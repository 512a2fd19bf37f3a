"""Best-fit packing of examples into rows, with hardly any padding."""

from bisect import bisect_left, insort

import numpy as np


def best_fit(length_P: np.ndarray, width: int, seed: int) -> list[np.ndarray]:
    """Pack pieces into rows of at most `width` columns; each row is an array of piece numbers.

    Best-fit decreasing, as in Ding et al. 2024 (arXiv 2404.10830): the longest pieces come first,
    equal ones in random order; each goes to the row that it fills best. Time: `P log(width)`.

    Args:
      length_P: columns of each piece, from 1 to `width`.
      seed: of the order of equal pieces.
    """
    drawn_P = np.random.default_rng(seed).permutation(len(length_P))
    order_P = drawn_P[np.argsort(-length_P[drawn_P], kind="stable")]
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # rows by their number of free columns
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
