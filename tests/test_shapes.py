"""The suffixes of names: every array in a function of jaxllm has the axes that its name says.

`logits_BTV` has three axes. Within a call a letter is one size, a digit is its size, an axis that
rows share may be 1, and an X stands for any number of further axes.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.generation.batching.scheduler import serve
from tests.generation.test_serve import OPTIONS, make_request, mixed_request
from tests.tiny_models import random_model, tokens

PACKAGE = str(Path(jaxllm.__file__).parent)
SUFFIX = re.compile(r"[a-z][a-z0-9_]*_([A-Z0-9]+)")


def find_problems(names: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names, of one call's variables, whose arrays have other axes than they say."""
    sizes: dict[str, int] = {}
    for name, value in names.items():
        match, shape = SUFFIX.fullmatch(name), getattr(value, "shape", None)
        if match is None or not isinstance(shape, tuple):
            continue
        before, *after = match[1].split("X")
        axes, further = before + "".join(after), len(shape) - len(before + "".join(after))
        if further < 0 or (further and not after):
            yield f"{name} has shape {shape}"
            continue
        named = shape[: len(before)] + shape[len(before) + further :]
        for axis, size in zip(axes, named, strict=True):
            expected = int(axis) if axis.isdigit() else sizes.get(axis, size)
            if size not in (expected, 1) and expected != 1:
                yield f"{name} has shape {shape}, and {axis} is {expected}"
            if not axis.isdigit() and size != 1:
                sizes[axis] = size


@contextmanager
def check_calls() -> Iterator[set[str]]:
    """Check each call of jaxllm's functions at its end; yield the names that were seen."""
    seen, problems = set[str](), set[str]()

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "return" or not code.co_filename.startswith(PACKAGE):
            return
        where = f"{code.co_filename.removeprefix(PACKAGE)}: {code.co_name}"
        arrays = {k: v for k, v in frame.f_locals.items() if SUFFIX.fullmatch(k)}
        seen.update(f"{where}: {name}" for name in arrays)
        problems.update(f"{where}: {problem}" for problem in find_problems(arrays))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(before)
    assert not problems, "\n".join(sorted(problems))


def test_problems_are_found() -> None:
    good = {
        "logits_BTV": np.zeros((2, 3, 5)),
        "length_B1": np.zeros((2, 1)),
        "x_1T": np.ones((1, 3)),
    }
    assert not list(
        find_problems({**good, "shared_BT": np.ones((1, 3)), "k_BX": np.ones((2, 3, 4))})
    )
    for name, shape in (("y_BT", (2, 4)), ("y_BT", (2, 3, 1)), ("y_2T", (4, 3)), ("y_BTX", (2,))):
        assert list(find_problems({**good, name: np.zeros(shape)})), name


def generate_and_branch(lm: Any) -> None:
    cache = jaxllm.prefill(*lm, jaxllm.init_cache(*lm[:1], 2, 32), tokens(2, 9), chunk=4).cache
    cache = jaxllm.decode_step(*lm, cache, tokens(2, 1)[:, 0]).cache
    jaxllm.forward(*lm, jaxllm.cache.rewind(cache, 2), tokens(2, 3))
    jaxllm.generate(*lm, tokens(2, 9), max_new_tokens=4, lengths_B=[9, 5])


def serve_requests(lm: Any) -> None:
    each = [make_request(i) if i % 2 else mixed_request(i) for i in range(len(OPTIONS))]
    list(serve(*lm, each, rows=3, capacity=48, chunk=8))


def draft_and_search(lm: Any) -> None:
    source = jaxllm.PromptLookup()
    jaxllm.speculative_generate(*lm, tokens(1, 9), draft=source, max_new_tokens=5)
    jaxllm.speculative_generate(*lm, tokens(1, 9), draft=lm, max_new_tokens=5)
    jaxllm.beam_search(*lm, tokens(2, 9), max_new_tokens=4, num_beams=2)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("llama", generate_and_branch),
        pytest.param("gemma2", generate_and_branch, marks=pytest.mark.more),
        pytest.param("mixtral", generate_and_branch, marks=pytest.mark.more),
        pytest.param("qwen3_5_text", generate_and_branch, marks=pytest.mark.more),
        pytest.param("deepseek_v3", generate_and_branch, marks=pytest.mark.more),
        ("llama", serve_requests),
        pytest.param("llama", draft_and_search, marks=pytest.mark.more),
    ],
)
def test_arrays_have_the_axes_of_their_names(name: str, run: Callable[[Any], None]) -> None:
    lm = random_model(name)
    with check_calls() as seen:
        run(lm)
    assert len(seen) > 50
