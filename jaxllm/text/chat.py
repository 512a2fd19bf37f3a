"""Chat templates: render a conversation as the prompt that a model was trained to continue.

A template is code from a checkpoint, so it runs in a `Sandbox`. Each rendering gets a new one, and
its limits work on any thread.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxllm.errors import TemplateError
from jaxllm.files import path_exists, path_inside, read_json, read_text
from jaxllm.text.formats import ADDITIONAL_TEMPLATES, read_special_tokens

if TYPE_CHECKING:
    from jaxllm.text.sandbox import Sandbox

MAX_OUTPUT = 1 << 23
MAX_SECONDS = 5.0
_MAX_DEPTH = 64


@dataclass(frozen=True)
class ChatTemplate:
    """A well-formed chat template with the limits of its execution.

    * `tool_use` is rendered instead of `source` if there are tools, as in transformers.
    * `special_tokens` are variables for the template, besides messages: `("bos_token", "<s>")`.
    * `max_output` limits the characters of the output and of every intermediate value.
    * `max_seconds` limits the CPU time of the rendering thread. The clock is checked in every loop
      iteration, at every call and for every new value. Between two checks there is one operation on
      values of at most `max_output` characters and 262,144 items, or the compilation of at most
      65,536 characters of source.

    Raises:
        TemplateError: the source is not a valid template.
    """

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()
    max_output: int = MAX_OUTPUT
    max_seconds: float = MAX_SECONDS
    tool_use: str | None = None

    def __post_init__(self) -> None:
        for source in filter(None, (self.source, self.tool_use)):
            with _convert_errors("malformed chat template"):
                self._sandbox().from_string(source)

    @classmethod
    def from_directory(cls, path: str | Path, *, name: str = "default") -> Self:
        """Return the chat template of a checkpoint directory.

        `name` selects one of the templates from `read_templates`; to "default", a template named
        "tool_use" is added.

        Raises:
            TemplateError: there is no template of that name, or it is malformed.
            CheckpointError: a file is malformed.
        """
        directory = Path(path)
        tokens = tuple(read_special_tokens(directory).items())
        templates = read_templates(directory)
        if name not in templates:
            others = f"only {', '.join(sorted(templates))}" if templates else "none"
            raise TemplateError(
                f"no chat template {name!r} in {directory}: looked in chat_template.jinja and in "
                f"tokenizer_config.json, found {others}. Give a template"
                " (jaxllm chat --chat-template FILE), or generate from plain text (jaxllm generate)"
            )
        return cls(
            templates[name],
            tokens,
            tool_use=templates.get("tool_use") if name == "default" else None,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation, up to the start of the model's answer.

        The template writes its own special tokens: encode the output with `parse_special=True` and
        without `bos=True`.

        Args:
            messages: each has a `role` and a `content` (a string or a list of parts, optional with
                `tool_calls`). `reasoning_content` may also be called `thinking` or `reasoning`, as
                in transformers; the template gets it under the first two names.
            variables: plain JSON-like data (`tools`, `documents`, ...); it can override the special
                tokens.

        Raises:
            TemplateError: invalid messages or variables; or the template raised an error, failed,
                or exceeded a limit.
        """
        _check_messages(messages)
        given = {
            "tools": None,
            "documents": None,
            **dict(self.special_tokens),
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        plain = {name: _copy_plain(value, name) for name, value in given.items()}
        plain["messages"] = [_with_reasoning(message) for message in plain["messages"]]
        with _convert_errors("the chat template failed"):
            return self._sandbox().run(self.select_source(plain["tools"]), plain)

    def select_source(self, tools: Any) -> str:
        """Return the source that is rendered for these tools, None if there are none."""
        return self.source if tools is None or self.tool_use is None else self.tool_use

    def _sandbox(self) -> "Sandbox":
        from jaxllm.text.sandbox import Sandbox
        from jaxllm.text.template_limits import Budget

        return Sandbox(Budget(max_output=self.max_output, max_seconds=self.max_seconds))


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    names = ("reasoning_content", "thinking", "reasoning")
    said = next((message[name] for name in names if message.get(name) is not None), None)
    if said is None:
        return message
    return {"thinking": said, **message, "reasoning_content": said}


def read_templates(directory: Path) -> dict[str, str]:
    """Return the chat templates of a checkpoint directory by name; the usual one is "default".

    They are `chat_template.jinja` and `additional_chat_templates/NAME.jinja`; without these files
    `chat_template` in `tokenizer_config.json`, a template or a list of `{"name", "template"}`.

    Raises:
        TemplateError, CheckpointError: a file is malformed.
    """
    usual, folder = directory / "chat_template.jinja", directory / ADDITIONAL_TEMPLATES
    files = {file.stem: file for file in sorted(folder.glob("*.jinja"))}
    if path_exists(usual):
        files["default"] = usual
    if files:
        return {n: read_text(path_inside(file.parent, file.name)) for n, file in files.items()}
    templates: Any = None
    if path_exists(path := directory / "tokenizer_config.json"):
        templates = read_json(path_inside(directory, path.name)).get("chat_template")
    if isinstance(templates, str):
        templates = [{"name": "default", "template": templates}]
    named = {}
    for entry in templates if isinstance(templates, list) else [templates]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                named[name] = template
            case None:
                continue
            case _:
                raise TemplateError(
                    f"{path}: chat_template must be a string or a list of names and templates"
                )
    return named


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list | tuple):
        raise TemplateError(f"messages must be a list: got {type(messages).__name__}")
    for index, message in enumerate(messages):
        match message:
            case {"role": str(), "content": str() | list() | tuple() | None}:
                continue
            case {"role": str(), "tool_calls": _} if "content" not in message:
                continue
        got = type(message).__name__
        if isinstance(message, Mapping):
            got = ", ".join(f"{key}: {type(value).__name__}" for key, value in message.items())
        raise TemplateError(
            f"message {index} must have a role and a content that are strings: got {got[:200]!r}"
        )


def _copy_plain(value: Any, name: str, depth: int = 0) -> Any:
    """Return a copy with JSON types only, since methods of other objects are code."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {
                _copy_plain(key, name, depth + 1): _copy_plain(item, name, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [_copy_plain(item, name, depth + 1) for item in value]
        raise TemplateError(f"{name} should be plain data, got a {type(value).__name__} in it")
    raise TemplateError(f"{name} is nested more than {_MAX_DEPTH} levels deep, or contains itself")


@contextmanager
def _convert_errors(what: str) -> Iterator[None]:
    """Convert any error of a template to a TemplateError of one printable line."""
    try:
        yield
    except Exception as error:
        number = getattr(error, "lineno", None)
        line = "" if number is None else f", line {number}"
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        text = "".join(c if c.isprintable() else " " for c in str(error)[:2000])
        message = f"{what}{line}: {kind}{' '.join(text.split())[:300]}"
        raise TemplateError(message) from error
