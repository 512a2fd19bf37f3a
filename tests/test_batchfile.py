"""A batch file: a bad line is answered with its error, the others go on."""

import json
from pathlib import Path
from typing import Any

import jaxllm
from jaxllm.batchfile import answer
from tests.twins import save_random


def test_a_bad_line_stops_nobody_else(tmp_path: Path) -> None:
    save_random(tmp_path / "m", "llama", num_hidden_layers=1, eos_token_id=None)
    lm = jaxllm.load(tmp_path / "m")
    lines = [
        '{"prompt": [5], "id": 1}',
        '{"prompt": [6]}',  # whose id is 1 by default
        "[" * 100_000,
        '{"prompt": [5], "seed": ' + "9" * 5000 + "}",
        '{"prompt": [5], "id": [1]}',
        '{"prompt": [5], "stop_strings": 5}',
        '{"prompt": [5], "eos_token_id": 1.5}',
        '{"prompt": [5], "eos_token_id": "12"}',
        '{"prompt": [5], "num_return_sequences": 1000000000}',
        '{"prompt": [5], "max_new_tokens": 1e300}',
        '{"prompt": [5], "cache": {}}',
        '{"prompt": [5], "overflow": []}',
        '{"prompt": [1000000000000000000000000000000]}',
        '{"prompt": {"a": 1}}',
        '{"prompt": [5], "cancelled": true}',
        '{"prompt": "\\ud800"}',
        "null",
        "5",
        "[7, 8]",
    ]
    written: list[dict[str, Any]] = []
    counts = answer(
        lm,
        lines,
        {"max_new_tokens": 3},
        rows=2,
        write=lambda text: written.append(json.loads(text)),
    )
    assert counts == (19, 15)
    found = {a["line"]: a for a in written}
    assert sorted(found) == list(range(1, 20))
    for line, prompt, name in ((1, [5], 1), (2, [6], 1), (5, [5], [1]), (19, [7, 8], 18)):
        assert found[line]["tokens"] == lm.generate(prompt, max_new_tokens=3).tokens
        assert found[line]["id"] == name
