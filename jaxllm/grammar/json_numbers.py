"""Numbers of JSON schemas, exactly: bounds as regexes over digits, constants as their spellings.

llguidance holds numbers as float64: `is_inexact` tells which of them would become others.
"""

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from jaxllm.errors import GrammarError

_MAX_DIGITS = 400  # before and after the point: more than a float64 has
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
BOUNDS = (*_LOWER, *_UPPER)


def _read_number(digits: str) -> float | Decimal:
    number, exact = float(digits), Decimal(digits)
    return number if exact == to_decimal(number) else exact


def _refuse_word(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


# Numbers keep their values: they are int, float where it is exact, else Decimal.
SCHEMA_DECODER = json.JSONDecoder(parse_float=_read_number, parse_constant=_refuse_word)


def to_decimal(number: Any) -> Decimal:
    """Return the value of a number of a schema: that of its shortest spelling, for a float."""
    return Decimal(repr(number)) if isinstance(number, float) else Decimal(number)


def is_number(value: Any) -> bool:
    """Return whether a value is a number in JSON's sense."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def is_inexact(number: Any, as_bound: bool) -> bool:
    """Return whether llguidance would take a number for another, or refuse a spelling of it.

    Raises GrammarError for a number that is too long for a regex.
    """
    if not is_number(number):
        return False
    value = to_decimal(number)
    if value and max(value.adjusted(), -int(value.as_tuple().exponent)) > _MAX_DIGITS:
        raise GrammarError(f"the schema's number {number!s:.40} has more than {_MAX_DIGITS} digits")
    if isinstance(number, Decimal) or abs(value) > 2**53 or 0 < abs(value) < 1e-50:
        return True
    return not as_bound and "e" in repr(number)


def spell_number(number: Any) -> str:
    """Return a regex of a number's spellings: plain digits, also with an exponent for 1e-7.

    An exponent may have a sign and zeros before it, as programs write them.
    """
    value = to_decimal(number or 0)  # not -0
    plain = f"{value:f}"
    plain = plain.rstrip("0").rstrip(".") if "." in plain else plain
    if isinstance(number, int) or "e" not in str(number).lower() or not value:
        return re.escape(plain)
    minus, digits, _ = value.as_tuple()
    shown = "".join(map(str, digits)).rstrip("0")
    mantissa = f"{shown[0]}\\.{shown[1:]}" if shown[1:] else shown
    power = ("-" if value.adjusted() < 0 else "[+]?") + f"0*{abs(value.adjusted())}"
    return f"{re.escape(plain)}|{'-' * minus}{mantissa}[eE]{power}"


def number_terminals(schema: Mapping[str, Any], integer: bool) -> tuple[str, str]:
    """Return the numbers within a schema's bounds: those from 0 on, and the others without sign.

    Each is an intersection of Lark's regexes, "" if it is empty. Numbers have no exponent, and no
    zero before the first digit.
    """
    least, most = _bound(schema, _LOWER), _bound(schema, _UPPER)
    if integer:
        least, most = _to_integer(least, up=True), _to_integer(most, up=False)
    above = [bound for bound in (least, (Decimal(0), False)) if bound]
    below = [bound for bound in (_negate(most), (Decimal(0), True)) if bound]
    return _magnitudes(max(above), most, integer), _magnitudes(max(below), _negate(least), integer)


Bound = tuple[Decimal, bool]  # and whether the number itself is outside


def _bound(schema: Mapping[str, Any], names: tuple[str, str]) -> Bound | None:
    """Return the tighter of a schema's bounds on one side. Draft 4 has exclusive=true."""
    plain, strict = (schema.get(name) for name in names)
    bounds: list[Bound] = []
    if is_number(plain):
        bounds.append((to_decimal(plain), strict is True))
    if is_number(strict):
        bounds.append((to_decimal(strict), True))
    if not bounds:
        return None
    sign = 1 if names == _LOWER else -1
    return max(bounds, key=lambda bound: (sign * bound[0], bound[1]))


def _negate(bound: Bound | None) -> Bound | None:
    return bound and (bound[0].copy_negate() if bound[0] else bound[0], bound[1])


def _to_integer(bound: Bound | None, up: bool) -> Bound | None:
    """Return the least or greatest integer within a bound."""
    if bound is None:
        return None
    value, strict = bound
    whole = int(value.to_integral_value("ROUND_CEILING" if up else "ROUND_FLOOR"))
    if strict and whole == value:
        whole += 1 if up else -1
    return Decimal(whole), False


def _magnitudes(least: Bound, most: Bound | None, integer: bool) -> str:
    """Return the numbers without sign between two bounds; the lower is at least 0."""
    if most is not None and (most[0] < least[0] or (most[0] == least[0] and (most[1] or least[1]))):
        return ""
    parts = ["0|[1-9][0-9]*" if integer else r"(0|[1-9][0-9]*)(\.[0-9]+)?"]
    if most is not None and most[0] == least[0]:
        whole, fraction = _digits(most[0])
        parts.append(f"{whole}\\.{fraction}0*" if fraction else f"{whole}(\\.0+)?")
    else:
        parts += [_at_least(*least)] + ([] if most is None else [_at_most(*most)])
    return " & ".join(f"/{part}/" for part in parts)


def _at_least(value: Decimal, strict: bool) -> str:
    """Return a regex of the numbers from this one up; strict: without it."""
    whole, fraction = _digits(value)
    size = len(whole)
    branches = [f"[1-9][0-9]{{{size},}}{_ANY}"]
    branches += [f"{head}[0-9]{{{left}}}{_ANY}" for head, left in _greater(whole)]
    after = [f"{head}[0-9]*" for head, _ in _greater(fraction)]
    after.append(f"{fraction}[0-9]*" + ("[1-9][0-9]*" if strict else ""))
    optional = "" if fraction or strict else "?"
    return "|".join([*branches, f"{whole}(\\.({'|'.join(after)})){optional}"])


def _at_most(value: Decimal, strict: bool) -> str:
    """Return a regex of the numbers up to this one; strict: without it."""
    whole, fraction = _digits(value)
    size = len(whole)
    branches = [f"[0-9]{{1,{size - 1}}}{_ANY}"] if size > 1 else []
    branches += [f"{head}[0-9]{{{left}}}{_ANY}" for head, left in _less(whole)]
    if fraction or not strict:
        after = [f"{head}[0-9]*" for head, _ in _less(fraction)]
        after += [f"{fraction[:n]}0*" for n in range(len(fraction) + (not strict))]
        branches.append(f"{whole}(\\.({'|'.join(after)}))?")
    return "|".join(branches)


_ANY = r"(\.[0-9]+)?"


def _digits(value: Decimal) -> tuple[str, str]:
    whole, _, fraction = f"{value:f}".partition(".")
    return whole, fraction.rstrip("0")


def _greater(digits: str) -> Iterator[tuple[str, int]]:
    """Yield beginnings of all greater strings of digits, and the number of digits after them."""
    for n, digit in enumerate(digits):
        if digit < "9":
            yield f"{digits[:n]}[{int(digit) + 1}-9]", len(digits) - n - 1


def _less(digits: str) -> Iterator[tuple[str, int]]:
    for n, digit in enumerate(digits):
        if digit > "0":
            yield f"{digits[:n]}[0-{int(digit) - 1}]", len(digits) - n - 1
