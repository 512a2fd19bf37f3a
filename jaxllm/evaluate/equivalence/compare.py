"""Functional equivalence: the same input through two sides, compared at every stage.

The report names the first stage that diverges; `difference.Tolerance` says what that means. Text is
compared by feeding both sides the reference's own greedy text, token by token through their caches,
so that one early difference does not hide what comes after it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.errors import ConfigError, TokenError
from jaxllm.evaluate.equivalence.difference import (
    MAX_DRIFT,
    TOLERANCES,
    Difference,
    Tolerance,
    coarser,
    measure,
)
from jaxllm.evaluate.equivalence.sides import Case, Decoded, Ours, Side, padded
from jaxllm.progress import steps_bar
from jaxllm.whole import whole


class Mismatch(NamedTuple):
    """A token that the two sides choose differently, after the same text.

    step: from 0, of the greedy text. margin: the reference's best logit minus its second best.
    """

    row: int
    step: int
    reference: int
    ours: int
    margin: float


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Greedy tokens, `compared` of them in all rows, each chosen after the reference's own text.

    first: the first that differs. worst_margin: the largest margin at which one does, 0 where none
    does; it is excused up to `allowed_margin`, which is a tie within the tolerance.
    """

    compared: int
    agreed: int
    first: Mismatch | None
    worst_margin: float
    allowed_margin: float

    @property
    def holds(self) -> bool:
        """Whether whatever differs is a tie."""
        return self.worst_margin <= self.allowed_margin


@dataclasses.dataclass(frozen=True)
class Report:
    """What two sides make of one case.

    stages: in the order of computation, at every real token. decoding: the logits of `greedy`'s
    steps, and the cache's keys and values after them, by layer. A stage's `worst` is (row, column)
    of the case and the index in the vector; of the cache (row, position), of decoded logits (row,
    step). exact: the name of the float32 side that drift is measured from, where there is one.
    """

    ours: str
    reference: str
    dtype: str
    tolerance: Tolerance
    stages: tuple[Difference, ...]
    decoding: tuple[Difference, ...]
    greedy: Greedy
    exact: str | None = None

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All that was measured, in order."""
        return (*self.stages, *self.decoding)

    @property
    def first(self) -> Difference | None:
        """The first stage that diverges, if any."""
        return next((d for d in self.differences if not d.holds), None)

    @property
    def drift(self) -> float | None:
        """Of the logits; None where no float32 reference was given."""
        return self.stages[-1].drift

    @property
    def holds(self) -> bool:
        """Whether no stage diverges, the greedy text agrees, and the logits drift too little."""
        return self.first is None and self.greedy.holds and (self.drift or 0.0) <= MAX_DRIFT


def verify(
    ours: Ours,
    reference: Side,
    case: Case,
    *,
    new_tokens: int = 32,
    tolerance: Tolerance | None = None,
    exact: Side | None = None,
    show_progress: bool | None = None,
) -> Report:
    """Run a case, and then `new_tokens` greedy ones, through both sides and compare.

    tolerance: by default that of the coarser of the sides' formats (`TOLERANCES`). exact: a float32
    side; the report then says how far both are from it. Padding is left out of every figure.

    Raises ConfigError where the two are not models of one form, TokenError for a case that does
    not fit the model.
    """
    whole("new_tokens", new_tokens, 1, error=ConfigError)
    case.check(ours.model.config, new_tokens)
    dtype = coarser(np.dtype(ours.dtype), np.dtype(reference.dtype)).name
    tolerance = tolerance or TOLERANCES[dtype]
    sides = [reference, ours, *([exact] if exact else [])]
    stages: list[dict[str, np.ndarray]] = []
    decoded: list[Decoded] = []
    with steps_bar("comparing", 2 * len(sides), show_progress) as advance:
        for side in sides:
            stages.append(side.stages(case))
            _check_forms(stages[-1], stages[0])
            advance()
        for side in sides:
            text_BN = decoded[0].token_BN if decoded else None
            decoded.append(side.decode(case, new_tokens, text_BN))
            advance()
    theirs, mine, *truth = stages
    text, answer, *true_answer = decoded
    return Report(
        ours=ours.name,
        reference=reference.name,
        dtype=dtype,
        tolerance=tolerance,
        stages=compare_stages(case, mine, theirs, tolerance, *truth),
        decoding=tuple(_decoding(mine, tolerance, answer, text, *true_answer)),
        greedy=compare_text(answer.logits_BNV, text.logits_BNV, tolerance),
        exact=exact.name if exact else None,
    )


def example(texts: Sequence[int] | None, vocab_size: int, length: int) -> Case:
    """Two rows of unequal length, padded on the left: `length` tokens, and two thirds of it.

    texts: token ids to take them from, end to end; where there are too few, or None, they are
    random, the same each time. Raises TokenError for a length below one.
    """
    length = whole("the length", length, 1, error=TokenError)
    lengths = (length, max(1, 2 * length // 3))
    ids = list(texts or ())
    if len(ids) < sum(lengths):
        ids = np.random.default_rng(0).integers(0, vocab_size, sum(lengths)).tolist()
    return padded([ids[:length], ids[length : sum(lengths)]])


def compare_stages(
    case: Case,
    ours: dict[str, np.ndarray],
    theirs: dict[str, np.ndarray],
    tolerance: Tolerance,
    exact: dict[str, np.ndarray] | None = None,
) -> tuple[Difference, ...]:
    """Every stage at the case's real tokens. Raises ConfigError for sides of different forms."""
    real_BT = case.real_BT[:, case.cached :]
    places = np.argwhere(case.real_BT)
    _check_forms(ours, theirs)

    def one(name: str) -> Difference:
        truth = None if exact is None else exact[name][real_BT]
        found = measure(name, ours[name][real_BT], theirs[name][real_BT], tolerance, truth)
        return _placed(found, places)

    return tuple(one(name) for name in theirs)


def compare_text(ours_BNV: np.ndarray, theirs_BNV: np.ndarray, tolerance: Tolerance) -> Greedy:
    """The best tokens of both sides' logits, where both have read the same text."""
    theirs_BNV = theirs_BNV.astype(np.float64)
    mine_BN, best_BN = ours_BNV.argmax(axis=2), theirs_BNV.argmax(axis=2)
    ordered = np.partition(theirs_BNV, -2, axis=2)
    margin_BN = ordered[:, :, -1] - ordered[:, :, -2]
    differ = np.argwhere((mine_BN != best_BN).T)  # by step, then by row
    mismatches = [
        Mismatch(int(b), int(n), int(best_BN[b, n]), int(mine_BN[b, n]), float(margin_BN[b, n]))
        for n, b in differ
    ]
    return Greedy(
        compared=best_BN.size,
        agreed=best_BN.size - len(mismatches),
        first=mismatches[0] if mismatches else None,
        worst_margin=max((m.margin for m in mismatches), default=0.0),
        allowed_margin=tolerance.margin(float(np.abs(theirs_BNV).max())),
    )


def _decoding(
    stages: dict[str, np.ndarray],
    tolerance: Tolerance,
    ours: Decoded,
    theirs: Decoded,
    exact: Decoded | None = None,
) -> Iterator[Difference]:
    """The cache's entries at every position that both hold, and the logits on the way."""
    P = min(ours.held_BP.shape[1], theirs.held_BP.shape[1])
    both_BP = ours.held_BP[:, :P] & theirs.held_BP[:, :P]
    places = np.argwhere(both_BP)
    layers = [name.removesuffix(".k") for name in stages if name.endswith(".k")]
    for i, layer in enumerate(layers):
        for part in ("k", "v"):
            mine, other, *truth = (
                getattr(side, part)[i][:, :P][both_BP] for side in (ours, theirs, exact) if side
            )
            found = measure(f"cache {layer}.{part}", mine, other, tolerance, *truth)
            yield _placed(found, places)
    truth = [exact.logits_BNV] if exact else []
    yield measure("decoded logits", ours.logits_BNV, theirs.logits_BNV, tolerance, *truth)


def _placed(difference: Difference, places: np.ndarray) -> Difference:
    """With `worst` by row and column, of which only those of `places` were compared."""
    first, *rest = difference.worst
    where = tuple(int(i) for i in places[first])
    return dataclasses.replace(difference, worst=(*where, *rest))


def _check_forms(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    if list(ours) != list(theirs):
        odd = set(ours).symmetric_difference(theirs)
        raise ConfigError(
            f"the two models do not have the same stages: {len(ours)} and {len(theirs)},"
            f" {min(odd)} only in one of them"
        )
    for name, x in theirs.items():
        if ours[name].shape != x.shape:
            raise ConfigError(
                f"the two models differ in form: {name} is {ours[name].shape} and {x.shape}"
            )
