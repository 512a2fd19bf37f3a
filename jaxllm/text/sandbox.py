"""Sandbox for untrusted chat templates: jinja2's sandbox with limits on time and memory.

jinja2's sandbox keeps a template from reaching Python, but does not limit its resources. A signal
would work on the main thread only, and a thread cannot be killed, so the checks are in the template
itself: its syntax tree is rewritten before compilation so that every loop iteration, every call and
every new value passes through a `Budget`. Between two checks there is one operation of the
interpreter on values of bounded size, which cannot be interrupted but is short.
"""

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
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
from jaxllm.text.template_limits import MAX_WIDTH, Budget

# Compiling cannot be interrupted; this size takes a second. Real templates have up to 30,000.
MAX_SOURCE = 1 << 16

# The space makes these names impossible to write in a template.
CHARGE, CHARGE_ITEMS, CONCATENATE = " weigh", " pace", " concatenate"
# fmt: off
_FILTERS = (
    "abs", "attr", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items",
    "last", "length", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select",
    "selectattr", "sort", "unique",
)
_TEXT_FILTERS = (
    "capitalize", "e", "escape", "lower", "safe", "string", "title", "trim", "upper", "wordcount",
)
_METHODS: dict[type, tuple[str, ...]] = {
    str: (
        "capitalize", "casefold", "center", "count", "endswith", "find", "format", "format_map",
        "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric",
        "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition",
        "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition",
        "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title",
        "upper", "zfill",
    ),
    dict: ("copy", "get", "items", "keys", "values"),
    list: ("copy", "count", "index"),
    tuple: ("count", "index"),
}
# fmt: on


class Sandbox(ImmutableSandboxedEnvironment):
    """The jinja2 environment of one rendering: Hugging Face's conventions, limited by a budget.

    Only the filters and methods in the tables above exist.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_print_value,
            extensions=[LoopControlExtension, GenerationTag],
            loader=jinja2.FunctionLoader(_refuse_other),
        )
        self.budget = budget
        self.globals = {
            "range": safe_range,
            "dict": _make_dict,
            "namespace": _Namespace,
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "raise_exception": self._raise_exception,
            "strftime_now": _format_date,
        }
        self.filters = {
            **{name: self.filters[name] for name in _FILTERS},
            **{name: self._make_text_filter(self.filters[name]) for name in _TEXT_FILTERS},
            "format": self._format,
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "round": self._round,
            "tojson": self._to_json,
            CHARGE: budget.charge,
            CHARGE_ITEMS: budget.charge_items,
            CONCATENATE: self._concatenate,
        }

    def run(self, source: str, variables: Mapping[str, Any]) -> str:
        """Return the template's output.

        Raises:
            TemplateError: the budget is exceeded. Other errors of the template are not converted.
        """
        pieces, length = [], 0
        for piece in self.from_string(source).generate(variables):
            length += len(piece)
            if length > self.budget.max_output:
                raise TemplateError(f"it printed more than {self.budget.max_output:,} characters")
            pieces.append(piece)
        return "".join(pieces)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.check_time()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            self.budget.check_method(owner, function.__name__, [*args, *kwargs.values()])
            if function.__name__ != "join":
                self.budget.size([args, kwargs], printable_only=True)
            elif len(args) == 1:
                args = (list(self.budget.charge_items(args[0])),)
                self.budget.check_join(owner, args[0])
        if isinstance(function, LoopContext) and args:
            args = (self.budget.charge_items(args[0]), *args[1:])
        return self.budget.charge(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            self.budget.check_product(left, right)
        elif operator == "**":
            self.budget.check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            self.budget.check_percent(left, right)
            self.budget.size(right, printable_only=True)
        return self.budget.charge(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def check_and_format(*args: Any, **kwargs: Any) -> str:
            self.budget.check_format(value.__self__, [args, kwargs])
            self.budget.size([args, kwargs], printable_only=True)
            return wrapped(*args, **kwargs)

        return check_and_format

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"it is longer than {MAX_SOURCE:,} characters")
        tree = MeterInserter().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def _make_text_filter(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that converts its value to text first."""

        def apply_filter(value: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self.budget.to_text(value), *args, **kwargs)

        return apply_filter

    def _raise_exception(self, message: Any) -> None:
        raise TemplateError(f"it rejected the messages: {self.budget.to_text(message)}")

    def _concatenate(self, parts: list[Any]) -> str:
        texts = [self.budget.to_text(part) for part in parts]
        self.budget.check_join("", texts)
        return str(self.budget.charge("".join(texts)))

    def _join(self, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        parts = value if attribute is None else map(make_attrgetter(self, attribute), value)
        texts, between = (
            [self.budget.to_text(part) for part in self.budget.charge_items(parts)],
            str(d),
        )
        self.budget.check_join(between, texts)
        return between.join(texts)

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = map(self.budget.to_text, (value, old, new))
        self.budget.check_method(text, "replace", [old, new])
        return text.replace(old, new, -1 if count is None else count)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        text, values = self.budget.to_text(value), kwargs or args
        self.budget.check_percent(text, values)
        self.budget.size(values, printable_only=True)
        return text % values

    def _indent(
        self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        text, step = self.budget.to_text(value), len(width) if isinstance(width, str) else width
        self.budget.check_size(len(text) + (len(text.splitlines()) + 1) * step)
        return do_indent(text, width, first, blank)

    def _round(self, value: float, precision: int = 0, method: Any = "common") -> float:
        self.budget.check_power(10, abs(precision))
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
        return "".join(self.budget.charge_items(encoder.iterencode(value)))


class _Namespace(Namespace):
    """A namespace without private attributes, whose text hides its content."""

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


@jinja2.pass_context
def _print_value(context: Context, value: Any) -> str:
    """Return the text of `{{ value }}`; jinja2 itself would convert constants unmetered."""
    environment: Any = context.environment
    return str(environment.budget.charge(environment.budget.to_text(value)))


def _refuse_other(name: str) -> str:
    raise TemplateError(f"a template cannot include, import or extend another ({name!r:.80})")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _format_date(format: str) -> str:
    if re.search(r"\d{4}", format):
        raise TemplateError("it formats a date with a width above 999")
    return datetime.now().strftime(format)


class MeterInserter(NodeTransformer):
    """Wraps loops, outputs and every expression that builds a value in budget filters."""

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _wrap_in_filter(node.iter, CHARGE_ITEMS)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _wrap_in_filter(nodes.List(node.nodes, lineno=node.lineno), CONCATENATE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._charge_value(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return (
            self._charge_value(node)
            if isinstance(node.arg, nodes.Slice)
            else self.generic_visit(node)
        )

    def _charge_value(self, node: Any) -> nodes.Node:
        return _wrap_in_filter(self.generic_visit(node), CHARGE)

    visit_List = visit_Dict = visit_Compare = visit_Test = visit_Filter = _charge_value


class GenerationTag(Extension):
    """`{% generation %}`: marks the model's answers for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _wrap_in_filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
