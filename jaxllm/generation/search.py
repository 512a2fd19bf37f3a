"""Searches over the continuations of one prompt, none of which copies the prompt's cache.

A search is a loop in Python over `forward(..., parents=, tree=)`: it chooses which continuations to
run next, and all of these run in one pass. It draws nothing at random; ties go to what was found
first. The user's `score` ranks continuations. `best_of` samples whole continuations instead.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Required, TypedDict, Unpack

import jax
import numpy as np

from jaxllm.cache.batch_ops import fork
from jaxllm.cache.kv import KVCache, TreeDelta, init_cache
from jaxllm.cache.tree import init_tree
from jaxllm.errors import NonFiniteError, SamplingError
from jaxllm.generation.loops.finish import check_positions, pad_eos_ids
from jaxllm.generation.loops.generate import generate
from jaxllm.generation.sampling.constraints import MissingIds
from jaxllm.generation.sampling.sampler import GREEDY, Context, Sampler, apply_processors
from jaxllm.models.inputs import check_predicts_tokens
from jaxllm.ops.padding import bucket_size, next_power_of_two
from jaxllm.ops.row_sums import log_softmax
from jaxllm.runtime.validation import as_token_array, check_int, is_number
from jaxllm.steps import forward, prefill
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


class Branch(NamedTuple):
    """A continuation of the prompt. Its last token has not run.

    Attributes:
        logprobs: Each token's log-probability under the model.
        node: The node of its last token but one, -1 for the prompt's last token; of `best_of`, the
            row of the cache.
        is_finished: Whether it ends with an end-of-text token or has `max_new_tokens` tokens.
        score: `score` of the branch.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    node: int = -1
    is_finished: bool = False
    score: float = -math.inf


Score = Callable[[Branch], float]


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
        best: The finished branch with the best score; if none is finished, the best of all.
        finished: The finished branches, best first.
        cache: The prompt's; of `best_of`, a row per branch without its last token.
        tree: The nodes that ran; None of `best_of`.
    """

    best: Branch
    finished: tuple[Branch, ...]
    cache: KVCache
    tree: TreeDelta | None


def mean_logprob(branch: Branch) -> float:
    """Return the mean log-probability of a branch's tokens."""
    return sum(branch.logprobs) / len(branch.logprobs)


def best_of(
    model: Model,
    params: Params,
    prompt: Sequence[int],
    n: int,
    *,
    max_new_tokens: int,
    sampler: Sampler,
    seed: int | jax.Array = 0,
    score: Score = mean_logprob,
    eos_token_ids: Sequence[int] = (),
    cache: KVCache | None = None,
    chunk: int | None = None,
) -> SearchResult:
    """Sample n continuations, which share the prompt's cache by reference, and rank them.

    Continuation i is that of row i of `generate` with the prompt in n rows and the same seed.

    Args:
        score: Returns a number for a branch, larger for better ones.
        cache: One row that the prompt continues; it stays valid.
        Others as for `generate`.

    Raises:
        SamplingError: For a score that is not a number.
        ConfigError: For a model with a score head, and what `generate` and `fork` raise.
    """
    check_predicts_tokens(model.config)
    token_T = as_token_array("prompt", prompt)
    if token_T.size > 1:
        cache = prefill(
            model, params, _room(model, cache, token_T), token_T[None, :-1], chunk=chunk
        ).cache
    check_int("max_new_tokens", max_new_tokens, 1)
    rows = fork(_room(model, cache, token_T), n, capacity=bucket_size(max_new_tokens))
    out = generate(
        model, params, np.repeat(token_T[None, -1:], n, axis=0), cache=rows, sampler=sampler,
        seed=seed, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids,
    )  # fmt: skip
    token_BT, logprob_BT = np.asarray(out.token_BT), np.asarray(out.logprob_BT)
    branches = []
    for row, length in enumerate(np.asarray(out.length_B).tolist()):
        text, logprobs = (tuple(x[row, :length].tolist()) for x in (token_BT, logprob_BT))
        branches.append(_scored(Branch(text, logprobs, row, True), score))
    return _result(branches, out.cache, None)


class SearchKwargs(TypedDict, total=False):
    """Keyword arguments of `best_first` and `mcts`.

    Attributes:
        max_new_tokens: Tokens of a finished branch, if no end-of-text token comes before; required.
        budget: Maximum number of nodes to run; required.
        width: How many of the likeliest next tokens continue each branch; 4 by default.
        batch: How many branches to continue in one pass; 4 by default.
        score, cache: As for `best_of`.
        eos_token_ids, chunk: As for `generate`.
        tokenizer: Ids without one of its tokens continue no branch; by default all may.
    """

    max_new_tokens: Required[int]
    budget: Required[int]
    width: int
    batch: int
    score: Score
    eos_token_ids: Sequence[int]
    cache: KVCache | None
    chunk: int | None
    tokenizer: Tokenizer | None


def best_first(
    model: Model, params: Params, prompt: Sequence[int], **options: Unpack[SearchKwargs]
) -> SearchResult:
    """Continue the branches with the best scores until the best one is finished.

    If a branch never scores better than its beginnings, as with the sum of log-probabilities, and
    the budget suffices, the result is the best branch of all (uniform-cost search; Hart, Nilsson
    and Raphael 1968).

    Raises:
        SamplingError: For values out of range, and a score that is not a number.
        CapacityError: If the text exceeds the model's positions.
        NonFiniteError: If log-probabilities are not finite.
        ConfigError: For a model with a score head.
        JaxllmError: Whatever else `forward` and `prefill` raise.
    """
    grower = _Grower(model, params, prompt, **options)
    frontier, order = list[tuple[float, int, Branch]](), itertools.count()
    children = grower.root()
    while True:
        for child in children:
            heapq.heappush(frontier, (-child.score, next(order), child))
        chosen = list[Branch]()
        while frontier and len(chosen) < min(grower.batch, grower.budget - grower.nodes):
            if frontier[0][2].is_finished:
                break
            chosen.append(heapq.heappop(frontier)[2])
        if not chosen:
            return _result([branch for *_, branch in sorted(frontier)], grower.cache, grower.tree)
        children = [child for each in grower.extend(chosen) for child in each]


class _Visits:
    """Statistics of a branch for `mcts`: visits begun, visits ended, and the sum of values."""

    def __init__(self, branch: Branch, prior: float) -> None:
        self.branch, self.prior = branch, prior
        self.children = list[_Visits]()
        self.begun, self.ended, self.total = 0, 0, 0.0


def mcts(
    model: Model,
    params: Params,
    prompt: Sequence[int],
    *,
    c: float = 1.0,
    **options: Unpack[SearchKwargs],
) -> SearchResult:
    """Search with Monte Carlo tree search, whose values are the scores of branches.

    A visit descends from the prompt to the child with the largest Q / N + c P sqrt(N_parent) / (1 +
    N), where P is the child's probability among its siblings (PUCT; Silver et al. 2017, "Methods").
    A child without a value has its parent's mean value. At a branch that has not run, it adds the
    branch's children and its score to the Q of each branch on the way. Visits of one batch that
    have not ended count in N, but not in the mean Q / N (Liu et al. 2020, WU-UCT).

    Args:
        c: Weight of exploration, 0 or more.
        options: The budget is the number of visits, each of which runs at most one node.

    Raises what `best_first` raises.
    """
    if not is_number(c) or not 0 <= c < math.inf:
        raise SamplingError(f"c must be a number of at least 0, got {c!r:.40}")
    grower = _Grower(model, params, prompt, **options)
    root = _Visits(Branch(), 1.0)
    root.children = _with_priors(grower.root())
    seen = dict[tuple[int, ...], Branch]()
    while root.ended < grower.budget:
        ways = list[list[_Visits]]()
        while len(ways) < min(grower.batch, grower.budget - root.ended):
            way = _descend(root, c)
            if any(way[-1] is other[-1] for other in ways):
                break
            for visited in way:
                visited.begun += 1
            ways.append(way)
        open_ = [way[-1] for way in ways if not way[-1].branch.is_finished]
        for leaf, children in zip(open_, grower.extend([x.branch for x in open_]), strict=True):
            leaf.children = _with_priors(children)
        for way in ways:
            value = way[-1].branch.score
            seen.setdefault(way[-1].branch.tokens, way[-1].branch)
            for visited in way:
                visited.ended += 1
                visited.total += value
    return _result([*seen.values()], grower.cache, grower.tree)


def _descend(root: _Visits, c: float) -> list[_Visits]:
    """Return the way from the root to the branch to visit."""
    way = [root]
    while way[-1].children:
        above = way[-1]
        explore = c * math.sqrt(above.begun)
        mean = above.total / above.ended if above.ended else 0.0

        def rank(child: _Visits, mean: float = mean, explore: float = explore) -> float:
            value = child.total / child.ended if child.ended else mean
            return value + explore * child.prior / (1 + child.begun)

        way.append(max(above.children, key=rank))
    return way


def _with_priors(children: Sequence[Branch]) -> list[_Visits]:
    weights = [math.exp(child.logprobs[-1]) for child in children]
    return [_Visits(x, weight / sum(weights)) for x, weight in zip(children, weights, strict=True)]


class _Grower:
    """Runs branches as nodes of one tree. nodes: how many have run."""

    def __init__(
        self,
        model: Model,
        params: Params,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        budget: int,
        width: int = 4,
        batch: int = 4,
        score: Score = mean_logprob,
        eos_token_ids: Sequence[int] = (),
        cache: KVCache | None = None,
        chunk: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        check_predicts_tokens(model.config)
        token_T = as_token_array("prompt", prompt)
        self.budget, self.batch = check_int("budget", budget, 1), check_int("batch", batch, 1)
        self._longest = check_int("max_new_tokens", max_new_tokens, 1)
        self._width = check_int("width", width, 1, model.config.vocab_size)
        self._model, self._params, self._score = model, params, score
        self._eos = {*pad_eos_ids(eos_token_ids).tolist()}
        missing = tokenizer and tokenizer.missing_ids(model.config.vocab_size, tuple(eos_token_ids))
        self._sampler = Sampler((MissingIds(missing),)) if missing else GREEDY
        self._logits, self.cache = prefill(
            model, params, _room(model, cache, token_T), token_T[None], chunk=chunk
        )
        check_positions(int(self.cache.next_position_B[0]) + self._longest - 1, model.config)
        self.tree = init_tree(self.cache, next_power_of_two(budget + batch))

    @property
    def nodes(self) -> int:
        return int(self.tree.size)

    def root(self) -> list[Branch]:
        """Return the branches of one token."""
        return self._children([Branch()], [-1], self._logits)[0]

    def extend(self, branches: Sequence[Branch]) -> list[list[Branch]]:
        """Run each branch's last token; return the branches that continue it."""
        if not branches:
            return []
        first, n = self.nodes, len(branches)
        # Repeated up to a constant number, so that one program runs; the copies are dropped.
        rows = [*branches, *[branches[0]] * (self.batch - n)]
        out = forward(
            self._model, self._params, self.cache, [[x.tokens[-1] for x in rows]],
            parents=[[x.node for x in rows]], tree=self.tree,
        )  # fmt: skip
        assert isinstance(out.delta, TreeDelta)
        self.tree = out.delta.replace(size=np.int32(first + n))
        return self._children(branches, range(first, first + n), out.logits[0])

    def _children(
        self, branches: Sequence[Branch], nodes: Sequence[int], logits_RV: jax.Array
    ) -> list[list[Branch]]:
        logprob_RC, token_RC = (
            np.asarray(x) for x in _likeliest(logits_RV, self._width, self._sampler)
        )
        if np.isnan(logprob_RC).any():
            raise NonFiniteError("the logits of a branch are not finite")
        families = []
        for branch, node, logprobs, tokens in zip(
            branches, nodes, logprob_RC.tolist(), token_RC.tolist(), strict=False
        ):
            family = []
            for logprob, token in zip(logprobs, tokens, strict=True):
                if logprob == -math.inf:  # without a token
                    continue
                text = (*branch.tokens, token)
                ends = token in self._eos or len(text) == self._longest
                child = Branch(text, (*branch.logprobs, logprob), node, ends)
                family.append(_scored(child, self._score))
            families.append(family)
        return families


@partial(jax.jit, static_argnums=1)
def _likeliest(logits_RV: jax.Array, n: int, sampler: Sampler) -> Any:
    """Return the largest log-probabilities and their tokens, `[R, n]` each, largest first."""
    context = Context.empty(jax.random.key(0), logits_RV.shape[0])
    return jax.lax.top_k(apply_processors(log_softmax(logits_RV), sampler, context), n)


def _room(model: Model, cache: KVCache | None, token_T: np.ndarray) -> KVCache:
    """Return the cache, or an empty one for the prompt."""
    return init_cache(model, 1, bucket_size(token_T.size)) if cache is None else cache


def _scored(branch: Branch, score: Score) -> Branch:
    value = score(branch)
    if not is_number(value) or math.isnan(value):
        raise SamplingError(f"score must return a number, got {value!r:.60}")
    return branch._replace(score=float(value))


def _result(branches: Sequence[Branch], cache: KVCache, tree: TreeDelta | None) -> SearchResult:
    ranked = sorted(branches, key=lambda branch: -branch.score)
    finished = tuple(branch for branch in ranked if branch.is_finished)
    return SearchResult((finished or ranked)[0], finished, cache, tree)
