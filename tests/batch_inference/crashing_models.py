"""A model that crashes or hangs on some prompts, with a picklable function that loads it."""

import dataclasses
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jaxllm
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
