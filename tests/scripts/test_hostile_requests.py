"""Hostile requests: cases are repeatable, and wrong answers are found."""

import json
import random

import pytest

from scripts.tools.hostile.cases import FAMILIES, Case, describe, draw_case
from scripts.tools.hostile.client import Answer, MalformedAnswerError, parse_head
from scripts.tools.hostile_requests import describe_fault

CASE = Case("valid", (b"x",))
ERROR = {"message": "no", "type": "t", "param": None, "code": None}


def answer(status: int, body: object, kind: str = "application/json") -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer(status, {"content-type": kind}, data)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_family_draws_repeatable_cases(family: object) -> None:
    for seed in range(30):
        first, second = (family(random.Random(seed)) for _ in range(2))  # type: ignore[operator]
        assert first == second and first.pieces and len(describe(first.pieces)) < 800
    assert draw_case(random.Random("0/5")) == draw_case(random.Random("0/5"))


@pytest.mark.parametrize(
    ("message", "answers"),
    [
        ("0 of 1", []),
        ("status 500", [answer(500, {"error": ERROR})]),
        ("content-type", [answer(400, b"Bad Request", "text/plain")]),
        ("no error", [answer(404, {"detail": "Not Found"})]),
        ("without type", [answer(400, {"error": {"message": "no", "type": "t"}})]),
        ("not JSON", [answer(200, b'{"a": NaN}')]),
        ("without its end", [answer(200, b'data: {"object": "x"}\n\n', "text/event-stream")]),
        ("half a body", [Answer(200, {}, b"{", is_complete=False)]),
        ("choice without", [answer(200, {"object": "text_completion", "choices": [{}]})]),
    ],
)  # fmt: skip
def test_wrong_answer_is_found(message: str, answers: list[Answer]) -> None:
    assert message in (describe_fault(CASE, answers) or "")


def test_right_answers_pass() -> None:
    stream = b'data: {"error": ' + json.dumps(ERROR).encode() + b"}\n\ndata: [DONE]\n\n"
    for good in (
        answer(200, {"data": []}), answer(429, {"error": ERROR}), answer(503, {"status": "x"}),
        answer(501, {"error": ERROR}), answer(200, stream, "text/event-stream"),
    ):  # fmt: skip
        assert describe_fault(CASE, [good]) is None
    for head in (b"HTTP/1.0 200 OK\r\n\r\n", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\na\r\n\r\n"):
        with pytest.raises(MalformedAnswerError):
            parse_head(head)
