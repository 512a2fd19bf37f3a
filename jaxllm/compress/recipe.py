"""Recipes: an ordered list of steps, each a line, and what a step is given and gives.

A line is `verb: method [argument] [option=value ...]`, such as `prune: sparsegpt 2:4` or
`quantize: gptq int4-g64 act_order=true on=layers\\..*`; a verb with one way of it names no method
(`store: bfloat16`). Lines are read against a table of steps, so that whatever a line gets wrong is
refused before any work.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import flax.linen as nn
import msgspec

from jaxllm import models
from jaxllm.compress.data.calibration import Calibration
from jaxllm.compress.journal import Journal
from jaxllm.compress.matrices import sparsity
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, nearest
from jaxllm.files import compile_pattern, read_text, split_lines
from jaxllm.weights.formats import parse
from jaxllm.weights.leaves.arrays import DTYPES
from jaxllm.weights.paths import Params, first_match, flatten
from jaxllm.weights.precision import Precision


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a step changes: a model as a value. A step that returns it has `dataclasses.replace`d
    what it changes. The weights' formats are those of the leaves, whatever `precision` says.
    """

    config: ModelConfig
    params: Params
    precision: Precision

    @property
    def model(self) -> nn.Module:
        """The module that runs it."""
        return models.build(self.config, self.precision)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step works with. calibration: None only for a step that wants none. journal: of this
    step alone, by layer. say: takes a line for people.
    """

    calibration: Calibration | None
    journal: Journal
    show_progress: bool | None
    say: Callable[[str], None]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a method that has none; those of others are its children."""


class On(Options, frozen=True):
    """on: a path rule, the matrices that are changed."""

    on: str = r"(layers|h)\..*"


Shapes = Mapping[str, tuple[int, ...]]  # of every parameter, by path
Run = Callable[[Subject, str, Any, Work], Subject]


class Argument(NamedTuple):
    """What stands after a method's name. check: raises ConfigError for what it may not be."""

    name: str
    check: Callable[[str], Any]


class Step(NamedTuple):
    """A row of the table: a method, and how a line of it is read.

    method: "" for the one way of a verb. run: makes a subject of a subject, given the line's
    argument and options. argument: None where there is none. calibrated: whether it wants
    calibration. experts: whether it takes stacks of matrices. check: told the shapes of the open
    model, the argument and the options, raises ConfigError for what cannot be done to it.
    """

    verb: str
    method: str
    run: Run
    help: str
    argument: Argument | None = None
    options: type[Options] = Options
    calibrated: bool = True
    experts: bool = False
    check: Callable[[Shapes, str, Any], None] | None = None

    @property
    def name(self) -> str:
        """How a line of it begins."""
        return f"{self.verb}: {self.method}".rstrip()

    @property
    def usage(self) -> str:
        """A line with all that may stand in it, options with their defaults."""
        words = [self.name, *([self.argument.name] if self.argument else [])]
        defaults = msgspec.to_builtins(self.options())
        return " ".join([*words, *(f"[{name}={_text(x)}]" for name, x in defaults.items())])


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a recipe, read. argument: "" where there is none."""

    step: Step
    argument: str
    options: Any

    def __str__(self) -> str:
        """The line again, in one way of writing it: only what is not a default, in order."""
        plain, given = msgspec.to_builtins(self.step.options()), msgspec.to_builtins(self.options)
        options = [f"{n}={_text(value)}" for n, value in given.items() if value != plain[n]]
        return " ".join(filter(None, [self.step.name, self.argument, *options]))


Recipe = tuple[Line, ...]


def read_recipe(path: Path, table: Sequence[Step]) -> Recipe:
    """The recipe in a file, a step a line; `#` begins a comment. Raises what `parse_lines` does."""
    return parse_lines(split_lines(read_text(path)), table, str(path))


def parse_lines(lines: Iterable[str], table: Sequence[Step], where: str = "the recipe") -> Recipe:
    """The lines of a recipe, blank ones and comments passed over.

    Raises ConfigError for a recipe without a step, and for a line that is none, names no step of
    the table, or gives one what it does not take.
    """
    read = []
    for number, text in enumerate(lines, 1):
        if text := re.sub(r"(^|\s)#.*", "", text).strip():
            read.append(parse_line(text, table, f"{where}, line {number}"))
    if not read:
        raise ConfigError(f"{where} has no step: lines such as {table[0].usage!r}")
    return tuple(read)


def parse_line(text: str, table: Sequence[Step], where: str = "the step") -> Line:
    """One line. Raises ConfigError as `parse_lines` does."""
    verb, colon, rest = text.partition(":")
    words = rest.split()
    if not colon or not words:
        raise ConfigError(f"{where}: {text!r:.80} is not 'verb: method [argument] [option=value]'")
    step = _row(verb.strip(), words[0], table, where)
    words = words[1:] if step.method else words
    named = [word for word in words if re.match(r"\w+=", word)]
    plain = [word for word in words if word not in named]
    if len(plain) != (0 if step.argument is None else 1):
        raise ConfigError(f"{where}: {text!r:.80} should be {step.usage!r}")
    try:
        if step.argument is not None:
            step.argument.check(plain[0])
        options = _options(step, named)
    except ConfigError as error:
        raise ConfigError(f"{where}: {step.name}: {error}") from None
    return Line(step, plain[0] if plain else "", options)


def check_recipe(recipe: Recipe, config: ModelConfig, *, calibrated: bool) -> None:
    """Find out, as soon as a model is open, whether each step can be done to it.

    calibrated: whether there is calibration. Raises ConfigError for a rule that matches no matrix,
    a step that wants calibration where there is none, and what a step's own check says.
    """
    shapes = shapes_of(models.param_shapes(models.build(config)))
    for line in recipe:
        if line.step.calibrated and not calibrated:
            raise ConfigError(f"{str(line)!r} wants calibration: rows of a text, or samples")
        check_line(line, shapes)


def check_line(line: Line, shapes: Shapes) -> None:
    """Raise ConfigError for a line that cannot be done to parameters of such shapes."""
    if isinstance(line.options, On):
        found = matched(shapes, line.options.on, str(line))
        stacks = [path for path in found if len(shapes[path]) > 2]
        if stacks and not line.step.experts:
            raise ConfigError(
                f"{str(line)!r}: {stacks[0]} is of experts, each of which sees tokens of its own:"
                r" this step is for what all tokens run, on=.*self_attn.*, and 'quantize: gptq' or"
                " rtn rounds experts"
            )
    if line.step.check is not None:
        try:
            line.step.check(shapes, line.argument, line.options)
        except ConfigError as error:
            raise ConfigError(f"{str(line)!r}: {error}") from None


def shapes_of(params: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, by path."""
    return {path: tuple(leaf.shape) for path, leaf in flatten(params)}


def check_again(recipe: Recipe, done: Sequence[str]) -> None:
    """Raise ConfigError for a step that was done before, or stands in the recipe twice.

    done: the lines of the model's own recipe.
    """
    lines = [str(line) for line in recipe]
    for number, line in enumerate(lines):
        if line in done:
            raise ConfigError(f"{line!r} was done to this model already: --again does it again")
        if line in lines[:number]:
            raise ConfigError(f"{line!r} stands in the recipe twice: --again does it twice")


def matched(shapes: Shapes, rule: str, where: str) -> list[str]:
    """The paths of the matrices that a rule names. Raises ConfigError where there are none."""
    matrices = [path for path, shape in shapes.items() if len(shape) >= 2]
    found = [path for path in matrices if first_match([(rule, True)], path)]
    if not found:
        raise ConfigError(
            f"{where}: on={rule} matches no matrix of this model, such as {matrices[-1]}"
        )
    return found


def _row(verb: str, method: str, table: Sequence[Step], where: str) -> Step:
    methods = {step.method: step for step in table if step.verb == verb}
    if not methods:
        verbs = list(dict.fromkeys(step.verb for step in table))
        raise ConfigError(
            f"{where}: there is no {verb!r:.40}{nearest(verb, verbs)} (there are"
            f" {', '.join(verbs)})"
        )
    if "" in methods:
        return methods[""]
    if method not in methods:
        raise ConfigError(
            f"{where}: {verb} has no method {method!r:.40}{nearest(method, methods)} (it has"
            f" {', '.join(methods)})"
        )
    return methods[method]


def _options(step: Step, words: Sequence[str]) -> Any:
    """The options of a line. Raises ConfigError for one that is unknown, given twice, or wrong."""
    fields = {field.name: field for field in msgspec.structs.fields(step.options)}
    given: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in fields:
            known = f"it has {', '.join(fields)}" if fields else "it has none"
            raise ConfigError(f"no option {name!r:.40}{nearest(name, fields)} ({known})")
        if name in given:
            raise ConfigError(f"{name} is given twice")
        given[name] = value
    try:
        read = msgspec.convert(given, step.options, strict=False)
    except msgspec.ValidationError as problem:
        message, _, at = str(problem).partition(" - at `$.")
        name = at.rstrip("`")
        raise ConfigError(f"{name} {_expected(message)}, got {given.get(name, '')!r:.40}") from None
    for name, value in msgspec.to_builtins(read).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} must be a number, got {given[name]!r:.40}")
    if isinstance(read, On):
        compile_pattern(read.on, "on")
    return read


def _expected(message: str) -> str:
    """What msgspec says of a value, in the words of whoever wrote it."""
    words = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    found = re.match(r"Expected `(\w+)[^`]*`(.*?)(, got .*)?$", message)
    return (
        f"must be {words.get(found[1], found[1])}{found[2]}" if found else message.replace("`", "")
    )


def _text(value: Any) -> str:
    """An option's value as a line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _format(text: str) -> None:
    if parse(text).name in DTYPES:
        raise ConfigError(f"{text} is the format of an array: store: {text}")


# What can stand after a method's name.
FORMAT = Argument("FORMAT", parse)
QUANTIZED = Argument("FORMAT", _format)
PATTERN = Argument("N:M|SHARE%", sparsity.parse)
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]  # of an option
