"""Running a chat template that nobody has vouched for: jinja2's sandbox with a meter in it.

jinja2's sandbox keeps a template from reaching Python, not from using it up. Signals work on the
main thread only and a thread cannot be killed, so the meter is in the template itself: before it is
compiled, its syntax tree is rewritten so that every turn of a loop, every call, and every value that
is built passes through here. That works on any thread. Three budgets stop it: a deadline, read at
each of those points; the size of any one value; and the characters made in total. What lies between
two points is one operation of the interpreter on values of bounded size, which cannot be interrupted
but is short; those that could grow their operands without bound are checked before they run.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from string import Formatter
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_indent, do_round, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from jaxllm.errors import TemplateError

MAX_SOURCE = 1 << 18
MAX_ITEMS = 1 << 18
MAX_BITS = 1 << 12
MAX_WIDTH = 9999
# A text may pass through this many values (a macro, a trim, a concatenation) on its way out.
TOTAL_PER_OUTPUT = 32

_FILTERS = (
    "abs attr capitalize count d default dictsort e escape first float groupby int items last "
    "length list lower map max min reject rejectattr reverse safe select selectattr sort string "
    "title trim unique upper"
).split()
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "capitalize casefold center count endswith find format format_map index isalnum isalpha "
        "isascii isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower "
        "lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit "
        "rstrip split splitlines startswith strip swapcase title upper zfill".split()
    ),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
}
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
# The space keeps these names out of a template's own syntax.
_WEIGH, _PACE, _CONCATENATE = " weigh", " pace", " concatenate"


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering: Hugging Face's conventions, and budgets that it uses up.

    Args:
      max_output: characters in any one value; `TOTAL_PER_OUTPUT` times as many in all.
      max_seconds: from construction to the last piece of output.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *, max_output: int, max_seconds: float) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self.max_output = max_output
        self.max_seconds = max_seconds
        self._deadline = time.monotonic() + max_seconds
        self._total = 0
        cycler, joiner = self.globals["cycler"], self.globals["joiner"]
        self.globals = {
            "range": safe_range,
            "dict": _make_dict,
            "namespace": _Namespace,
            "cycler": cycler,
            "joiner": joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.filters = {
            **{name: self.filters[name] for name in _FILTERS},
            "format": self._format,
            "indent": self._indent,
            "join": self._join_filter,
            "replace": self._replace,
            "round": self._round,
            "tojson": self._to_json,
            _WEIGH: self.weigh,
            _PACE: self.pace,
            _CONCATENATE: self._concatenate,
        }

    def run(self, source: str, variables: Mapping[str, Any]) -> str:
        """Return the template's output.

        Raises:
          TemplateError: a budget is used up. Anything that a template can provoke may be raised too.
        """
        pieces, length = [], 0
        for piece in self.from_string(source).generate(variables):
            self._tick()
            length += len(piece)
            if length > self.max_output:
                raise TemplateError(f"it printed more than {self.max_output:,} characters")
            pieces.append(piece)
        return "".join(pieces)

    def weigh(self, value: Any) -> Any:
        """Return a value that the template made, after its size has been charged."""
        self._tick()
        if isinstance(value, str):
            self._charge(len(value))
        elif isinstance(value, GeneratorType):
            return self.pace(value)
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise TemplateError(f"it made a number of more than {MAX_BITS} bits")
        elif isinstance(value, list | tuple | dict | _VIEWS):
            self._charge(self._size(value))
        return value

    def pace(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of an iterable, charging each."""
        size = 0
        for item in iterable:
            self._tick()
            size += self._size(item)
            self._check_size(size)
            yield item

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self._tick()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            self._check_call(owner, function.__name__, [*args, *kwargs.values()])
            if function.__name__ == "join" and len(args) == 1:
                args = (list(self.pace(args[0])),)
                self._check_join(owner, args[0])
        if isinstance(function, LoopContext) and args:
            args = (self.pace(args[0]), *args[1:])
        return self.weigh(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_BITS:
                raise TemplateError(f"it made a number of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            self._check_percent(left, right)
        return self.weigh(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            text = value.__self__
            for _, _, spec, _ in Formatter().parse(text):
                if spec and ("{" in spec or re.search(r"\d{5}", spec)):
                    raise TemplateError(f"it formats with a width of more than {MAX_WIDTH}")
            self._check_size(text.count("{") * self._size([args, kwargs]))
            return wrapped(*args, **kwargs)

        return bounded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"it is longer than {MAX_SOURCE:,} characters")
        tree = _Metered().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def _tick(self) -> None:
        if time.monotonic() > self._deadline:
            raise TemplateError(f"it ran for more than {self.max_seconds:g} seconds")

    def _charge(self, size: int) -> None:
        self._check_size(size)
        self._total += size
        if self._total > TOTAL_PER_OUTPUT * self.max_output:
            raise TemplateError(
                f"it made more than {TOTAL_PER_OUTPUT * self.max_output:,} characters"
            )

    def _check_size(self, size: int) -> None:
        if size > self.max_output:
            raise TemplateError(f"it made a value of more than {self.max_output:,} characters")

    def _size(self, value: Any) -> int:
        """Return the characters and items in a value, shared parts counted each time."""
        if isinstance(value, str):
            return len(value)
        size, items, waiting = 0, 0, [value]
        while waiting:
            part = waiting.pop()
            items += 1
            if isinstance(part, str):
                size += len(part)
            elif isinstance(part, dict):
                waiting.extend(part.keys())
                waiting.extend(part.values())
            elif isinstance(part, list | tuple | _VIEWS):
                waiting.extend(part)
            if items + len(waiting) > MAX_ITEMS:
                raise TemplateError(f"it made a collection of more than {MAX_ITEMS:,} items")
            self._check_size(size)
        return size + items

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int):
            left, right = right, left
        if not isinstance(right, int):
            return
        if isinstance(left, str | list | tuple):
            self._check_size(self._size(left) * max(right, 0))
            if not isinstance(left, str) and len(left) * right > MAX_ITEMS:
                raise TemplateError(f"it made a collection of more than {MAX_ITEMS:,} items")

    def _check_percent(self, text: str, values: Any) -> None:
        if re.search(r"%[^%a-zA-Z]*(\d{5}|\*)", text):
            raise TemplateError(f"it formats with a width of more than {MAX_WIDTH}")
        self._check_size(text.count("%") * self._size(values))

    def _check_call(self, text: str, method: str, args: list[Any]) -> None:
        if any(isinstance(arg, int) and arg > self.max_output for arg in args):
            raise TemplateError(f"it made a value of more than {self.max_output:,} characters")
        if method == "replace" and len(args) > 1 and all(isinstance(a, str) for a in args[:2]):
            self._check_size(len(text) + text.count(args[0]) * max(len(args[1]) - len(args[0]), 0))

    def _check_join(self, separator: str, items: list[Any]) -> None:
        self._check_size(self._size(items) + len(separator) * max(len(items) - 1, 0))

    def _concatenate(self, parts: list[Any]) -> str:
        texts = [str(part) for part in parts]
        self._check_size(sum(map(len, texts)))
        return str(self.weigh("".join(texts)))

    def _join_filter(self, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        parts = value if attribute is None else map(make_attrgetter(self, attribute), value)
        texts = [str(part) for part in self.pace(parts)]
        self._check_join(str(d), texts)
        return str(d).join(texts)

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        self._check_call(str(value), "replace", [str(old), str(new)])
        return str(value).replace(str(old), str(new), -1 if count is None else count)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        self._check_percent(str(value), kwargs or args)
        return str(value) % (kwargs or args)

    def _indent(
        self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        text, step = str(value), len(width) if isinstance(width, str) else width
        self._check_size(len(text) + (len(text.splitlines()) + 1) * step)
        return do_indent(text, width, first, blank)

    def _round(self, value: float, precision: int = 0, method: Any = "common") -> float:
        if not -MAX_BITS < precision < MAX_BITS // 4:
            raise TemplateError(f"it rounds to {precision} digits")
        return do_round(value, precision, method)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if indent is not None and indent > MAX_WIDTH:
            raise TemplateError(f"it indents by more than {MAX_WIDTH}")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return "".join(self.pace(encoder.iterencode(value)))


class _Metered(NodeTransformer):
    """Passes loops, outputs and every expression that builds a value through the meter."""

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _PACE)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCATENATE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._weighed(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return (
            self._weighed(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)
        )

    def _weighed(self, node: Any) -> nodes.Node:
        return _filtered(self.generic_visit(node), _WEIGH)

    visit_List = visit_Dict = visit_Compare = visit_Test = visit_Filter = _weighed


class _GenerationTag(Extension):
    """`{% generation %}`: marks what the model said, for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """A namespace that cannot pass for anything else, nor print what it holds."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        Namespace.__init__(self)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise TemplateError(f"a namespace cannot have an attribute {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> str:
    environment = context.environment
    assert isinstance(environment, Sandbox)
    return str(environment.weigh(str(value)))


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: Any) -> None:
    raise TemplateError(f"it refused the messages: {message}")


def _strftime_now(format: str) -> str:
    if re.search(r"\d{4}", format):
        raise TemplateError("it formats a date with an absurd width")
    return datetime.now().strftime(format)
