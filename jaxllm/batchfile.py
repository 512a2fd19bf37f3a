"""Many prompts from a JSON-lines file, answered in JSON lines as they finish.

A line is a text, or an object with `prompt` (a text or token ids), an `id` of its own if wanted,
and any option of `LM.generate` that is to differ for it. A line that cannot be answered is answered
with its error; the others go on.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxllm.api import LM, Completion
from jaxllm.errors import JaxllmError, SamplingError


def read_lines(lines: Iterable[str]) -> Iterator[tuple[dict[str, Any], JaxllmError | None]]:
    """The request of each line that is not blank, with its number as `id` where it names none."""
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            yield {"id": number}, SamplingError(f"line {number + 1} is no JSON: {error}")
            continue
        request = value if isinstance(value, dict) else {"prompt": value}
        complaint = None
        if not isinstance(request.get("prompt"), str | list):
            complaint = SamplingError(f"line {number + 1} has no prompt")
        yield {"id": number, **request}, complaint


def answer(
    lm: LM,
    lines: Iterable[str],
    options: Mapping[str, Any],
    *,
    rows: int,
    write: Callable[[str], None],
    done: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """Answer each line through `write` as it finishes, in the order in which they finish.

    options: for all lines. rows: how many run at once. done: told of each answer. Returns how many
    were answered, and how many of these with an error.
    """
    counts = [0, 0]

    def put(report: dict[str, Any]) -> None:
        write(json.dumps(report, ensure_ascii=False) + "\n")
        counts[0] += 1
        counts[1] += "error" in report
        done()

    def requests() -> Iterator[dict[str, Any]]:
        for request, complaint in read_lines(lines):
            if complaint is None:
                yield {**options, **request}
            else:
                put({"id": request["id"], "error": str(complaint)})

    for name, result in lm.serve(requests(), rows=rows):
        if isinstance(result, Completion):
            put(
                {
                    "id": name,
                    "text": result.text,
                    "tokens": result.tokens,
                    "finish_reason": result.finish_reason,
                }
            )
        else:
            put({"id": name, "error": str(result)})
    return counts[0], counts[1]
