"""The page's chat in a browser, with a model that is a stub."""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from tests.conftest import ROOT
from tests.server.browser import Browser
from tests.server.servers import DONE, Frame, StubModel, serve_stub

IDLE = "!document.body.classList.contains('busy')"
READY = f"{IDLE} && document.querySelector('#model').options.length"
REFUSED_SEED = "9" * 30
IS_SHOWN = "x.checkVisibility({visibilityProperty: true})"
PHONE = {"width": 390, "height": 844}
_GIVEN = os.environ.get("AXE_CORE")
AXE = [Path(_GIVEN)] if _GIVEN else []
AXE += [folder / "node_modules/axe-core/axe.min.js" for folder in (ROOT, ROOT.parent)]


class ChatModel(StubModel):
    """Answers with numbers. A word in the question asks for more.

    goes_on: whether "wait" and "think" end.
    """

    def __init__(self) -> None:
        super().__init__(self.write)
        self.info |= {"chat_template": "x", "thought_marks": ("<think>", "</think>")}
        self.goes_on = False

    async def write(self, fields: Frame) -> AsyncGenerator[Frame]:
        """Yield the frames of an answer."""
        question, number = fields["messages"][-1]["content"], len(self.asked)
        yield {"started": True, "opened": ""}
        if "think" in question:
            yield {"chunk": ["<think>Is it", 5, None]}
            await self.wait()
            yield {"chunk": [" so?</think>\n\n", 5, None]}
        if "nothing" not in question:
            yield {"chunk": [f" answer {number}", 5, None]}
        if "wait" in question:
            await self.wait()
            yield {"chunk": [" and more", 5, None]}
        if "code" in question:
            yield {"chunk": [":\n```python\nif 1 < 2:\n    print()\n```\n<b>done</b>", 5, None]}
        if "long" in question:
            yield {"chunk": [("\nword" * 200), 5, None]}
        yield {"chunk": ["", 5, "length" if "cut" in question else "eos"]}
        yield DONE

    async def wait(self) -> None:
        """Wait until `goes_on`."""
        while not self.goes_on:
            await asyncio.sleep(0.01)

    async def call(self, do: str, **fields: object) -> Frame:
        """Return what the branch view asks for."""
        tokens = [{"id": 5, "text": "word ", "attention": n / 10} for n in range(1, 5)]
        following = [{"id": n, "text": "x" * n, "logprob": -n} for n in (1, 2, 3)]
        return {"tokens": tokens, "next": following}

    def texts(self) -> list[tuple[str, str]]:
        """Return role and content of what the last request showed."""
        return [(message["role"], message["content"]) for message in self.asked[-1]["messages"]]


class ChatPage:
    """The page, open in a browser."""

    def __init__(self, browser: Browser, url: str, model: ChatModel) -> None:
        self.browser, self.url, self.model = browser, url, model
        self.run, self.press, self.type = browser.run, browser.press, browser.type

    def open(self, *, dark: bool = False, address: str = "", **size: int) -> None:
        """Load the page anew."""
        self.browser.open(f"{self.url}/{address}", dark=dark, **size)
        self.browser.wait(READY)

    def set(self, name: str, value: str) -> None:
        """Write a value into a field, as a person does."""
        self.run(f"document.querySelector('#{name}').select()")
        self.type(value)
        self.run("document.activeElement.dispatchEvent(new Event('change', {bubbles: true}))")

    def send(self, text: str, *, ends: bool = True) -> None:
        """Send a message with the keyboard, and wait for the end of the answer."""
        self.run("document.querySelector('#prompt').focus()")
        self.type(text)
        self.press("Enter")
        if ends:
            self.browser.wait(IDLE)

    def click(self, selector: str) -> None:
        """Click an element, and wait until the page is idle."""
        self.run(f"document.querySelector({selector!r}).click()")
        self.browser.wait(IDLE)

    def text(self, selector: str) -> str:
        """Return the text of the first such element that is shown, "" without one."""
        shown = f"[...document.querySelectorAll({selector!r})].filter((x) => {IS_SHOWN})"
        text: str = self.run(f"{shown}[0]?.textContent ?? ''")
        return text

    @property
    def log(self) -> list[str]:
        """The texts of all messages."""
        texts = "[...document.querySelectorAll('#log .text')].map((x) => x.textContent)"
        found: list[str] = self.run(texts)
        return found

    @property
    def focus(self) -> str:
        """The name of what has the focus."""
        name = "(x.id || x.className || x.ariaLabel || x.textContent)"
        found: str = self.run(f"((x) => {name})(document.activeElement)")
        return found

    @contextmanager
    def before_load(self, script: str) -> Iterator[None]:
        """Run a script in front of those of every page that is loaded within the block."""
        made = self.browser.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        yield
        self.browser.call("Page.removeScriptToEvaluateOnNewDocument", **made)


@pytest.fixture
def chat(browser: Browser) -> Iterator[ChatPage]:
    """The page of a server of its own, so that the browser keeps nothing for it."""
    model = ChatModel()
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serve_stub(model)) as server,
    ):
        page = ChatPage(browser, f"http://{server.host}:{server.port}", model)
        page.open()
        yield page
        model.goes_on = True
        browser.open("about:blank#")


def test_system_prompt_and_options_are_sent(chat: ChatPage) -> None:
    """Empty fields are not sent."""
    chat.send("one")
    assert chat.model.texts() == [("user", "one")]
    assert chat.model.asked[-1]["options"]["max_new_tokens"] is None
    chat.set("system", " Be brief. ")
    chat.set("max_tokens", "7")
    chat.send("two")
    assert chat.model.texts() == [("system", "Be brief."), ("user", "one"),
                                  ("assistant", " answer 1"), ("user", "two")]  # fmt: skip
    assert chat.model.asked[-1]["options"]["max_new_tokens"] == 7
    assert chat.log == ["one", "answer 1", "two", "answer 2"]
    assert chat.focus == "prompt"
    assert not chat.browser.problems


def test_copy_copies_the_message_as_written(chat: ChatPage) -> None:
    chat.browser.call("Browser.grantPermissions", origin=chat.url,
                      permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])  # fmt: skip
    chat.send("code")
    for role, text in (("user", "code"),
                       ("assistant", "answer 1:\n```python\nif 1 < 2:\n    print()\n```\n"
                                     "<b>done</b>")):  # fmt: skip
        chat.run(f"document.querySelector('.{role} .copy').focus()")
        chat.press("Enter")
        chat.browser.wait("document.querySelector('#status').textContent.includes('copied')")
        assert chat.run("navigator.clipboard.readText()") == text


def test_code_has_a_block_and_markup_is_text(chat: ChatPage) -> None:
    chat.send("code")
    assert chat.text(".assistant pre") == "if 1 < 2:\n    print()"
    assert chat.text(".assistant p:last-child") == "<b>done</b>"


def test_edited_question_begins_a_branch(chat: ChatPage) -> None:
    """Arrows return to the old branch, with all that followed; Escape leaves things as they are."""
    chat.send("one")
    chat.send("two")
    chat.click(".user .edit")
    assert chat.run("document.activeElement.value") == "one"
    chat.press("Escape")
    assert chat.focus == "edit"
    assert chat.log == ["one", "answer 1", "two", "answer 2"]
    chat.press("Enter")
    chat.type(" more")
    chat.press("Enter")
    chat.browser.wait(IDLE)
    assert chat.model.texts() == [("user", "one more")]
    assert chat.log == ["one more", "answer 3"]
    assert chat.focus == "talk"
    assert chat.text(".versions span") == "2 of 2"
    chat.click(".older")
    assert chat.log == ["one", "answer 1", "two", "answer 2"]
    assert (chat.text(".versions span"), chat.focus) == ("1 of 2", "older")
    chat.click(".newer")
    assert chat.log == ["one more", "answer 3"]
    assert not chat.browser.problems


def test_again_and_edited_answers_are_versions(chat: ChatPage) -> None:
    """Again and an edited answer are beside the old answer; what is asked then has the new one."""
    chat.send("one")
    chat.click(".assistant .again")
    assert chat.model.texts() == [("user", "one")]
    assert chat.log == ["one", "answer 2"]
    chat.click(".assistant .edit")
    chat.type("!")
    chat.press("Enter")  # a new line
    chat.click("#log form .primary")
    assert len(chat.model.asked) == 2
    assert chat.log == ["one", "answer 2!"]
    assert (chat.text(".assistant .versions span"), chat.focus) == ("3 of 3", "edit")
    chat.send("two")
    assert chat.model.texts() == [("user", "one"), ("assistant", " answer 2!\n"), ("user", "two")]
    chat.click(".older")
    chat.click(".older")
    assert chat.log == ["one", "answer 1"]
    chat.click(".older")  # from the first to the last
    assert chat.log == ["one", "answer 2!", "two", "answer 3"]
    chat.click(".newer")
    assert chat.log == ["one", "answer 1"]


@pytest.mark.parametrize("lost", ["sessionStorage", "localStorage"])
def test_reload_keeps_chat_and_settings(chat: ChatPage, lost: str) -> None:
    """A tab has its own after a reload; a new tab has the last."""
    chat.set("system", "Be brief.")
    chat.send("one")
    chat.click(".assistant .again")
    chat.click(".older")
    chat.run("document.querySelector('#prompt').value = 'draft'")
    with chat.before_load(f"{lost}.clear()"):
        chat.open()
    assert chat.log == ["one", "answer 1"]
    assert chat.text(".versions span") == "1 of 2"
    assert chat.run("document.querySelector('#prompt').value") == "draft"
    assert chat.run("document.querySelector('#system').value") == "Be brief."
    chat.click(".newer")
    assert chat.log == ["one", "answer 2"]


def test_new_chat_deletes_and_can_be_taken_back(chat: ChatPage) -> None:
    chat.send("one")
    chat.click("#clear")
    assert (chat.log, chat.focus) == ([], "prompt")
    assert "one" not in chat.run("JSON.stringify([{...localStorage}, {...sessionStorage}])")
    chat.click("#restore")
    assert chat.log == ["one", "answer 1"]
    chat.click("#clear")
    chat.send("two")
    assert chat.model.texts() == [("user", "two")]
    chat.open()
    assert chat.log == ["two", "answer 2"]


@pytest.mark.parametrize("area", ["localStorage", "sessionStorage"])
def test_chat_works_where_storage_is_refused(chat: ChatPage, area: str) -> None:
    refuse = f"Object.defineProperty(window, '{area}', {{get() {{ throw new Error('no') }}}})"
    with chat.before_load(refuse):
        chat.open()
        assert chat.text("#unkept") == ""
        chat.send("one")
        assert chat.log == ["one", "answer 1"]
        assert "This browser keeps nothing" in chat.text("#unkept")
        assert not chat.browser.problems


def test_long_chat_is_not_kept_and_says_so(chat: ChatPage) -> None:
    chat.send("one")
    kept = chat.run("JSON.stringify({...localStorage})")
    chat.run("document.querySelector('#prompt').value = 'x'.repeat(2_000_000)")
    chat.run("dispatchEvent(new Event('pagehide'))")
    assert "too long to be kept" in chat.text("#unkept")
    assert chat.run("JSON.stringify({...localStorage})") == kept
    chat.click("#clear")
    assert chat.text("#unkept") == ""


def test_thoughts_show_and_return(chat: ChatPage) -> None:
    """Thoughts are shown as they come, closed when the answer begins, and sent with the history."""
    chat.send("think", ends=False)
    chat.browser.wait("document.querySelector('.thought')")
    assert chat.text(".thought") == "Is it"
    assert chat.text("details summary") == "Thoughts"
    chat.model.goes_on = True
    chat.browser.wait(IDLE)
    assert chat.run("document.querySelector('#log details').open") is False
    assert chat.run("document.querySelector('.thought').textContent") == "Is it so?"
    assert chat.log == ["think", "answer 1"]
    chat.send("two")
    answer = {"role": "assistant", "content": "answer 1", "reasoning_content": "Is it so?"}
    assert chat.model.asked[-1]["messages"][1] == answer


def test_model_is_chosen_where_there_are_several(chat: ChatPage) -> None:
    assert chat.text("#models") == ""
    assert chat.text("#name") == "stub"
    chat.model.info["adapters"] = ["poems"]
    chat.open()
    names = chat.run("[...document.querySelector('#model').options].map((x) => x.value)")
    assert names == ["stub", "poems"]
    assert chat.text("#models")
    chat.send("one")
    assert chat.model.asked[-1]["adapter"] == "base"
    chat.run("document.querySelector('#model').focus()")
    chat.press("ArrowDown")
    for _ in range(2):
        chat.send("two")
        assert chat.model.asked[-1]["adapter"] == "poems"
        chat.open()
    chat.model.info["adapters"] = ["others"]  # the server has started anew
    chat.open()
    chat.send("two")
    assert chat.model.asked[-1]["adapter"] == "base"


def test_message_box_is_visible_on_a_phone(chat: ChatPage) -> None:
    """After a long answer, whose end is shown too."""
    chat.open(**PHONE)
    chat.send("long")
    chat.run("document.querySelector('#settings').open = true")
    chat.run("document.querySelector('#prompt').value = 'word '.repeat(500)")
    below = "document.querySelector('#settings').getBoundingClientRect().top"
    assert chat.run(f"{below} > document.querySelector('#send').getBoundingClientRect().bottom")
    chat.run("document.querySelector('#settings').open = false")
    chat.run("document.querySelector('#prompt').value = ''")
    chat.send("long " + "x" * 100)
    for selector in ("#prompt", "#send", "#settings summary", ".assistant:last-child .tools"):
        box = chat.run(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
        assert 0 <= box["left"] < box["right"] <= PHONE["width"], selector
        assert 0 <= box["top"] < box["bottom"] <= PHONE["height"], selector
    assert chat.run("document.documentElement.scrollWidth") == PHONE["width"]


def test_alert_leaves_when_a_setting_is_corrected(chat: ChatPage) -> None:
    """A setting that the page refuses shows no old alert; one that the server refuses shows its."""
    chat.set("seed", REFUSED_SEED)
    chat.send("one")
    assert "seed" in chat.text("#alert")
    chat.run("document.querySelector('#temperature').value = 101")
    chat.send("two")
    assert (chat.text("#alert"), chat.focus) == ("", "temperature")
    assert not chat.run("document.querySelector('#sampling').checkValidity()")
    chat.set("temperature", "1")
    chat.click("#send")
    assert "seed" in chat.text("#alert")
    chat.set("seed", "1")
    assert chat.text("#alert") == ""


def test_refused_question_stays_and_can_be_asked_again(chat: ChatPage) -> None:
    """A new question takes its place, so that questions and answers alternate."""
    chat.send("one")
    chat.send("nothing")
    assert "ended without a text" in chat.text("#alert")
    assert (chat.log, chat.focus) == (["one", "answer 1", "nothing"], "prompt")
    chat.click(".user:last-child .again")
    assert len(chat.model.asked) == 3
    chat.send("two")
    assert chat.model.texts() == [("user", "one"), ("assistant", " answer 1"), ("user", "two")]
    assert chat.text(".versions span") == "2 of 2"
    assert chat.text("#alert") == ""


def test_failed_again_shows_the_old_answer(chat: ChatPage) -> None:
    chat.send("one")
    chat.set("seed", REFUSED_SEED)
    chat.click(".assistant .again")
    assert chat.text("#alert")
    assert chat.log == ["one", "answer 1"]


def test_stop_and_limit_keep_what_came(chat: ChatPage) -> None:
    chat.send("wait", ends=False)
    chat.browser.wait("document.querySelector('.assistant .text').textContent")
    assert chat.run("document.querySelector('.assistant').ariaBusy") == "true"
    assert (chat.text(".user .copy"), chat.text(".user .edit"), chat.text("#clear")) == (
        "Copy",
        "",
        "",
    )
    chat.click("#chat .stop")
    assert chat.log == ["wait", "answer 1"]
    chat.send("cut")
    assert chat.log[-1] == "answer 2The answer was cut at the limit of tokens."
    assert (chat.text(".user .edit"), chat.text("#clear")) == ("Edit", "New chat")


def test_keyboard_reaches_everything(chat: ChatPage) -> None:
    """Tab stops at all controls that are shown, in their order in the page."""
    chat.model.info["adapters"] = ["poems"]
    chat.open()
    chat.send("think code", ends=False)
    chat.model.goes_on = True
    chat.browser.wait(IDLE)
    chat.click(".assistant .again")
    kinds = "a, button, input, textarea, select, summary, [tabindex='0']"
    all_ = f"[...document.querySelectorAll({kinds!r})].filter((x) => {IS_SHOWN})"
    count = chat.run(f"{all_}.length")
    assert count >= 20
    chat.run(f"(document.activeElement.blur(), {all_}[0].focus())")
    for number in range(count):
        assert chat.run(f"document.activeElement === {all_}[{number}]"), number
        chat.press("Tab")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [{}, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing(chat: ChatPage, size: dict[str, int], dark: bool) -> None:
    """In every state of the page."""
    file = next((path for path in AXE if path.exists()), None)
    if file is None:
        pytest.skip("no axe-core: AXE_CORE names no axe.min.js, nor is one in node_modules")

    def check(state: str) -> None:
        chat.run(file.read_text("utf-8"))
        found = "({violations}) => violations.map((x) => [x.id, x.nodes.map((n) => n.html)])"
        assert chat.run(f"axe.run().then({found})") == [], state

    chat.model.info["adapters"] = ["poems"]
    chat.open(dark=dark, **size)
    check("empty")
    chat.send("think", ends=False)
    chat.browser.wait("document.querySelector('.thought')")
    check("busy")
    chat.model.goes_on = True
    chat.browser.wait(IDLE)
    chat.send("code cut")
    chat.click(".assistant .again")
    check("conversation")
    chat.run("document.querySelectorAll('details').forEach((x) => { x.open = true })")
    check("settings and thoughts")
    chat.click(".assistant .edit")
    check("edit")
    chat.press("Escape")
    chat.set("seed", REFUSED_SEED)
    chat.click(".assistant .again")
    assert chat.text("#alert")
    check("error")
    chat.click("#clear")
    check("deleted")
    chat.open(dark=dark, address="#view=branches&text=x", **size)
    chat.browser.wait(f"{IDLE} && document.querySelectorAll('#next button').length")
    check("branches")
