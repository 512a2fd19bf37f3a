"""Parity check: runs the same input through two backends, and compares every activation.

The report names the first activation that diverges, as defined in `tolerance.Tolerance`. For
decoding, both backends are fed the reference's greedy tokens, one at a time through their caches,
so that an early difference does not hide later ones.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.errors import ConfigError, TokenError
from jaxllm.evaluate.parity.backends import Backend, DecodeOutput, JaxBackend, ParityCase, pad_case
from jaxllm.evaluate.parity.tolerance import (
    MAX_DRIFT,
    TOLERANCES,
    Difference,
    Tolerance,
    coarser_dtype,
    measure,
)
from jaxllm.runtime.progress import steps_bar
from jaxllm.runtime.validation import check_int


class Mismatch(NamedTuple):
    """A token that the two backends choose differently after the same text.

    step: decoding step, from 0. margin: the reference's best logit minus its second best.
    """

    row: int
    step: int
    reference: int
    ours: int
    margin: float


@dataclasses.dataclass(frozen=True)
class GreedyComparison:
    """Comparison of greedy tokens, each chosen after the reference's text.

    compared, agreed: number of tokens over all rows. first: the first mismatch. worst_margin: the
    largest margin of a mismatch, 0 without any. allowed_margin: margins up to this are ties within
    the tolerance.
    """

    compared: int
    agreed: int
    first: Mismatch | None
    worst_margin: float
    allowed_margin: float

    @property
    def holds(self) -> bool:
        """Whether all mismatches are ties."""
        return self.worst_margin <= self.allowed_margin


@dataclasses.dataclass(frozen=True)
class Report:
    """The comparison of two backends on one case.

    stages: activations in the order of computation, at every token that is not padding. decoding:
    the cache's keys and values after the steps of `greedy`, by layer, and the steps' logits.
    `worst` of an activation is (row, column) of the case and the index in the vector; of the cache
    it starts with (row, position), of decoded logits with (row, step). exact: name of the float32
    backend from which drift is measured, if any.
    """

    ours: str
    reference: str
    dtype: str
    tolerance: Tolerance
    stages: tuple[Difference, ...]
    decoding: tuple[Difference, ...]
    greedy: GreedyComparison
    exact: str | None = None

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences, in order."""
        return (*self.stages, *self.decoding)

    @property
    def first(self) -> Difference | None:
        """The first activation that diverges, if any."""
        return next((d for d in self.differences if not d.holds), None)

    @property
    def drift(self) -> float | None:
        """Drift of the logits; None without a float32 backend."""
        return self.stages[-1].drift

    @property
    def holds(self) -> bool:
        """Whether no activation diverges, greedy tokens agree, and the logits' drift is small."""
        return self.first is None and self.greedy.holds and (self.drift or 0.0) <= MAX_DRIFT


def verify(
    ours: JaxBackend,
    reference: Backend,
    case: ParityCase,
    *,
    new_tokens: int = 32,
    tolerance: Tolerance | None = None,
    exact: Backend | None = None,
    show_progress: bool | None = None,
) -> Report:
    """Run a case and `new_tokens` greedy tokens through both backends, and compare.

    Padding is excluded from every figure.

    Args:
        tolerance: By default that of the coarser of the two dtypes (`TOLERANCES`).
        exact: A float32 backend; if given, the report includes the distance of both from it.

    Raises:
        ConfigError: If the models differ in shape.
        TokenError: If the case does not fit the model.
    """
    check_int("new_tokens", new_tokens, 1, error=ConfigError)
    case.check(ours.model.config, new_tokens)
    dtype = coarser_dtype(np.dtype(ours.dtype), np.dtype(reference.dtype)).name
    tolerance = tolerance or TOLERANCES[dtype]
    sides = [reference, ours, *([exact] if exact else [])]
    stages: list[dict[str, np.ndarray]] = []
    decoded: list[DecodeOutput] = []
    with steps_bar("comparing", 2 * len(sides), show_progress) as advance:
        for side in sides:
            stages.append(side.activations(case))
            _check_shapes(stages[-1], stages[0])
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
        stages=compare_activations(case, mine, theirs, tolerance, *truth),
        decoding=tuple(_decode_differences(mine, tolerance, answer, text, *true_answer)),
        greedy=compare_greedy(answer.logits_BNV, text.logits_BNV, tolerance),
        exact=exact.name if exact else None,
    )


def example_case(texts: Sequence[int] | None, vocab_size: int, length: int) -> ParityCase:
    """Return a case of two rows padded on the left: `length` tokens, and two thirds as many.

    texts: token ids to use, one row after the other; if None or too short, ids are random, from a
    fixed seed. Raises TokenError for a length below one.
    """
    length = check_int("the length", length, 1, error=TokenError)
    lengths = (length, max(1, 2 * length // 3))
    ids = list(texts or ())
    if len(ids) < sum(lengths):
        ids = np.random.default_rng(0).integers(0, vocab_size, sum(lengths)).tolist()
    return pad_case([ids[:length], ids[length : sum(lengths)]])


def compare_activations(
    case: ParityCase,
    ours: dict[str, np.ndarray],
    theirs: dict[str, np.ndarray],
    tolerance: Tolerance,
    exact: dict[str, np.ndarray] | None = None,
) -> tuple[Difference, ...]:
    """Compare every activation, without padding. Raises ConfigError if names or shapes differ."""
    real_BT = case.real_BT[:, case.num_cached :]
    places = np.argwhere(case.real_BT)
    _check_shapes(ours, theirs)

    def one(name: str) -> Difference:
        truth = None if exact is None else exact[name][real_BT]
        found = measure(name, ours[name][real_BT], theirs[name][real_BT], tolerance, truth)
        return _with_case_index(found, places)

    return tuple(one(name) for name in theirs)


def compare_greedy(
    ours_BNV: np.ndarray, theirs_BNV: np.ndarray, tolerance: Tolerance
) -> GreedyComparison:
    """Compare the argmax tokens of both backends' logits after the same text."""
    theirs_BNV = theirs_BNV.astype(np.float64)
    mine_BN, best_BN = ours_BNV.argmax(axis=2), theirs_BNV.argmax(axis=2)
    ordered = np.partition(theirs_BNV, -2, axis=2)
    margin_BN = ordered[:, :, -1] - ordered[:, :, -2]
    differ = np.argwhere((mine_BN != best_BN).T)  # by step, then by row
    mismatches = [
        Mismatch(int(b), int(n), int(best_BN[b, n]), int(mine_BN[b, n]), float(margin_BN[b, n]))
        for n, b in differ
    ]
    return GreedyComparison(
        compared=best_BN.size,
        agreed=best_BN.size - len(mismatches),
        first=mismatches[0] if mismatches else None,
        worst_margin=max((m.margin for m in mismatches), default=0.0),
        allowed_margin=tolerance.margin(float(np.abs(theirs_BNV).max())),
    )


def _decode_differences(
    stages: dict[str, np.ndarray],
    tolerance: Tolerance,
    ours: DecodeOutput,
    theirs: DecodeOutput,
    exact: DecodeOutput | None = None,
) -> Iterator[Difference]:
    """Compare cache entries at every position that both hold, and the logits of each step."""
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
            yield _with_case_index(found, places)
    truth = [exact.logits_BNV] if exact else []
    yield measure("decoded logits", ours.logits_BNV, theirs.logits_BNV, tolerance, *truth)


def _with_case_index(difference: Difference, places: np.ndarray) -> Difference:
    """Replace the first index of `worst` by the row and column that it has in `places`."""
    first, *rest = difference.worst
    where = tuple(int(i) for i in places[first])
    return dataclasses.replace(difference, worst=(*where, *rest))


def _check_shapes(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    if list(ours) != list(theirs):
        odd = set(ours).symmetric_difference(theirs)
        raise ConfigError(
            f"the two models have different activations: {len(ours)} and {len(theirs)},"
            f" {min(odd)} only in one of them"
        )
    for name, x in theirs.items():
        if ours[name].shape != x.shape:
            raise ConfigError(
                f"the two models differ in shape: {name} is {ours[name].shape} and {x.shape}"
            )
