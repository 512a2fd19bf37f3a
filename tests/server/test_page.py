"""The page at /: its files, the branch view's numbers, and its use in a browser."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest

from jaxllm.checkpoints.resolve import DEMO_DIR
from jaxllm.lm import LM
from jaxllm.server.app import PAGE
from jaxllm.server.branch_view import describe_tokens, last_step
from jaxllm.server.limits import PAGE_FILES
from jaxllm.server.openai_responses import Choice
from jaxllm.steps import forward
from tests.server.browser import Browser
from tests.server.conftest import NAMES
from tests.server.processes import RunningServer, start_server

TEXT = "Once upon a time there was a"
STORY = f"{TEXT} cat."
IDLE = "!document.body.classList.contains('busy')"
LOOKED = f"{IDLE} && document.querySelectorAll('#next button').length === 3"
CLIENT = httpx.Client(timeout=60)
PICTURES = os.environ.get("JAXLLM_PAGE_PICTURES")  # a folder, such as docs


def test_page_files_are_served() -> None:
    assert {path.name for path in PAGE.iterdir()} == {"index.html", *PAGE_FILES}


@pytest.mark.parametrize("name", ["index.html", *PAGE_FILES])
def test_page_files_load_nothing_from_elsewhere(name: str) -> None:
    text = (PAGE / name).read_text("utf-8")
    own = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";$', re.MULTILINE)
    text = own.sub("", text) if name.endswith(".js") else text
    assert not re.search(r"https?://|//\w+\.\w|@import|url\(|\bimport\b|eval\(|innerHTML", text)
    assert "<style" not in text
    assert not re.search(r"\s(style|on\w+)=", text) or name.endswith(".js")
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text))


def test_page_files_have_strict_policy(server: RunningServer) -> None:
    kinds = {".js": "javascript", ".css": "css"}
    for name in ("", *PAGE_FILES):
        kind = kinds.get(Path(name).suffix, "html")
        answer = CLIENT.get(f"{server.url}/{name}")
        assert answer.status_code == 200
        assert f"text/{kind}" in answer.headers["content-type"]
        assert answer.text == (PAGE / (name or "index.html")).read_text("utf-8")
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy


@pytest.mark.parametrize("length", [1, 2, 11])
def test_last_step_equals_forward(lm: LM, length: int) -> None:
    """The attention is the mean over layers and heads of the last row of `forward`'s weights."""
    ids = lm.encode("Once upon a time there was a girl. She")[:length]
    out = forward(lm.model, lm.params, None, np.array([ids]), attention_weights=True)
    expected_T = np.asarray(out.attention_weights, np.float64)[:, 0, :, -1].mean((0, 1))
    attention_T, logprob_V = last_step(lm, ids)
    np.testing.assert_allclose(attention_T, expected_T, atol=1e-3)  # keys are float16
    assert attention_T.sum() == pytest.approx(1)
    expected_V = np.asarray(jax.nn.log_softmax(out.logits[0, -1]))
    np.testing.assert_allclose(logprob_V, expected_V, atol=2e-2)


@pytest.mark.parametrize("text", [TEXT, "é 漢字\n😀!", " two  spaces"])
def test_token_texts_are_the_text(lm: LM, text: str) -> None:
    """The texts concatenate to the text; a token without a text has a name."""
    tokens = describe_tokens(lm, lm.encode(text))["tokens"]
    assert "".join(token["text"] for token in tokens) == text
    assert all(token["text"] or token["name"] for token in tokens)
    assert tokens[0]["name"] == "<|bos|>"
    if "😀" in text:
        assert tokens[1] == {**tokens[1], "text": "", "name": "<0xC3>"}


def test_look_returns_tokens_and_likeliest(server: RunningServer, lm: LM) -> None:
    """Text and ids give the same answer: that of the library, with the greedy token first."""
    ids = lm.encode(TEXT)
    answer = CLIENT.post(f"{server.url}/page/look", json={"text": TEXT}).json()
    assert answer == CLIENT.post(f"{server.url}/page/look", json={"tokens": ids}).json()
    expected = describe_tokens(lm, ids)
    assert [t["id"] for t in answer["tokens"]] == ids
    assert [t["text"] for t in answer["tokens"]] == [t["text"] for t in expected["tokens"]]
    assert sum(t["attention"] for t in answer["tokens"]) == pytest.approx(1)
    assert [t["id"] for t in answer["next"]] == [t["id"] for t in expected["next"]]
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 0}
    greedy = CLIENT.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]
    assert answer["next"][0]["text"] == greedy["text"]
    logprob = greedy["logprobs"]["token_logprobs"][0]
    assert answer["next"][0]["logprob"] == pytest.approx(logprob, abs=1e-2)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "expected text or tokens"),
        ({"text": ""}, 400, "expected text or tokens"),
        ({"text": "a", "tokens": [1]}, 400, "not both"),
        ({"tokens": [1, -5]}, 400, "-5"),
        ({"tokens": [5] * 600}, 400, "600 tokens do not fit into the context of 512"),
        ({"text": "a", "model": "other"}, 404, "does not exist"),
    ],
)
def test_look_refuses_wrong_bodies(
    server: RunningServer, body: object, status: int, message: str
) -> None:
    answer = CLIENT.post(f"{server.url}/page/look", json=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_completion_returns_token_ids(server: RunningServer, lm: LM) -> None:
    """return_token_ids: whole and streamed answers have the ids of their text."""
    body = {"prompt": TEXT, "max_tokens": 12, "seed": 3, "return_token_ids": True}
    (choice,) = CLIENT.post(f"{server.url}/v1/completions", json=body).json()["choices"]
    assert len(choice["token_ids"]) == 12
    assert lm.decode(choice["token_ids"]) == choice["text"]
    streamed = CLIENT.post(f"{server.url}/v1/completions", json={**body, "stream": True}).text
    found = ",".join(re.findall(r'"token_ids":\[([\d,]+)\]', streamed))
    assert [int(number) for number in found.split(",")] == choice["token_ids"]
    plain = CLIENT.post(f"{server.url}/v1/completions", json={**body, "return_token_ids": False})
    assert "token_ids" not in plain.text


def test_choice_returns_ids_within_a_character() -> None:
    """A token in the middle of a character makes no chunk: the next chunk has its id."""
    choice = Choice(0, chat=False, logprobs=None, shows_ids=True)
    found = [
        [chunk["token_ids"] for chunk in choice.chunks(choice.read(piece))]
        for piece in (["", 5, None], ["é", 6, None], ["!", 7, "length"])
    ]
    assert found == [[], [[5, 6]], [[7]]]
    assert choice.format_choice()["token_ids"] == [5, 6, 7]


def test_colors_have_contrast() -> None:
    """Texts have a contrast of 4.5 to what is behind them (WCAG 2.2, 1.4.3), in both schemes."""
    css = (PAGE / "page.css").read_text("utf-8")
    light, dark = (dict(re.findall(r"--([\w-]+): #(\w{6})", block))
                   for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL))  # fmt: skip

    def luminance(color: str) -> float:
        parts = (int(color[i : i + 2], 16) / 255 for i in (0, 2, 4))
        linear = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    pairs = {"ink": ("paper", "card", "mine", "mark", "glow"), "bad": ("bad-paper", "card"),
             "soft": ("paper", "card", "mine", "mark"), "on-accent": ("accent",)}  # fmt: skip
    for scheme in (light, {**light, **dark}):
        for text, behind in ((t, b) for t, many in pairs.items() for b in many):
            low, high = sorted(luminance(scheme[name]) + 0.05 for name in (text, behind))
            assert high / low >= 4.5, (text, behind)


@pytest.fixture(scope="module")
def stories(browser: Browser) -> Iterator[RunningServer]:
    """A server of demo:llama with all its layers, if there is a browser."""
    with start_server(*(f"--name={name}" for name in NAMES), "--rows", "16") as running:
        yield running


def test_chat_answers_and_looks_inside(stories: RunningServer, browser: Browser) -> None:
    """A message is answered, Again gives another answer, Look inside opens it as branches."""
    browser.open(f"{stories.url}/#text={STORY}")
    browser.wait(f"{IDLE} && document.querySelector('#prompt').value")
    names = browser.run("[...document.querySelectorAll('#model option')].map((x) => x.value)")
    assert names == list(NAMES)
    browser.run("document.querySelector('#model').value = 'demo:llama'")
    _fill(browser, seed=11, max_tokens=120)
    browser.run("document.querySelector('#ask').requestSubmit()")
    browser.wait(f"{IDLE} && document.querySelector('.assistant .tools')")
    first = browser.run("document.querySelector('.assistant .text').textContent")
    assert len(first.split()) > 40
    _save(browser, "page-chat.png")
    _fill(browser, seed=12)
    browser.run("document.querySelector('.assistant .again').click()")
    browser.wait(f"{IDLE} && document.querySelector('.assistant .tools')")
    assert browser.run("document.querySelector('.assistant .text').textContent") != first
    browser.run("document.querySelector('.look-inside').click()")
    browser.wait(f"{LOOKED} && !document.querySelector('#branches').hidden")
    assert browser.run("document.querySelector('#tokens').textContent").startswith(STORY)
    assert not browser.problems


def test_branches_fork_append_and_continue(stories: RunningServer, browser: Browser) -> None:
    """A fork has its parent's first tokens; switching shows each branch as it was."""
    browser.open(f"{stories.url}/#view=branches&text={TEXT}")
    browser.wait(LOOKED)
    assert browser.run("document.querySelector('#tokens').textContent") == TEXT
    browser.run("document.querySelector('#model').value = 'demo:llama'")
    _fill(browser, seed=4)
    _click(browser, "#more")
    root = browser.run("document.querySelector('#tokens').textContent")
    assert root.startswith(TEXT)
    assert browser.run("document.querySelectorAll('.token').length") == 8 + 20
    for parent, token, rank in ((0, 7, 1), (1, 11, 1), (0, 7, 2)):
        _click(browser, f"[data-focus=branch-{parent}]")
        texts = browser.run("[...document.querySelectorAll('.token')].map((x) => x.textContent)")
        beginning = "".join(texts[: token + 1])
        _click(browser, f"[data-focus=token-{token}]")
        assert browser.run("document.querySelector('#tokens').textContent") == beginning
        _click(browser, f"[data-focus=next-{rank}]")
        _click(browser, "#more")
    fork = browser.run("document.querySelector('#tokens').textContent")
    assert fork.startswith(TEXT)
    assert fork != root
    assert browser.run("document.querySelectorAll('#tree > ul > li > ul > li').length") == 2
    assert browser.run("document.querySelectorAll('#tree li li li').length") == 1
    brightness = "+getComputedStyle(x).getPropertyValue('--attention')"
    shares = browser.run(f"[...document.querySelectorAll('.token')].map((x) => {brightness})")
    assert shares[0] == 0  # the sink
    assert max(shares) == 1
    _save(browser, "page-branches.png")
    _click(browser, "[data-focus=branch-0]")
    assert browser.run("document.querySelector('#tokens').textContent") == root
    assert not browser.problems


def test_page_takes_key_and_continues_text(browser: Browser, tmp_path: Path) -> None:
    """A key is asked for if the server requires one; without a chat template a text is continued.

    If the server ends, the page shows that in words.
    """
    (tmp_path / "keys").write_text("secret\n", encoding="utf-8")
    model = shutil.copytree(DEMO_DIR / "llama", tmp_path / "story")
    settings = json.loads((model / "tokenizer_config.json").read_text("utf-8"))
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    keys = ("--api-key-file", str(tmp_path / "keys"))
    with start_server(*keys, "--grace", "1", model=str(model)) as running:
        browser.open(f"{running.url}/#text=Once upon a time")
        browser.wait("document.querySelector('#alert').textContent.includes('API key')")
        assert not browser.run("document.querySelector('#key-form').hidden")
        browser.run("document.querySelector('#key').value = 'secret'")
        browser.run("document.querySelector('#key-form').requestSubmit()")
        browser.wait(f"{IDLE} && document.querySelector('#prompt').value")
        assert browser.run("document.querySelector('#key-form').hidden")
        assert browser.run("document.querySelector('#alert').textContent") == ""
        _fill(browser, max_tokens=12)
        browser.run("document.querySelector('#ask').requestSubmit()")
        browser.wait(f"{IDLE} && document.querySelector('#prompt').value.length > 20")
        assert browser.run("document.querySelector('#prompt').value").startswith("Once upon a time")
        browser.open(f"{running.url}/#view=branches&text={TEXT}")  # the key is kept
        browser.wait(LOOKED)
    browser.run("document.querySelector('#more').click()")
    browser.wait("document.querySelector('#alert').textContent.includes('Is it still running?')")


def test_tokens_fork_with_the_keyboard(stories: RunningServer, browser: Browser) -> None:
    """The arrow keys move between tokens, and Enter forks; a narrow window has no overflow."""
    browser.open(f"{stories.url}/#view=branches&text={TEXT}", width=360, height=700, dark=True)
    browser.wait(LOOKED)
    assert browser.run("document.documentElement.scrollWidth") == 360
    browser.run("document.querySelector('.token[tabindex=\"0\"]').focus()")
    for key in ("ArrowLeft", "ArrowLeft", "Enter"):
        browser.press(key)
    browser.wait(f"{LOOKED} && document.querySelectorAll('#tree li').length === 2")
    assert browser.run("document.querySelector('#tokens').textContent") == TEXT.removesuffix(
        " was a"
    )
    assert not browser.problems


def _fill(browser: Browser, **values: int) -> None:
    for name, value in values.items():
        browser.run(f"document.querySelector('#{name}').value = {value}")


def _click(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector('{selector}').click()")
    browser.wait(LOOKED)


def _save(browser: Browser, name: str) -> None:
    if PICTURES:
        browser.save_picture(Path(PICTURES) / name)
