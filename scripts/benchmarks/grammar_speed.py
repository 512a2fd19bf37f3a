"""Decoding speed with and without a grammar, and the time of masks, for BENCHMARKS.md.

One decision: the grammars never end or force a text, so that every run has the same number of
tokens; their rounds alternate with those without a grammar, so that background load affects all.

    python scripts/benchmarks/grammar_speed.py demo:llama --tokenizer gpt2=path/to/gpt2_tokenizer
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxllm
from jaxllm.generation.sampling.grammar_mask import grammar_mask
from jaxllm.generation.sampling.options import make_sampler
from jaxllm.generation.sampling.sampler import Context, sample_next
from jaxllm.grammar import Grammar
from jaxllm.grammar.automaton import TokenAutomaton
from jaxllm.grammar.grammar import start_matcher
from jaxllm.grammar.vocabulary import Vocabulary, make_vocabulary
from jaxllm.text.byte_level import BYTE_OF_SYMBOL, byte_level_step
from jaxllm.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["title", "year", "tags"],
    "additionalProperties": False,
}
# Endless: end-of-text is banned, and each of them can go on without it.
DECODED: dict[str, Grammar | None] = {
    "none": None,
    "regex (?s).*": Grammar.regex("(?s).*"),
    "regex of a JSON string's inside": Grammar.regex(r'([^"\\\x00-\x1f]|\\["\\nrt])*'),
    "schema of many strings": Grammar.json_schema(
        {"type": "array", "items": {"type": "string"}, "minItems": 1000}
    ),
}
MASKED = {
    "regex, a date": Grammar.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "regex (?s).*": Grammar.regex("(?s).*"),
    "choice of 100": Grammar.choice([f"answer {number}" for number in range(100)]),
    "schema of three keys": Grammar.json_schema(SCHEMA),
}


def make_tokenizer(size: int) -> Tokenizer:
    """Return a byte-level tokenizer with `size` tokens: the bytes, and random words."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    vocabulary = {symbol: index for index, symbol in enumerate(BYTE_OF_SYMBOL)}
    while len(vocabulary) < size - 1:
        word = "".join(rng.choice(letters, rng.integers(2, 12)))
        vocabulary.setdefault(rng.choice(["", "Ġ"]) + word, len(vocabulary))
    tree = {
        "added_tokens": [
            {"id": size - 1, "content": "<eos>", "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
        ],
        "pre_tokenizer": byte_level_step(),
        "decoder": byte_level_step(),
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
        config = json.dumps({"eos_token": "<eos>"})
        Path(folder, "tokenizer_config.json").write_text(config, encoding="utf-8")
        return Tokenizer.from_directory(folder)


def decode_speeds(lm: jaxllm.LM, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the new tokens per second of each round, without and with each grammar."""
    speeds: dict[str, list[float]] = {name: [] for name in DECODED}
    eos = lm.tokenizer.eos_id if lm.tokenizer else None
    banned: dict[str, Any] = {"min_new_tokens": tokens, "max_new_tokens": tokens}
    for number in range(rounds + 1):  # the first one compiles
        for name, grammar in DECODED.items():
            options = banned if grammar is None else {**banned, "grammar": grammar}
            began = time.perf_counter()
            done = lm.generate("Once", temperature=1.0, seed=number, eos_token_id=eos, **options)
            seconds = time.perf_counter() - began
            if number:
                speeds[name].append(len(done.tokens) / seconds)
    return speeds


def sample_times(words: Vocabulary, steps: int = 60, rounds: int = 6) -> dict[str, float]:
    """Return the median seconds of a sampled token without and with each grammar of `DECODED`.

    The texts are those of a walk that all of these grammars allow; they are new in each round.
    """
    size, rng = words.size, np.random.default_rng(0)
    logits_1V = jnp.asarray(rng.normal(size=(1, size)), jnp.float32)
    samplers = {
        name: make_sampler(
            temperature=1.0,
            vocab_size=size,
            logits_processor=[] if grammar is None else [grammar_mask(grammar, words)],
        ).begin(1)
        for name, grammar in DECODED.items()
    }
    draw, times = jax.jit(sample_next), {name: [] for name in DECODED}  # type: ignore[var-annotated]
    key_1, start_1 = jax.random.split(jax.random.key(0), 1), jnp.zeros(1, jnp.int32)
    for number in range(rounds):
        walk, grammar = [], DECODED["schema of many strings"]
        matcher = start_matcher(grammar, words)  # type: ignore[arg-type]
        for end in range(steps):
            text_1L = np.full((1, steps), -1, np.int32)
            text_1L[0, : len(walk)] = walk
            context = Context(jnp.asarray(text_1L), start_1, start_1 + end, key_1)
            for name, sampler in samplers.items():
                began = time.perf_counter()
                jax.block_until_ready(draw(logits_1V, sampler, context)[0])
                if number:  # the first round compiles
                    times[name].append(time.perf_counter() - began)
            walk.append(int(rng.choice(np.flatnonzero(matcher.allowed()))))
            matcher = matcher.take(walk[-1])
    return {name: statistics.median(found) for name, found in times.items()}


def measure_masks(words: Vocabulary, grammar: Grammar) -> tuple[float, float, int | None]:
    """Return seconds to the first mask, seconds per mask of a walk, and bytes of an automaton."""
    began = time.perf_counter()
    matcher = start_matcher(grammar, words)
    matcher.mask()
    first = time.perf_counter() - began
    table = None
    if isinstance(compiled := grammar.compile(words), TokenAutomaton):
        table = compiled.next_SC.nbytes + compiled.class_V.nbytes
    rng, times = np.random.default_rng(0), []
    for _ in range(64):
        began = time.perf_counter()
        matcher.mask()
        times.append(time.perf_counter() - began)
        allowed_V = matcher.allowed()
        allowed_V[list(words.eos_ids)] = False
        tokens = np.flatnonzero(allowed_V)
        matcher = matcher.take(rng.choice(tokens)) if tokens.size else start_matcher(grammar, words)
    return first, statistics.median(times), table


def print_masks(tokenizers: dict[str, Tokenizer]) -> None:
    """Print a table of the times of masks by vocabulary and grammar."""
    print("\n| vocabulary | tokens | grammar | first mask, ms | a mask, us | table, kB |")
    print("|---|---:|---|---:|---:|---:|")
    for name, tokenizer in tokenizers.items():
        words = make_vocabulary(tokenizer, tokenizer.vocab_size, [tokenizer.eos_id or 0])
        start_matcher(Grammar.json_schema({"type": "null"}), words)  # what is kept by tokenizer
        for form, grammar in MASKED.items():
            first, mask, table = measure_masks(words, grammar)
            size = "" if table is None else f"{table / 1e3:.1f}"
            row = f"| {name} | {words.size:,} | {form} | {first * 1e3:.1f} | {mask * 1e6:.1f} |"
            print(f"{row} {size} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model to decode with")
    parser.add_argument("-n", "--tokens", type=int, default=256, help="new tokens per round")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="rounds of each grammar")
    parser.add_argument("--tokenizer", action="append", default=[], metavar="NAME=DIRECTORY")
    parser.add_argument("--made", type=int, default=128_000, help="tokens of a made vocabulary")
    options = parser.parse_args(arguments)
    lm = jaxllm.load(options.model)
    print("| grammar | tokens/s | of none |\n|---|---:|---:|")
    speeds = decode_speeds(lm, options.tokens, options.rounds)
    plain = statistics.median(speeds["none"])
    for name, found in speeds.items():
        speed = statistics.median(found)
        print(f"| {name} | {speed:.0f} [{min(found):.0f}-{max(found):.0f}] | {speed / plain:.2f} |")
    tokenizers = {options.model: lm.tokenizer} if lm.tokenizer else {}
    for pair in options.tokenizer:
        name, _, folder = pair.partition("=")
        tokenizers[name] = Tokenizer.from_directory(folder)
    if options.made:
        tokenizers["made"] = make_tokenizer(options.made)
    print("\n| vocabulary | " + " | ".join(f"{name}, us" for name in DECODED) + " |")
    print("|---" * (len(DECODED) + 1) + "|")
    for name, tokenizer in tokenizers.items():
        words = make_vocabulary(tokenizer, tokenizer.vocab_size, [tokenizer.eos_id or 0])
        found = sample_times(words).values()
        print(f"| {name} ({words.size:,}) | {' | '.join(f'{x * 1e6:.0f}' for x in found)} |")
    print_masks(tokenizers)


if __name__ == "__main__":
    main()
