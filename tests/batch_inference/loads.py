"""Models for workers to load, some of which end their process: functions that can be pickled."""

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
class Fragile(LM):
    """Some prompts end the process that serves them: always, the first time, or by an exception;
    one is never answered.
    """

    folder: Path = Path()

    def serve(self, requests: Iterable[Any], **sizes: Any) -> Iterator[tuple[Any, Any]]:
        asked = list(requests)
        prompts = [request["prompt"] for request in asked]
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
        yield from super().serve(asked, **sizes)


def fragile(directory: Path) -> LM:
    """The model in a directory, which notes there what it has done."""
    lm = jaxllm.load(directory)
    parts = {field.name: getattr(lm, field.name) for field in dataclasses.fields(lm)}
    return Fragile(**parts, folder=directory)
