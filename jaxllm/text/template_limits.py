"""Limits of a chat template: time, size of a value, and total number of characters.

There are two kinds of checks: each new value is charged for its size, and an operation whose result
could be far larger than its operands is rejected before it runs.
"""

import re
import time
from collections.abc import Iterable, Iterator
from string import Formatter
from types import GeneratorType
from typing import Any

from jinja2 import Undefined
from jinja2.utils import Namespace

from jaxllm.errors import TemplateError

MAX_ITEMS = 1 << 18
MAX_BITS = 1 << 12
MAX_WIDTH = 9999
# Each text may be copied this often (a macro, a trim, a concatenation) on its way to the output.
TOTAL_PER_OUTPUT = 32

_PLAIN = (int, float, type(None), Undefined, Namespace)
_SEQUENCES: Any = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))


class Budget:
    """The limits of one rendering and their use so far. Every method may raise TemplateError.

    Args:
        max_output: maximum characters in any one value; the total may be `TOTAL_PER_OUTPUT` times
            that.
        max_seconds: maximum CPU time of this thread since construction, so that the load of the
            machine does not matter.
    """

    def __init__(self, *, max_output: int, max_seconds: float) -> None:
        self.max_output = max_output
        self._max_seconds = max_seconds
        self._deadline = time.thread_time() + max_seconds
        self._total = 0

    def check_time(self) -> None:
        """Compare the clock with the deadline."""
        if time.thread_time() > self._deadline:
            raise TemplateError(f"it ran for more than {self._max_seconds:g} seconds")

    def charge(self, value: Any) -> Any:
        """Charge a value that the template made for its size, and return it."""
        self.check_time()
        if isinstance(value, GeneratorType):
            return self.charge_items(value)
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise TemplateError(f"it made a number of more than {MAX_BITS} bits")
        if isinstance(value, (str, dict, *_SEQUENCES)):
            self.check_size(self.size(value))
        if isinstance(value, str):
            self._total += len(value)
            if self._total > (limit := TOTAL_PER_OUTPUT * self.max_output):
                raise TemplateError(f"it made more than {limit:,} characters in total")
        return value

    def charge_items(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of an iterable; checks the time and the total size at each."""
        size = 0
        for item in iterable:
            self.check_time()
            size += self.size(item)
            self.check_size(size)
            yield item

    def size(self, value: Any, *, printable_only: bool = False) -> int:
        """Return the number of characters and items in a value; shared parts count every time.

        Args:
            printable_only: raise for anything but data: the text of a function reveals its address.
        """
        if isinstance(value, str):
            return len(value)
        size, items = 0, 0
        waiting: list[Any] = [value]
        while waiting:
            part = waiting.pop()
            items += 1
            if isinstance(part, str):
                size += len(part)
            elif isinstance(part, dict):
                waiting.extend(part.keys())
                waiting.extend(part.values())
            elif isinstance(part, _SEQUENCES):
                waiting += part
            elif printable_only and not isinstance(part, _PLAIN):
                raise TemplateError(f"it prints a {type(part).__name__}, which is not data")
            self.check_items(items + len(waiting))
            self.check_size(size)
        return size + items

    def to_text(self, value: Any) -> str:
        """Return `str(value)`; the value must be data."""
        self.size(value, printable_only=True)
        return str(value)

    def check_size(self, size: int) -> None:
        """Reject a value of more than `max_output` characters."""
        if size > self.max_output:
            raise TemplateError(f"it made a value of more than {self.max_output:,} characters")

    def check_items(self, count: int) -> None:
        """Reject a collection of more than `MAX_ITEMS` items, nested ones included."""
        if count > MAX_ITEMS:
            raise TemplateError(f"it made a collection of more than {MAX_ITEMS:,} items")

    def check_product(self, left: Any, right: Any) -> None:
        """Reject a string or sequence that is repeated too often."""
        times, value = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(times, int) and isinstance(value, str | list | tuple):
            self.check_size(self.size(value) * times)
            if not isinstance(value, str):
                self.check_items(len(value) * times)

    def check_power(self, base: Any, exponent: Any) -> None:
        """Reject an integer power of more than `MAX_BITS` bits."""
        if not (isinstance(base, int) and isinstance(exponent, int)):
            return
        if base.bit_length() * exponent > MAX_BITS:
            raise TemplateError(f"it made a number of more than {MAX_BITS} bits")

    def check_join(self, separator: str, items: list[Any]) -> None:
        """Reject a join that is too long."""
        self.check_size(self.size(items) + len(separator) * len(items))

    def check_method(self, text: str, method: str, args: list[Any]) -> None:
        """Reject a string method whose padding or replacement is too long."""
        for arg in args:
            if isinstance(arg, int):
                self.check_size(arg)
        if method == "replace" and len(args) > 1 and all(isinstance(a, str) for a in args[:2]):
            old, new = args[:2]
            self.check_size(len(text) + text.count(old) * max(len(new) - len(old), 0))

    def check_percent(self, text: str, values: Any) -> None:
        """Reject `text % values` that pads too far or repeats its values too often."""
        self._check_width(re.search(r"%[^%a-zA-Z]*(\d{5}|\*)", text) is None)
        self.check_size(text.count("%") * self.size(values))

    def check_format(self, text: str, values: list[Any]) -> None:
        """Reject `to_text.format(...)` that pads too far or repeats its values too often."""
        for _, _, spec, _ in Formatter().parse(text):
            self._check_width(not spec or ("{" not in spec and not re.search(r"\d{5}", spec)))
        self.check_size(text.count("{") * self.size(values))

    def _check_width(self, is_narrow: bool) -> None:
        if not is_narrow:
            raise TemplateError(f"it formats with a computed width, or one above {MAX_WIDTH}")
