"""Random requests, each run in many ways: every token and log-probability must have the same bits.

    python scripts/tools/same_bits.py --requests 1000
    python scripts/tools/same_bits.py --minutes 60 --seed 1

Each request draws a prompt, a length, a seed and options: samplers, penalties, stop strings,
grammars. `LM.generate` alone gives the text that all other ways must repeat: streamed, speculated
with the prompt's n-grams and with a draft model, served at random times among others of which some
are cancelled, through a prefix cache, and served with drafts. A cancelled request must have the
first tokens of its text. One draft model is sound, one has random weights, and one has died: its
weights are NaN. One decision: everything random follows from --seed, so that a run is reproducible.

The exit status is 1 if an answer differs.
"""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import jaxllm
from jaxllm.cli import run_command
from jaxllm.cli.console import write
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.generation.completion import Completion
from jaxllm.generation.loops.draft import PromptLookup
from jaxllm.models.invariance import has_invariant_rows, make_invariant
from jaxllm.runtime.progress import steps_bar
from jaxllm.weights.quantize import quantize

EXAMPLE = "Example: python scripts/tools/same_bits.py --requests 200 --seed 1"
ROWS, ROUND = 8, 40  # requests are drawn, and run in every way, a round at a time
ROUNDS_PER_TRIM = 3  # then programs are forgotten: Linux bounds the number of a process's mappings
BEGINNINGS = ("Once upon a time", "One day, a girl", "The cat was", "Tom and Mia", "She said: ")
WORDS = ("the", "cat", "and", "a", "red", "ball", "ran", "to", "her", "big", "tree", "was", "happy")
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}},
          "required": ["age"], "additionalProperties": False}  # fmt: skip
OPTIONS: tuple[Callable[[np.random.Generator], dict[str, Any]], ...] = (
    lambda rng: {"do_sample": False},
    lambda rng: {"temperature": rng.uniform(0.5, 1.5)},
    lambda rng: {"temperature": rng.uniform(0.5, 1.5), "top_k": int(rng.integers(1, 60))},
    lambda rng: {"temperature": 1.0, "top_p": rng.uniform(0.3, 1)},
    lambda rng: {"temperature": 1.2, "min_p": rng.uniform(0.01, 0.3)},
    lambda rng: {"do_sample": False, "repetition_penalty": rng.uniform(1, 1.5)},
    lambda rng: {"temperature": 0.8, "frequency_penalty": rng.uniform(0, 1), "top_k": 50},
    lambda rng: {"temperature": 1.0, "stop_strings": [".", "!"]},
    lambda rng: {"temperature": 1.0, "regex": r"[A-Z][a-z]{2,8}( [a-z]{1,6})*\."},
    lambda rng: {"temperature": 0.9, "json_schema": SCHEMA},
)  # by kind; numbers differ from request to request
Request = dict[str, Any]
Answers = Iterable[tuple[int, Completion | JaxllmError]]  # with the request's number


def draw_request(lm: jaxllm.LM, rng: np.random.Generator) -> Request:
    """Draw a prompt of 1 to about 60 tokens, options, a length of 1 to 24 tokens, and a seed."""
    kind = int(rng.integers(len(OPTIONS)))
    words = rng.choice(WORDS, int(rng.integers(0, 50))).tolist()
    text = " ".join([BEGINNINGS[rng.integers(len(BEGINNINGS))], *words])
    return {
        "prompt": lm.encode(text)[: int(rng.integers(1, 60))],
        "max_new_tokens": int(rng.integers(1, 25)),
        "seed": int(rng.integers(1 << 31)),
        **OPTIONS[kind](rng),
    }


def run_alone(lm: jaxllm.LM, requests: Sequence[Request], **options: Any) -> Answers:
    """Run requests one after the other by `LM.generate`."""
    return enumerate([lm.generate(**request, **options) for request in requests])


def run_stream(lm: jaxllm.LM, requests: Sequence[Request]) -> Answers:
    """Run requests one after the other by `LM.stream`."""
    found = []
    for request in requests:
        chunks = list(lm.stream(**request))
        text, ids = "".join(chunk.text for chunk in chunks), [chunk.token for chunk in chunks]
        finish = chunks[-1].finish_reason or ""
        scores = [chunk.logprob for chunk in chunks]
        found.append(Completion(text, ids, scores, finish, len(request["prompt"])))
    return enumerate(found)


def run_served(
    lm: jaxllm.LM, requests: Sequence[Request], rng: np.random.Generator, **options: Any
) -> Answers:
    """Run requests by `LM.serve`, in another order, at random times, beside some that leave."""
    order = rng.permutation(len(requests)).tolist()

    def yield_arrivals() -> Iterator[Request | None]:
        for number in order:
            while rng.random() < 0.3:
                yield None
            if rng.random() < 0.2:
                leaving = int(rng.integers(len(requests)))
                leave = cancel_after(int(rng.integers(0, 9)))
                yield {**requests[leaving], "id": leaving, "is_cancelled": leave}
            yield {**requests[number], "id": number}

    return lm.serve(yield_arrivals(), rows=ROWS, capacity=96, **options)


def cancel_after(calls: int) -> Callable[[], bool]:
    """Return an `is_cancelled` that returns True after `calls` calls."""
    remaining = iter(range(calls))
    return lambda: next(remaining, None) is None


def make_ways(
    lm: jaxllm.LM, rng: np.random.Generator
) -> dict[str, Callable[[Sequence[Request]], Answers]]:
    """Return the ways to run requests, by name; the first is alone."""
    small = dataclasses.replace(lm, params=quantize(lm.params, "int4"))
    other = jax.tree.map(lambda x: jnp.roll(x, 1), lm.params)
    dead = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), lm.params)
    drafts = itertools.cycle(
        [PromptLookup(), small, dataclasses.replace(lm, params=other),
         dataclasses.replace(lm, params=dead)]
    )  # fmt: skip
    store = jaxllm.PrefixCache(1 << 24, chunk=16)
    shared = lm.encode(BEGINNINGS[0] + " the cat and a red ball")
    return {
        "alone": lambda requests: run_alone(lm, requests),
        "streamed": lambda requests: run_stream(lm, requests),
        "speculated by n-grams": lambda requests: run_alone(
            lm, requests, prompt_lookup_num_tokens=4
        ),
        "speculated by a draft": lambda requests: run_alone(lm, requests, assistant_model=small),
        "served among others": lambda requests: run_served(lm, requests, rng),
        "served, prefix cache": lambda requests: run_served(
            lm, requests, rng, prefix_cache=store, shared_prefixes=[shared]
        ),
        "served, drafts": lambda requests: run_served(
            lm, requests, rng, draft=next(drafts), prefix_cache=store
        ),
    }


def compare(wanted: Any, found: Any) -> bool:
    """Return whether two answers have the same tokens, text and bits of log-probabilities.

    Speculative decoding reports no log-probabilities. A cancelled answer may end early.
    """
    if isinstance(wanted, JaxllmError) or isinstance(found, JaxllmError):
        return str(wanted) == str(found)
    if found.finish_reason == "cancelled":
        size = len(found.tokens)
        return (found.tokens, found.logprobs) == (wanted.tokens[:size], wanted.logprobs[:size])
    scores = not found.logprobs or wanted.logprobs == found.logprobs
    return scores and (wanted.tokens, wanted.text) == (found.tokens, found.text)


def same_bits(
    model: Annotated[str, typer.Argument(help="Model.")] = "demo:llama",
    requests: Annotated[int, typer.Option(min=1, help="Requests.")] = 1000,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Draw requests for this long instead.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the model.")] = "float32",
    quantized: Annotated[str | None, typer.Option(help="Format of its weights.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Run random requests in many ways, and compare all bits."""
    lm = jaxllm.load(model, dtype=dtype, **({"quantize": quantized} if quantized else {}))
    lm = dataclasses.replace(lm, model=make_invariant(lm.model))
    if not has_invariant_rows(lm.model, lm.params):
        raise ConfigError("this model, or this installation, makes no promise of equal bits")
    rng = np.random.default_rng(seed)
    ways, begin, count = make_ways(lm, rng), time.monotonic(), 0
    finished, cancelled, differing = Counter[str](), Counter[str](), Counter[str]()
    tokens = 0

    def more() -> bool:
        if minutes is None:
            return count < requests
        return time.monotonic() - begin < 60 * minutes

    with steps_bar("requests", requests if minutes is None else 0) as advance:
        while more():
            size = ROUND if minutes is not None else min(ROUND, requests - count)
            drawn = [draw_request(lm, rng) for _ in range(size)]
            answers = {name: list(run(drawn)) for name, run in ways.items()}
            alone = [answer for _, answer in answers["alone"]]
            count += size
            tokens += sum(len(getattr(one, "tokens", ())) for one in alone)
            for name, found in answers.items():
                missing = set(range(size))
                for number, answer in found:
                    if getattr(answer, "finish_reason", "") == "cancelled":
                        cancelled[name] += 1
                    else:
                        finished[name] += 1
                        missing.discard(number)
                    if not compare(alone[number], answer):
                        differing[name] += 1
                        write(f"{name}: {drawn[number]}\n  {alone[number]}\n  {answer}\n")
                for number in missing:
                    differing[name] += 1
                    write(f"{name}: no answer to {drawn[number]}\n")
            for _ in range(size):
                advance()
            if count % (ROUND * ROUNDS_PER_TRIM) == 0:
                jax.clear_caches()
    seconds = time.monotonic() - begin
    write(f"{count:,} requests, {tokens:,} tokens, {seconds:,.0f} s\n\n")
    write("| way | finished | cancelled | differ |\n|---|---:|---:|---:|\n")
    for name in ways:
        write(f"| {name} | {finished[name]:,} | {cancelled[name]:,} | {differing[name]} |\n")
    if differing:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(same_bits, "python scripts/tools/same_bits.py", EXAMPLE)
