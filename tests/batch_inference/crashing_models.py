"""A model that crashes or hangs on some prompts, and what a run with it must answer."""

import dataclasses
import json
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jaxllm
from jaxllm.batch_inference.job import BatchJob, row_seed
from jaxllm.batch_inference.rows import read_lines
from jaxllm.batch_inference.runner import run_job
from jaxllm.lm import LM

KILLER, ONCE, RAISER, HANGS, REFUSED = [13, 13], [14, 14], [15, 15], [16, 16], "x" * 3
OPTIONS = {"max_new_tokens": 4, "temperature": 1.0, "seed": 5}


@dataclasses.dataclass(frozen=True)
class CrashingLM(LM):
    """Some prompts kill the serving process, always or once; one raises, one hangs forever."""

    folder: Path = Path()

    def serve(self, requests: Iterable[Any], **sizes: Any) -> Iterator[tuple[Any, Any]]:
        requested = list(requests)
        prompts = [request["prompt"] for request in requested]
        if ONCE in prompts and not (self.folder / "once").exists():
            (self.folder / "once").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if KILLER in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        if RAISER in prompts:
            raise MemoryError("no room")
        if HANGS in prompts:
            with open(self.folder / "hung", "a") as file:
                file.write(".")
            signal.pause()
        yield from super().serve(requested, **sizes)


def load_crashing_lm(directory: Path) -> LM:
    """Load a crashing model that records its crashes in its directory."""
    lm = jaxllm.load(directory)
    parts = {field.name: getattr(lm, field.name) for field in dataclasses.fields(lm)}
    return CrashingLM(**parts, folder=directory)


def read_answers(path: Path) -> list[Any]:
    """Return the rows of an output file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_crashing_rows(workers: Any, model: Path, out: Path) -> None:
    """Run rows of which some crash their worker or raise.

    Only these get an error; all others equal single requests with the same seed.
    """
    prompts = [[5 + n, 6] for n in range(12)]
    prompts[2], prompts[5], prompts[9] = ONCE, KILLER, RAISER
    job = BatchJob(task="generate", options=OPTIONS, rows=2, group=3, tries=1)
    assert run_job(read_lines(map(json.dumps, prompts)), job, workers, out) == (12, 2)
    answers, lm = read_answers(out), jaxllm.load(model)
    assert [answer["id"] for answer in answers] == list(range(1, 13))
    assert answers[5]["error"] == "line 6 crashed its worker 1 times"
    assert answers[9]["error"] == "line 10: MemoryError: no room"
    for n in set(range(12)) - {5, 9}:
        single = lm.generate(prompts[n], **{**OPTIONS, "seed": row_seed(5, n + 1)})
        assert answers[n]["tokens"] == single.tokens
