"""Soak test of a `jaxllm serve`: many clients with random options, of whom half leave.

    python scripts/tools/soak_server.py --minutes 60 --clients 64

Each client asks again and again. An answer that ends must have the tokens that `LM.generate` gives
for the prompt alone (each `--check`-th is compared). A line per tenth of the time says what the
processes use: after the first fifth, memory must not grow by more than --most-growth. The longest
time between two tokens of an answer is printed; on a busy machine it says little. One decision:
options are drawn from templates with random values, so that comparing compiles few programs.

The exit status is 1 if an answer differs, one is lost, or memory grows.
"""

import asyncio
import dataclasses
import itertools
import json
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
import jaxllm
from jaxllm.cli import run_command
from jaxllm.cli.console import log, write
from jaxllm.models.invariance import make_invariant
from scripts.tools.hostile.client import Connection, encode_request
from scripts.tools.hostile.server import Server, Usage, start_server

EXAMPLE = "Example: python scripts/tools/soak_server.py --minutes 5 --clients 16"
CAPACITY = 128
SCHEMA = {"type": "object", "properties": {"big": {"type": "boolean"}}, "required": ["big"]}
HEADER = "| minutes | HTTP MB | model MB | files | answers | left | refused | compared | gap, s |\n"


def draw_options(rng: np.random.Generator) -> dict[str, Any]:
    """Return the options of `LM.generate` for a request."""
    x, n = float(rng.random()), int(rng.integers(1, 40))
    templates: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.5 + x},
        {"temperature": 0.5 + x, "top_k": n},
        {"temperature": 1.0, "top_p": 0.1 + 0.9 * x},
        {"temperature": 0.5 + x, "min_p": 0.2 * x, "top_k": n},
        {"temperature": 1.0, "repetition_penalty": 1 + x, "min_new_tokens": n % 8},
        {"temperature": 1.0, "presence_penalty": x, "frequency_penalty": -x},
        {"temperature": 1.0, "dry_multiplier": x, "xtc_probability": 0.5, "xtc_threshold": x / 2},
        {"temperature": 1.0, "typical_p": 0.2 + 0.8 * x},
        {"temperature": 1.0, "json_schema": SCHEMA},
        {"temperature": 1.0, "regex": "[a-z ]{5,30}"},
    )
    return templates[rng.integers(len(templates))]


class Soak:
    """The clients, and what they found."""

    def __init__(self, server: Server, lm: jaxllm.LM, check: int, seed: int) -> None:
        self._server, self._lm, self._check, self._seed = server, lm, check, seed
        self.counts, self.faults, self.longest = Counter[str](), list[str](), 0.0
        self._finished = list[tuple[dict[str, Any], list[int]]]()
        self._ending = False

    async def run(self, clients: int, seconds: float, most_growth: float) -> None:
        """Run the clients, and write a line per tenth of the time."""
        tasks = [asyncio.create_task(self._keep_asking(i)) for i in range(clients)]
        used = list[Usage]()
        for tenth in range(1, 11):
            await asyncio.sleep(seconds / 10)
            used.append(await self._server.usage_now())
            await self._compare()
            one, n = used[-1], self.counts
            write(
                f"| {seconds * tenth / 600:.1f} | {one.http_mb:.0f} | {one.model_mb:.0f}"
                f" | {one.http_files + one.model_files} | {n['answers']} | {n['left']}"
                f" | {n['refused']} | {n['compared']} | {self.longest:.2f} |\n"
            )
        self._ending = True
        await asyncio.gather(*tasks)
        await self._compare()
        if not self.counts["compared"]:
            self.faults.append("no answer was compared")
        for name in ("http_mb", "model_mb"):
            if (grown := getattr(used[-1], name) - getattr(used[1], name)) > most_growth:
                self.faults.append(f"{name} grew by {grown:.0f} after the first fifth")

    async def _keep_asking(self, client: int) -> None:
        rng = np.random.default_rng((self._seed, client))
        while not self._ending:
            prompt = rng.integers(3, self._lm.config.vocab_size, rng.integers(1, 60)).tolist()
            options = draw_options(rng) | {
                "max_new_tokens": int(rng.integers(1, 60)), "seed": int(rng.integers(1 << 31)),
            }  # fmt: skip
            stays = bool(rng.integers(2))
            await self._ask(prompt, options, None if stays else float(rng.exponential(0.3)))

    async def _ask(self, prompt: list[int], options: dict[str, Any], leaves: float | None) -> None:
        """Send a request, and read its stream, or leave after so many seconds."""
        body = {"prompt": prompt, "stream": True, "return_token_ids": True, **options}
        connection = await Connection.open(self._server.host, self._server.port)
        data = json.dumps(body).encode()
        try:
            async with asyncio.timeout(leaves):
                await connection.send(encode_request("POST", "/v1/completions", data))
                tokens, finish = await self._read_stream(connection)
        except TimeoutError:
            connection.reset()
            self.counts["left"] += 1
            return
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            self.faults.append(f"{body} was lost: {error!r}")
            return
        await connection.close()
        if finish is None:
            self.counts["refused"] += 1
            await asyncio.sleep(0.5)
            return
        self.counts["answers"] += 1
        if self.counts["answers"] % self._check == 0:
            self._finished.append(({"prompt": prompt, **options}, tokens))

    async def _read_stream(self, connection: Connection) -> tuple[list[int], str | None]:
        """Return the tokens of a stream and how it ended: None for one that the server refused."""
        reader, tokens, finish = connection.reader, list[int](), None
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        if status == 429:
            return [], None
        before: float | None = None
        async for line in reader:
            if line.strip() == b"data: [DONE]":
                break
            if not line.startswith(b"data: "):
                continue
            frame = json.loads(line[6:])
            if "error" in frame:
                self.faults.append(f"a stream ended with {frame['error']}")
                break
            now = time.monotonic()
            self.longest = max(self.longest, now - (before or now))
            before = now
            (choice,) = frame["choices"]
            tokens += choice.get("token_ids") or ()
            finish = choice["finish_reason"] or finish
        if status != 200 or finish is None:
            self.faults.append(f"status {status}, and no end of the answer")
        return tokens, finish or "none"

    async def _compare(self) -> None:
        """Compare finished answers with those for the prompt alone."""
        finished, self._finished = self._finished, []
        for request, tokens in finished:
            expected = await asyncio.to_thread(lambda given=request: self._lm.generate(**given))
            self.counts["compared"] += 1
            if expected.tokens != tokens:
                self.faults.append(f"{request} got {tokens}, expected {expected.tokens}")


def soak_server(
    minutes: Annotated[float, typer.Option(min=0.1)] = 60.0,
    clients: Annotated[int, typer.Option(min=1)] = 64,
    rows: Annotated[int, typer.Option(min=1)] = 16,
    check: Annotated[int, typer.Option(min=1)] = 20,
    seed: int = 0,
    model: str = "demo:llama",
    most_growth: Annotated[float, typer.Option(metavar="MB")] = 100.0,
) -> None:
    """Soak a server, and print a table.

    Args:
        minutes: How long the clients ask.
        clients: How many there are.
        rows: Requests that the server runs at once.
        check: Every how many answers one is compared with LM.generate's.
        seed: Random seed of the requests.
        model: Model, as for jaxllm serve.
        most_growth: Memory growth limit of each process after the first fifth.
    """
    lm = jaxllm.load(model, show_progress=False)
    lm = dataclasses.replace(lm, model=make_invariant(lm.model))
    arguments = [model, "--rows", str(rows), "--capacity", str(CAPACITY),
                 "--max-waiting", str(clients)]  # fmt: skip
    with start_server(arguments) as server:
        soak = Soak(server, lm, check, seed)
        write(HEADER + "|---:" * 9 + "|\n")
        asyncio.run(soak.run(clients, 60 * minutes, most_growth))
        server.end()
    for fault in itertools.islice(soak.faults, 20):
        log(fault)
    log(f"{len(soak.faults)} faults")
    if soak.faults:
        raise typer.Exit(1)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        run_command(soak_server, "python scripts/tools/soak_server.py", EXAMPLE)
