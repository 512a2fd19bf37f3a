"""Whether a text has the same bits however it is run: `jaxllm verify --invariance`.

Each way of running it is compared with the text alone in one pass: first the activations of every
layer, then a sampled continuation with its log-probabilities. A model on a mesh is also compared
with one device, but not as a tree and not in another process.
"""

import dataclasses
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.cache.batch_ops import fork
from jaxllm.cache.commit import commit
from jaxllm.cache.kv import KVCache, init_cache
from jaxllm.cache.prefix_cache import PrefixCache
from jaxllm.generation.completion import Completion
from jaxllm.generation.loops.draft import PromptLookup
from jaxllm.lm import LM, to_one_device
from jaxllm.models.invariance import has_invariant_rows, make_invariant
from jaxllm.steps import forward

READ = ("embed", "blocks.*.resid_mid", "blocks.*.resid_post", "final_norm")
Stages = dict[str, np.ndarray]  # activations `[T, D]` of one text, in the order of computation


class Comparison(NamedTuple):
    """One way of running a text. stage: the first that differs, "" if none does; error: by how much
    at most there.
    """

    way: str
    stage: str = ""
    error: float = 0.0


@dataclasses.dataclass(frozen=True)
class InvarianceReport:
    """The result of `check_invariance`. promised: whether the model promises equal bits."""

    comparisons: tuple[Comparison, ...]
    promised: bool

    @property
    def holds(self) -> bool:
        return not any(comparison.stage for comparison in self.comparisons)


def check_invariance(
    lm: LM,
    *,
    length: int = 80,
    new_tokens: int = 24,
    show: Callable[[Comparison], None] = print,
    load: Callable[[], LM] | None = None,
) -> InvarianceReport:
    """Run a random text in many ways, compare all bits, and `show` each comparison at once.

    Args:
        length: Tokens of the text; its continuation has `new_tokens`.
        load: Loads the model in another process, so it can be pickled; None: compare none.
    """
    lm = dataclasses.replace(lm, model=make_invariant(lm.model))
    rng = np.random.default_rng(0)
    text_T = rng.integers(3, lm.config.vocab_size, length).astype(np.int32)
    others_RT = rng.integers(3, lm.config.vocab_size, (32, length)).astype(np.int32)
    comparisons = []
    for comparison in itertools.chain(
        _compare_passes(lm, text_T, others_RT),
        _compare_texts(lm, text_T, others_RT, new_tokens),
        _compare_grammars(lm, text_T, new_tokens),
        () if load is None else _compare_process(lm, load, text_T, new_tokens),
    ):
        show(comparison)
        comparisons.append(comparison)
    return InvarianceReport(tuple(comparisons), has_invariant_rows(lm.model, lm.params))


def _compare_passes(lm: LM, text_T: np.ndarray, others_RT: np.ndarray) -> Iterator[Comparison]:
    """Compare activations and logits of the text in differently cut and padded passes."""
    T = text_T.size
    alone, row = text_T[None], np.arange(T)[None]
    whole = _run(lm, alone, row, 0, [T], None)
    for rows in (2, 3, 4, 8, 16, 32):
        batch_BT = others_RT[:rows].copy()
        batch_BT[rows // 2] = text_T
        stages = _run(lm, batch_BT, np.tile(row, (rows, 1)), rows // 2, [T], None)
        yield _compare(f"one of {rows} rows", whole, stages)
    for chunk in (1, 2, 7, 16, 64):
        sizes = [chunk] * (T // chunk) + [T % chunk] * (T % chunk > 0)
        yield _compare(f"chunks of {chunk}", whole, _run(lm, alone, row, 0, sizes, T))
    for name, pad in (("left", (9, 0)), ("right", (0, 9))):
        padded_BT = np.pad(alone, ((0, 0), pad))
        position_BT = np.pad(row, ((0, 0), pad), constant_values=-1)
        stages = _run(lm, padded_BT, position_BT, 0, [T + 9], None)
        yield _compare(f"padding on the {name}", whole, stages)
    yield _compare(
        "a cache of 4 times the size", whole, _run(lm, alone, row, 0, [16, T - 16], 4 * T)
    )
    yield _compare("a prefix shared by 3 rows", whole, _run_forked(lm, text_T))
    config = lm.config
    if lm.model.is_sharded:
        yield _compare("one device", whole, _run(to_one_device(lm), alone, row, 0, [T], None))
    elif config.attention is None or config.attention.runs_trees:
        yield _compare("a path of a tree", whole, _run_tree(lm, text_T))
    jax.clear_caches()
    yield _compare("compiled anew", whole, _run(lm, alone, row, 0, [T], None))


def _run(
    lm: LM,
    token_BT: np.ndarray,
    position_BT: np.ndarray,
    row: int,
    sizes: list[int],
    capacity: int | None,
) -> Stages:
    """Return what one row's real tokens compute, if all run in pieces of these sizes."""
    cache = None if capacity is None else init_cache(lm.model, len(token_BT), capacity)
    pieces, start = [], 0
    for size in sizes:
        at = slice(start, start + size)
        stages, cache = _run_piece(lm, cache, token_BT[:, at], position_BT[:, at])
        pieces.append({name: x[row][position_BT[row, at] >= 0] for name, x in stages.items()})
        start += size
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _run_forked(lm: LM, text_T: np.ndarray) -> Stages:
    """Return what the text computes if its first half is shared with two other rows."""
    half = text_T.size // 2
    position_BT = np.arange(text_T.size)[None]
    start = init_cache(lm.model, 1, half)
    first, cache = _run_piece(lm, start, text_T[None, :half], position_BT[:, :half])
    assert cache is not None
    rest_BT = np.stack([text_T[half:][::-1], text_T[half:], text_T[:half][: text_T.size - half]])
    branches = fork(cache, 3, capacity=text_T.size)
    rest, _ = _run_piece(lm, branches, rest_BT, np.tile(position_BT[:, half:], (3, 1)))
    return {name: np.concatenate([x[0], rest[name][1]]) for name, x in first.items()}


def _run_tree(lm: LM, text_T: np.ndarray) -> Stages:
    """Return what the text computes if its second half is every other node of a tree."""
    half = text_T.size // 2
    start = init_cache(lm.model, 1, half)
    first, cache = _run_piece(lm, start, text_T[None, :half], np.arange(half)[None])
    node_BN = np.stack([text_T[half:], text_T[half:][::-1]], axis=1).reshape(1, -1)
    parent_N = np.arange(node_BN.size) // 2 * 2 - 2  # of both: the text's node before
    parent_N[:2] = -1
    out = forward(lm.model, lm.params, cache, node_BN, parents=parent_N[None], read=READ)
    rest = {**out.sites, "logits": out.logits}
    return {
        name: np.concatenate([x[0], np.asarray(rest[name])[0, ::2]]) for name, x in first.items()
    }


def _run_piece(
    lm: LM, cache: KVCache | None, token_BT: np.ndarray, position_BT: np.ndarray
) -> tuple[Stages, KVCache | None]:
    out = forward(lm.model, lm.params, cache, token_BT, positions_BT=position_BT, read=READ)
    assert out.sites is not None
    stages = {name: np.asarray(x) for name, x in {**out.sites, "logits": out.logits}.items()}
    return stages, None if cache is None else commit(cache, out.delta)


def _compare(way: str, whole: Stages, other: Stages) -> Comparison:
    for name, wanted in whole.items():
        if wanted.tobytes() != other[name].tobytes():
            error = np.abs(wanted.astype(np.float64) - other[name].astype(np.float64)).max()
            return Comparison(way, name, float(error))
    return Comparison(way)


def _compare_texts(
    lm: LM, text_T: np.ndarray, others_RT: np.ndarray, new_tokens: int
) -> Iterator[Comparison]:
    """Compare a sampled continuation and its log-probabilities, drawn in other company."""
    options: Any = {"max_new_tokens": new_tokens, "temperature": 1.0, "top_p": 0.95, "seed": 7}
    prompt, others = text_T.tolist(), others_RT.tolist()
    wanted = lm.generate(prompt, **options)
    yield _compare_text(
        "one of 4 prompts", wanted, lm.generate([prompt, *others[:3]], **options)[0]
    )
    drafted = lm.generate(prompt, prompt_lookup_num_tokens=4, max_matching_ngram_size=1, **options)
    yield _compare_text("speculation", wanted, drafted, logprobs=False)
    request = {"id": "it", "prompt": prompt, **options}
    crowd = [{"prompt": other[: 9 + i], **options} for i, other in enumerate(others[:9])]
    store = PrefixCache(1 << 26)
    capacity = text_T.size + new_tokens
    for name, requests, cache in (
        ("served alone", [request], None),
        ("served among 9 others", [*crowd[:5], request, *crowd[5:]], None),
        ("served, its prompt cached", [request, {**request, "id": "again"}], store),
        ("served from the cache", [request], store),
    ):
        served = dict(lm.serve(requests, rows=4, capacity=capacity, prefix_cache=cache))
        yield _compare_text(name, wanted, served["it"])
    if has_invariant_rows(lm.model, lm.params):  # else `serve` refuses a draft
        drafted = lm.serve(
            [*crowd[:3], request], rows=4, capacity=capacity, draft=PromptLookup(ngram=1)
        )
        yield _compare_text("served with speculation", wanted, dict(drafted)["it"])


def _compare_grammars(lm: LM, text_T: np.ndarray, new_tokens: int) -> Iterator[Comparison]:
    """Compare a text with a grammar: forced tokens run one by one, in one pass, and in serve."""
    if lm.tokenizer is None or find_spec("llguidance") is None:
        return
    options: Any = {"max_new_tokens": new_tokens, "temperature": 1.0, "seed": 7}
    options |= {"lark": 'start: "Once upon a time" /[a-z ,]{4,20}/ ". The end."'}
    prompt = text_T.tolist()
    wanted = lm.generate(prompt, fast_forward=False, **options)
    yield _compare_text("forced tokens in one pass", wanted, lm.generate(prompt, **options))
    request = {"prompt": prompt, **options}
    requests = [{**request, "prompt": prompt[:9]}, {**request, "id": "it"}, request]
    served = dict(lm.serve(requests, rows=2, capacity=text_T.size + new_tokens))
    yield _compare_text("served with a grammar", wanted, served["it"])


def _compare_process(
    lm: LM, load: Callable[[], LM], text_T: np.ndarray, new_tokens: int
) -> Iterator[Comparison]:
    """Compare a continuation and log-probabilities with those of a process with one thread."""
    options: Any = {"max_new_tokens": new_tokens, "temperature": 1.0, "seed": 7}
    arguments = text_T.tolist(), options
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _use_one_thread) as pool:
        other, other_T = pool.submit(_load_and_answer, load, *arguments).result()
    wanted, wanted_T = _answer(lm, *arguments)
    yield _compare_text("another process", wanted, other)
    name = "log-probabilities"
    yield _compare("scored by another process", {name: wanted_T}, {name: other_T})


def _use_one_thread() -> None:
    os.environ["PJRT_NPROC"] = "1"  # read once XLA creates its CPU client


def _load_and_answer(load: Callable[[], LM], *arguments: Any) -> tuple[Completion, np.ndarray]:
    return _answer(load(), *arguments)


def _answer(lm: LM, prompt: list[int], options: Any) -> tuple[Completion, np.ndarray]:
    return lm.generate(prompt, **options), lm.log_probs(prompt)


def _compare_text(way: str, wanted: Any, other: Any, logprobs: bool = True) -> Comparison:
    if wanted.tokens != other.tokens:
        return Comparison(way, "text", float("nan"))
    if logprobs and wanted.logprobs != other.logprobs:
        error = max(abs(a - b) for a, b in zip(wanted.logprobs, other.logprobs, strict=True))
        return Comparison(way, "log-probabilities", error)
    return Comparison(way)
