"""Hostile requests to a `jaxllm serve`: every answer must be right, or a proper error.

    python scripts/tools/hostile_requests.py --requests 10000 --seed 0

A case (`hostile/cases.py`) is a request, several, or a part of one. Laws: no status 500; each
answer is well-formed, errors in OpenAI's form; each well-formed request is answered. After every
thousand, a good request must get the answer that it had at first. After the first thousand memory,
open files and asyncio's tasks must not grow. `--kill-clients N` has N clients leave in the middle,
beside good ones whose answers must not change. One decision: a case is determined by --seed and its
number, so that `--case NUMBER` repeats it.
"""

import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from jaxllm.cli import run_command
from jaxllm.cli.console import log, write
from scripts.tools.hostile.cases import BODY_LIMIT, CONTEXT, Case, describe, draw_case
from scripts.tools.hostile.client import (
    Answer,
    Connection,
    MalformedAnswerError,
    encode_request,
)
from scripts.tools.hostile.server import Server, Usage, start_server

EXAMPLE = "Example: python scripts/tools/hostile_requests.py --requests 1000 --seed 1"
CLIENTS, PER_MARK, ROWS, WAITING = 16, 1000, 4, 32
ANSWER_SECONDS, SLOW_SECONDS = 300.0, 60.0
LENGTHS = (8, 16, 32, 64, 128, 256, 512)  # to which texts are padded; demo:llama reads 512
PAGES = ("text/html", "text/javascript", "text/css", "text/plain; version=0.0.4")
GOOD = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.9, "seed": 7,
        "logprobs": 2}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)  # its calls have Hermes' form


async def perform(server: Server, case: Case) -> list[Answer]:
    """Be the client of a case; return the answers that were read. Raises MalformedAnswerError."""
    small = 4096 if case.slow_read else None
    connection = await Connection.open(server.host, server.port, receive_bytes=small)
    answers: list[Answer] = []
    try:
        for piece in case.pieces:
            if not await connection.send(piece):
                break
            if case.pause:
                await asyncio.sleep(case.pause)
        if case.slow_read:
            await asyncio.sleep(1.0)
        if case.end == "reset":
            await asyncio.sleep(case.delay)
            connection.reset()
            return answers
        reading = asyncio.create_task(_read_all(connection, case, answers))
        if case.end == "half-close":
            await asyncio.wait((reading,), timeout=case.delay)
            if not reading.done():
                connection.half_close()
        await asyncio.wait_for(reading, ANSWER_SECONDS)
        return answers
    finally:
        await connection.close()


async def _read_all(connection: Connection, case: Case, answers: list[Answer]) -> None:
    methods = itertools.chain(case.methods, itertools.repeat(case.methods[-1]))
    for method in itertools.islice(methods, case.answers):
        answer = await connection.read_answer(has_body=method != "HEAD")
        if answer is None:
            return
        answers.append(answer)


def describe_fault(case: Case, answers: list[Answer]) -> str | None:
    """Return what is wrong with the answers to a case."""
    small = sum(map(len, case.pieces)) <= BODY_LIMIT  # a larger body may be reset with the 413
    if case.is_http and small and case.end == "read" and len(answers) < case.answers:
        return f"{len(answers)} of {case.answers} answers"
    methods = itertools.chain(case.methods, itertools.repeat(case.methods[-1]))
    for answer, method in zip(answers, methods, strict=False):
        if answer.status >= 500 and answer.status not in (501, 503):
            return f"status {answer.status}: {answer.body[:200]!r}"
        if not answer.is_complete:
            if case.end != "read":  # the client left, also by a half-close
                continue
            return f"status {answer.status}, and half a body: {answer.body[-200:]!r}"
        if method != "HEAD":
            try:
                check_body(answer)
            except (ValueError, TypeError, KeyError) as error:
                return f"status {answer.status}, {error!s:.80}: {answer.body[:200]!r}"
    return None


def check_body(answer: Answer) -> None:
    """Check the form of an answer's body. Raises ValueError, TypeError or KeyError."""
    kind = answer.headers.get("content-type", "")
    if answer.status == 200 and kind.startswith("text/event-stream"):
        *events, end, rest = answer.body.decode().split("\n\n")
        if (end, rest) != ("data: [DONE]", ""):
            raise ValueError("a stream without its end")
        for event in events:
            if event != ": ping":
                check_value(parse(event.removeprefix("data: ")))
    elif not (answer.status == 200 and kind.startswith(PAGES)):
        if kind != "application/json":
            raise ValueError(f"content-type {kind}")
        value = parse(answer.body)
        if answer.status >= 400 and not {"error", "status"} & value.keys():  # /health has a status
            raise ValueError("no error")
        check_value(value)


def check_value(value: dict[str, Any]) -> None:
    """Check an error's form, and that an answer's choices are there."""
    if "error" in value:
        error = value["error"]
        if not (error["message"] and isinstance(error["message"], str)):
            raise ValueError("an error without message")
        if not (isinstance(error["type"], str) and {"param", "code"} <= error.keys()):
            raise ValueError("an error without type, param or code")
    elif str(value.get("object")).startswith(("text_completion", "chat.completion")):
        for choice in value["choices"]:
            if not {"index", "finish_reason"} <= choice.keys():
                raise ValueError("a choice without index or finish_reason")


def parse(text: str | bytes) -> Any:
    """Parse JSON, without NaN."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class Campaign:
    """Cases against one server: counts, faults, marks."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.seed = server, seed
        self.statuses: Counter[str] = Counter()
        self.faults: list[str] = []
        self.slowest, self.slowest_case = 0.0, 0
        self.marks: list[Usage] = []
        self.first_answer: Any = None

    async def warm_up(self) -> None:
        """Have the server compile the programs that it keeps: the usual ones, and those of texts of
        each length, alone and together. What grows after the first thousand is none of them.
        """
        await self.server.wait_until_compiled()
        for length in LENGTHS:
            for count in (1, 2, 4, 8, 16):
                body: Any = {"input": [[5] * length] * count}
                await self.server.ask("POST", "/v1/embeddings", body)
            body = {"prompt": [5] * min(length, CONTEXT - 1), "echo": True, "max_tokens": 1}
            await self.server.ask("POST", "/v1/completions", {**body, "logprobs": 1})

    async def run(self, numbers: Iterator[int]) -> None:
        """Perform cases, several at once."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._work(numbers))

    async def _work(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self.try_case(number)

    async def try_case(self, number: int) -> None:
        """Perform one case, and record its statuses and faults."""
        case = draw_case(random.Random(f"{self.seed}/{number}"))
        began = time.monotonic()
        try:
            answers = await perform(self.server, case)
            fault = describe_fault(case, answers)
            self.statuses.update(str(answer.status) for answer in answers)
            self.statuses["none"] += not answers
        except TimeoutError:
            fault = f"no answer in {ANSWER_SECONDS:g} s"
        except (MalformedAnswerError, ConnectionError) as error:
            fault = f"{type(error).__name__}: {error}"
        if (seconds := time.monotonic() - began) > self.slowest:
            self.slowest, self.slowest_case = seconds, number
        if fault is not None:
            self.add_fault(f"case {number} ({case.family}): {fault}\n  {describe(case.pieces)}")

    def add_fault(self, text: str) -> None:
        """Record and print a fault."""
        self.faults.append(text)
        log(text)

    async def check_good(self) -> None:
        """Check that the good request has the answer that it had at first."""
        answer = await self.server.ask("POST", "/v1/completions", GOOD)
        found = json.loads(answer.body).get("choices", answer.body)
        self.first_answer = self.first_answer or found
        if answer.status != 200 or found != self.first_answer:
            self.add_fault(f"the good request got {answer.status}: {answer.body[:300]!r}")

    async def mark(self, label: str, seconds: float) -> None:
        """Check the good request; record and print what the server uses."""
        await self.server.wait_until_idle()
        await self.check_good()
        usage = await self.server.usage()
        self.marks.append(usage)
        s = self.statuses
        refused = sum(n for code, n in s.items() if code.startswith("4") and code != "429")
        write(
            f"| {label} | {seconds:.0f} | {s['200']} | {refused} | {s['429']} | {s['501']} |"
            f" {s['503']} | {s['none']} | {len(self.faults)} | {self.slowest:.1f} |"
            f" {usage.http_mb:.0f} | {usage.model_mb:.0f} | {usage.cache_mb:.0f} |"
            f" {usage.http_files} | {usage.model_files} | {usage.tasks} | {usage.running} |"
            f" {usage.waiting} | {usage.restarts} |\n"
        )
        if self.slowest > SLOW_SECONDS:
            log(f"{self.slowest:.1f} s: case {self.slowest_case}")
        self.statuses.clear()
        self.slowest = 0.0

    def check_growth(self, most_http: float, most_model: float) -> None:
        """Add a fault for each quantity that grew after the warm-up, which is the second mark.

        The model's memory rises and falls, since compiled programs are released when there are many
        of them: its least value must not grow. The prefix cache may, up to its own limit.
        """
        if self.marks[-1].running or self.marks[-1].waiting or self.marks[-1].restarts:
            self.add_fault(f"after the last request: {self.marks[-1]}")
        if len(self.marks) < 3:
            return
        half = len(self.marks) // 2
        early, late = self.marks[1 : half + 1], self.marks[half + 1 :]
        limits = {"http_mb": most_http, "own_mb": most_model, "http_files": 4, "model_files": 4,
                  "tasks": 4}  # fmt: skip
        for name, limit in limits.items():
            first, last = (min(getattr(mark, name) for mark in part) for part in (early, late))
            if (growth := last - first) > limit:
                self.add_fault(f"{name} grew by {growth:,.0f} after the warm-up")


HEADER = (
    "| requests | s | 200 | 4xx | 429 | 501 | 503 | no answer | faults | slowest, s | HTTP, MB |"
    " model, MB | cache, MB | HTTP files | model files | tasks | running | waiting | restarts |\n"
)


async def kill_clients(campaign: Campaign, count: int) -> None:
    """Have clients leave at random moments, beside good ones whose answers must not change."""
    rng, done, server = random.Random(campaign.seed), asyncio.Event(), campaign.server
    numbers = iter(range(count))

    async def leave() -> None:
        for _ in numbers:
            body = {
                "prompt": "Once " * rng.choice((1, 100)), "max_tokens": 100, "ignore_eos": True,
                "n": rng.choice((1, 3)), "stream": rng.random() < 0.5,
            }  # fmt: skip
            data = json.dumps(body).encode()
            connection = await Connection.open(server.host, server.port)
            await connection.send(encode_request("POST", "/v1/completions", data))
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(rng.choice((0.0, 0.002, 0.02, 0.1, 0.5))):
                    await connection.reader.readexactly(rng.choice((1, 400, 2000)))
                    await asyncio.sleep(rng.choice((0, 0.1)))
            connection.reset()
            campaign.statuses["none"] += 1

    async def stay() -> None:
        while not done.is_set():
            answer = await server.ask("POST", "/v1/completions", GOOD)
            campaign.statuses[str(answer.status)] += 1
            found = json.loads(answer.body)
            if answer.status == 200 and found["choices"] != campaign.first_answer:
                campaign.add_fault(f"a good request beside killed ones got {found}")
            elif answer.status not in (200, 429):
                campaign.add_fault(f"a good request got {answer.status}: {answer.body!r}")

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(stay())
        async with asyncio.TaskGroup() as leaving:
            for _ in range(CLIENTS):
                leaving.create_task(leave())
        done.set()


async def run_campaign(
    server: Server, requests: int, seed: int, case: int | None, kills: int
) -> Campaign:
    """Perform everything; return the campaign."""
    campaign = Campaign(server, seed)
    write(HEADER + "|" + "---:|" * 19 + "\n")
    if case is not None:
        await campaign.try_case(case)
        await campaign.mark("1", 0.0)
        return campaign
    await campaign.warm_up()
    await campaign.mark("0", 0.0)
    for first in range(0, requests, PER_MARK):
        began, after = time.monotonic(), min(first + PER_MARK, requests)
        await campaign.run(iter(range(first, after)))
        await campaign.mark(f"{after:,}", time.monotonic() - began)
    for first in range(0, kills, PER_MARK):
        began, after = time.monotonic(), min(first + PER_MARK, kills)
        await kill_clients(campaign, after - first)
        await campaign.mark(f"{after:,} killed", time.monotonic() - began)
    return campaign


def hostile_requests(
    requests: Annotated[int, typer.Option(min=0, help="Cases.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    case: Annotated[int | None, typer.Option(help="Number of one case to repeat.")] = None,
    kill_clients: Annotated[int, typer.Option(min=0, help="Clients killed afterwards.")] = 0,
    model: Annotated[str, typer.Option(help="Model, as for jaxllm serve.")] = "demo:llama",
    most_growth: Annotated[
        float, typer.Option(metavar="MB", help="Memory growth limit of the model process.")
    ] = 100.0,
) -> None:
    """Send hostile requests to a server, and print a table per thousand."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        arguments = [
            model, "--rows", str(ROWS), "--capacity", str(CONTEXT), "--max-waiting", str(WAITING),
            "--max-body", str(BODY_LIMIT), "--chat-template", str(template),
        ]  # fmt: skip
        with start_server(arguments) as server:
            campaign = asyncio.run(run_campaign(server, requests, seed, case, kill_clients))
            if requests and case is None:
                campaign.check_growth(most_growth / 2, most_growth)
            status = server.end()
            lines = server.log.read_text(encoding="utf-8").splitlines()[2:]
    if status or len(lines) > 1:
        campaign.add_fault(f"the server ended with {status}; its log:\n" + "\n".join(lines[-40:]))
    log(f"{len(campaign.faults)} faults")
    if campaign.faults:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(hostile_requests, "python scripts/tools/hostile_requests.py", EXAMPLE)
