"""Many prompts from a JSON-lines file, answered in JSON lines as they finish.

A line is a text, or an object with `prompt` (a text or token ids), an `id` of its own if wanted,
and any option of `LM.generate` that is to differ for it. An answer says which line it is of. A line
that cannot be answered is answered with its error; the others go on.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxllm.api import LM, Completion
from jaxllm.errors import JaxllmError, SamplingError
from jaxllm.files import parse_json


def read_lines(
    lines: Iterable[str],
) -> Iterator[tuple[int, dict[str, Any], JaxllmError | None]]:
    """Of each line that is not blank its number from 0, which is its `id` where it names none, the
    request, and what is wrong with it."""
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            value = parse_json(line, f"line {number + 1}", SamplingError)
        except SamplingError as error:
            yield number, {"id": number}, error
            continue
        request = value if isinstance(value, dict) else {"prompt": value}
        complaint = None
        if not isinstance(request.get("prompt"), str | list):
            complaint = SamplingError(f"line {number + 1} has no prompt")
        elif "cancelled" in request:
            complaint = SamplingError(f"line {number + 1}: no option cancelled")
        yield number, {"id": number, **request}, complaint


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
    counts, ids = [0, 0], {}

    def put(report: dict[str, Any]) -> None:
        write(json.dumps(report, ensure_ascii=False) + "\n")
        counts[0] += 1
        counts[1] += "error" in report
        done()

    def requests() -> Iterator[dict[str, Any]]:
        for number, request, complaint in read_lines(lines):
            if complaint is None:
                ids[number] = request["id"]
                yield {**options, **request, "id": number}
            else:
                put({"id": request["id"], "line": number + 1, "error": str(complaint)})

    for number, result in lm.serve(requests(), rows=rows):
        which = {"id": ids.pop(number), "line": number + 1}
        if isinstance(result, Completion):
            put(
                {
                    **which,
                    "text": result.text,
                    "tokens": result.tokens,
                    "finish_reason": result.finish_reason,
                }
            )
        else:
            put({**which, "error": str(result)})
    return counts[0], counts[1]
