"""Speculation on a demo model: how many draft tokens are accepted, and what serving gains.

    python scripts/benchmarks/speculation.py [--rows 32] [--new-tokens 64] [--rounds 3]

Drafts: the model itself in int4, pruned (2:4 by magnitude), and lookup in the text. Prompts are
beginnings of stories. The first Markdown table has the accepted share of the proposed tokens, of
both rules of `speculative_generate`, and in brackets the tokens per pass of the model. The second
has what `LM.serve` generates per second of processor time, with and without a draft: stories, and
records that match a regular expression. With `--text FILE`, there is one table: what
`LM.generate` generates per second of processor time after pieces of that text, alone and by lookup,
by rule. One decision: rounds of all drafts alternate in one process, after one of each that
compiles, and medians are reported.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jaxllm
from jaxllm.compress.pipeline import compress
from jaxllm.generation.sampling.options import make_sampler
from jaxllm.ops.padding import pad_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models.story_grammar import draw_stories

SAMPLING = ({"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9})
RULES: Any = ("text", "distribution")
PROMPT = 24
TEXTS: dict[str, Any] = {
    "stories": {},
    "records": {"regex": r'(\{"name": "[a-z]{3,8}", "age": [0-9]{1,2}\}, ){40}'},
}


def make_prompts(lm: Any, count: int) -> list[list[int]]:
    """Return the first tokens of `count` stories."""
    texts = [lm.encode(story)[:PROMPT] for story in draw_stories(count, 1)]
    return [text for text in texts if len(text) == PROMPT]


def measure_acceptance(
    lm: Any, draft: Any, prompts: list[list[int]], new_tokens: int, width: int
) -> list[tuple[float, float]]:
    """Return the accepted share, and tokens per pass, for each rule of each sampling."""
    found = []
    for options in SAMPLING:
        for rule in RULES:
            result = jaxllm.speculative_generate(
                lm.model, lm.params, pad_rows(prompts), draft=draft, num_draft_tokens=width,
                max_new_tokens=new_tokens, sampler=make_sampler(**options), acceptance=rule, seed=1,
            )  # fmt: skip
            proposed, accepted, rounds, tokens = (
                int(np.asarray(x).sum())
                for x in (result.proposed_B, result.accepted_B, result.rounds_B, result.length_B)
            )
            found.append((accepted / max(proposed, 1), tokens / rounds))
    return found


def cut_prompts(lm: Any, text: str, count: int, size: int) -> list[list[int]]:
    """Return `count` pieces of a text, of `size` tokens, at equal distances."""
    step = len(text) // count
    return [lm.encode(text[at : at + 8 * size])[:size] for at in range(0, step * count, step)]


def write_rules(
    lm: Any, prompts: list[list[int]], new_tokens: int, width: int, rounds: int
) -> None:
    """Write the table of `--text`: one prompt after the other."""
    rules: dict[str, Any] = {"none": {}} | {
        rule: {"prompt_lookup_num_tokens": width, "acceptance": rule} for rule in RULES
    }
    print("| sampling | rule | tokens per processor second | accepted | per pass |")
    print("|---|---|---:|---:|---:|")
    for sampling in ({"do_sample": False}, *SAMPLING):
        speeds: dict[str, list[float]] = {name: [] for name in rules}
        notes = {}
        for number, (name, rule) in itertools.product(range(rounds + 1), rules.items()):
            start = time.process_time()
            found = [
                lm.generate(prompt, max_new_tokens=new_tokens, seed=i, **sampling, **rule)
                for i, prompt in enumerate(prompts)
            ]
            tokens = sum(len(one.tokens) for one in found)
            speeds[name] += [tokens / (time.process_time() - start)] * (number > 0)
            accepted = sum(one.draft_stats.accepted for one in found) if rule else 0
            proposed = sum(one.draft_stats.proposed for one in found) if rule else 0
            notes[name] = f"{accepted / max(proposed, 1):.3f} | {tokens / (tokens - accepted):.2f}"
        label = ", ".join(f"{k} {v:g}" for k, v in sampling.items()).replace(
            "do_sample 0", "greedy"
        )
        for name, each in speeds.items():
            note = notes[name] if name != "none" else " | "
            print(f"| {label} | {name} | {statistics.median(each):.0f} | {note} |", flush=True)


def serve_once(
    lm: Any, draft: Any, prompts: list[list[int]], rows: int, new_tokens: int, width: int, text: str
) -> tuple[float, list[Any]]:
    """Return generated tokens per second of processor time, and the completions."""
    options = {"max_new_tokens": new_tokens, "temperature": 0.7, **TEXTS[text]}
    requests = [{"prompt": prompt, "seed": i, **options} for i, prompt in enumerate(prompts)]
    start = time.process_time()
    capacity = PROMPT + new_tokens
    answers = dict(
        lm.serve(requests, rows=rows, capacity=capacity, draft=draft, draft_tokens=width)
    )
    seconds = time.process_time() - start
    found = [answers[i] for i in range(len(prompts))]
    return sum(len(each.tokens) for each in found) / seconds, found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo:llama")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", type=Path, help="file to cut prompts from, for lookup alone")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of such a prompt")
    parser.add_argument("--dtype", default=None)
    options = parser.parse_args(arguments)
    lm = jaxllm.load(options.model, dtype=options.dtype, invariant=True)
    if options.text:
        text = options.text.read_text(encoding="utf-8")
        prompts = cut_prompts(lm, text, options.rows, options.prompt)
        write_rules(lm, prompts, options.new_tokens, options.width, options.rounds)
        return
    drafts = {
        "int4": jaxllm.load(options.model, quantize="int4"),
        "2:4": compress(
            jaxllm.load(options.model), ["prune: magnitude 2:4", "quantize: rtn bfloat16-2:4"]
        ),
        "lookup": jaxllm.PromptLookup(),
    }
    prompts = make_prompts(lm, options.rows)
    heads = [", ".join(f"{k} {v:g}" for k, v in each.items()) for each in SAMPLING]
    print("| draft | " + " | ".join(f"{head}: {rule}" for head in heads for rule in RULES) + " |")
    print("|---" + "|---:" * len(SAMPLING) * len(RULES) + "|")
    for name, draft in drafts.items():
        pair = draft if name == "lookup" else (draft.model, draft.params)
        found = measure_acceptance(lm, pair, prompts, options.new_tokens, options.width)
        print(
            f"| {name} | " + " | ".join(f"{a:.3f} ({n:.2f})" for a, n in found) + " |", flush=True
        )
    print("\n| text | rows | draft | tokens per processor second | accepted | per pass |")
    print("|---|---:|---|---:|---:|---:|")
    for text, rows in itertools.product(TEXTS, (1, 8)):
        sizes = rows, options.new_tokens, options.width, text
        speeds: dict[str, list[float]] = {name: [] for name in ("none", *drafts)}
        notes, texts = {"none": " | "}, None
        for number in range(options.rounds + 1):
            for name, each in speeds.items():
                speed, found = serve_once(lm, drafts.get(name), prompts[: 2 * rows + 6], *sizes)
                each += [speed] * (number > 0)
                texts = texts or [one.tokens for one in found]
                assert texts == [one.tokens for one in found], f"{name} changed a text"
                if name != "none":
                    counts = (sum(x) for x in zip(*(one.draft_stats for one in found), strict=True))
                    proposed, accepted, count = counts
                    notes[name] = f"{accepted / proposed:.3f} | {1 + accepted / count:.2f}"
        for name, each in speeds.items():
            speed = statistics.median(each)
            print(f"| {text} | {rows} | {name} | {speed:.0f} | {notes[name]} |", flush=True)


if __name__ == "__main__":
    main()
