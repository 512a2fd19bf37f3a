"""Recipes: an ordered list of steps, one a line; and the types that steps take and return.

A line is `verb: method [argument] [option=value ...]`, such as `prune: sparsegpt 2:4` or
`quantize: gptq int4-g64 act_order=true on=layers\\..*`; a verb with a single method names none
(`store: bfloat16`). Lines are parsed against the table of methods, so that every mistake in a line
raises an error before any work.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from jaxllm import models
from jaxllm.checkpoints.resume import TensorStore
from jaxllm.compress.calibration import Calibration
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError, suggest_name
from jaxllm.files import compile_pattern, read_text, split_lines
from jaxllm.weights.formats import parse_format
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, first_match, flatten
from jaxllm.weights.precision import Precision
from jaxllm.weights.quantize import is_convolution
from jaxllm.weights.types.arrays import DTYPES
from jaxllm.weights.types.int_weight import IntFormat


@dataclasses.dataclass(frozen=True)
class ModelState:
    """The model that steps transform, as a value: each step returns one with some fields replaced.

    The weights themselves determine their formats, not `precision`.
    """

    config: ModelConfig
    params: Params
    precision: Precision

    @property
    def model(self) -> Model:
        """The Flax module that runs it."""
        return models.build(self.config, self.precision)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No options; the base class of every method's options."""


class RuleOptions(Options, frozen=True):
    """on: a regex over whole paths: which matrices to change."""

    on: str = r"(layers|h)\..*"


OptionsT = TypeVar("OptionsT", bound=Options)


@dataclasses.dataclass(frozen=True)
class StepContext(Generic[OptionsT]):
    """The input of a step.

    argument, options: of its line. calibration: None only for a step that needs none. store: this
    step's own, for finished layers. log: called with each log line.
    """

    state: ModelState
    argument: str
    options: OptionsT
    calibration: Calibration | None = None
    store: TensorStore = dataclasses.field(default_factory=TensorStore)
    show_progress: bool | None = None
    log: Callable[[str], None] = lambda _: None

    @property
    def token_NT(self) -> np.ndarray:
        """The calibration rows."""
        assert self.calibration is not None
        return self.calibration.token_NT


Shapes = Mapping[str, tuple[int, ...]]  # of every parameter, by path
Run = Callable[[StepContext[Any]], ModelState]


class Argument(NamedTuple):
    """A method's argument. check: raises ConfigError for an invalid value."""

    name: str
    check: Callable[[str], Any]


class StepSpec(NamedTuple):
    """A row of the table: a method, and how its lines are parsed.

    method: "" if the verb has a single method. run: returns the new model. argument: None if it
    takes none. supports_experts: whether it accepts stacks of matrices. check: takes the shapes of
    the model's parameters, the argument and the options; raises ConfigError if the step does not
    apply.
    """

    verb: str
    method: str
    run: Run
    help: str
    argument: Argument | None = None
    options: type[Options] = Options
    needs_calibration: bool = True
    supports_experts: bool = False
    check: Callable[[Shapes, str, Any], None] | None = None

    @property
    def name(self) -> str:
        """How its lines begin."""
        return f"{self.verb}: {self.method}".rstrip()

    @property
    def usage(self) -> str:
        """A line with the argument and all options with their defaults."""
        words = [self.name, *([self.argument.name] if self.argument else [])]
        defaults = msgspec.to_builtins(self.options())
        return " ".join([*words, *(f"[{name}={_format_value(x)}]" for name, x in defaults.items())])


@dataclasses.dataclass(frozen=True)
class RecipeStep:
    """A parsed line of a recipe. argument: "" if there is none."""

    step: StepSpec
    argument: str
    options: Any

    def __str__(self) -> str:
        """The line in canonical form: without defaults, options in the order of their fields."""
        plain, values = msgspec.to_builtins(self.step.options()), msgspec.to_builtins(self.options)
        options = [
            f"{n}={_format_value(value)}" for n, value in values.items() if value != plain[n]
        ]
        return " ".join(filter(None, [self.step.name, self.argument, *options]))


Recipe = tuple[RecipeStep, ...]


def read_recipe(path: Path, table: Sequence[StepSpec]) -> Recipe:
    """Read a recipe from a file: one step a line, `#` starts a comment. See `parse_lines`."""
    return parse_lines(split_lines(read_text(path)), table, str(path))


def parse_lines(
    lines: Iterable[str], table: Sequence[StepSpec], where: str = "the recipe"
) -> Recipe:
    """Parse the lines of a recipe; skips blank lines and comments.

    Raises ConfigError if there is no step, and for a line with a syntax error, an unknown method,
    or an invalid argument or option.
    """
    read = []
    for number, text in enumerate(lines, 1):
        if text := re.sub(r"(^|\s)#.*", "", text).strip():
            read.append(parse_line(text, table, f"{where}, line {number}"))
    if not read:
        raise ConfigError(f"{where} has no step: expected lines such as {table[0].usage!r}")
    return tuple(read)


def parse_line(text: str, table: Sequence[StepSpec], where: str = "the step") -> RecipeStep:
    """Parse one line. Raises ConfigError as `parse_lines` does."""
    verb, colon, rest = text.partition(":")
    words = rest.split()
    if not colon or not words:
        raise ConfigError(
            f"{where}: got {text!r:.80}, expected 'verb: method [argument] [option=x]'"
        )
    step = _find_method(verb.strip(), words[0], table, where)
    words = words[1:] if step.method else words
    named = [word for word in words if re.match(r"\w+=", word)]
    plain = [word for word in words if word not in named]
    if len(plain) != (0 if step.argument is None else 1):
        raise ConfigError(f"{where}: got {text!r:.80}, expected {step.usage!r}")
    try:
        if step.argument is not None:
            step.argument.check(plain[0])
        options = _options(step, named)
    except ConfigError as error:
        raise ConfigError(f"{where}: {step.name}: {error}") from None
    return RecipeStep(step, plain[0] if plain else "", options)


def check_recipe(recipe: Recipe, config: ModelConfig, *, has_calibration: bool) -> None:
    """Check, before any work, that each step applies to a model.

    has_calibration: whether there is calibration data. Raises ConfigError for a rule that matches
    no matrix, a step that needs calibration data if there is none, and what a step's `check`
    raises.
    """
    shapes = shapes_by_path(models.param_shapes(models.build(config)))
    for line in recipe:
        if line.step.needs_calibration and not has_calibration:
            raise ConfigError(f"{str(line)!r} needs calibration data: pass --text or --samples")
        check_step(line, shapes)


def check_step(line: RecipeStep, shapes: Shapes) -> None:
    """Raise ConfigError for a step that does not apply to parameters of these shapes."""
    if isinstance(line.options, RuleOptions):
        paths = match_paths(shapes, line.options.on, str(line))
        stacks = [path for path in paths if len(shapes[path]) > 2]
        if stacks and not line.step.supports_experts:
            raise ConfigError(
                f"{str(line)!r} does not support experts, whose inputs differ: got {stacks[0]}."
                r" Exclude experts, for example with on=.*self_attn.*, or use 'quantize: gptq' or"
                " 'quantize: rtn'"
            )
    if line.step.check is not None:
        try:
            line.step.check(shapes, line.argument, line.options)
        except ConfigError as error:
            raise ConfigError(f"{str(line)!r}: {error}") from None


def shapes_by_path(params: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by path."""
    return {path: tuple(leaf.shape) for path, leaf in flatten(params)}


def check_repeats(recipe: Recipe, applied: Sequence[str]) -> None:
    """Raise ConfigError for a step that was applied before, or is in the recipe twice.

    applied: the lines of the model's own recipe.
    """
    lines = [str(line) for line in recipe]
    for number, line in enumerate(lines):
        if line in applied:
            raise ConfigError(f"{line!r} was already applied to this model: --again repeats it")
        if line in lines[:number]:
            raise ConfigError(f"{line!r} is in the recipe twice: --again applies it twice")


def match_paths(shapes: Shapes, rule: str, where: str) -> list[str]:
    """Return the paths of the matrices that match a rule. Raises ConfigError if none does."""
    matrices = [p for p, shape in shapes.items() if len(shape) >= 2 and not is_convolution(shape)]
    paths = [path for path in matrices if first_match([(rule, True)], path)]
    if not paths:
        raise ConfigError(
            f"{where}: on={rule} matches no matrix of this model; one of them is {matrices[-1]}"
        )
    return paths


def _find_method(verb: str, method: str, table: Sequence[StepSpec], where: str) -> StepSpec:
    methods = {step.method: step for step in table if step.verb == verb}
    if not methods:
        verbs = list(dict.fromkeys(step.verb for step in table))
        raise ConfigError(
            f"{where}: unknown verb {verb!r:.40}{suggest_name(verb, verbs)}; expected one of"
            f" {', '.join(verbs)}"
        )
    if "" in methods:
        return methods[""]
    if method not in methods:
        raise ConfigError(
            f"{where}: {verb} has no method {method!r:.40}{suggest_name(method, methods)};"
            " expected one"
            f" of {', '.join(methods)}"
        )
    return methods[method]


def _options(step: StepSpec, words: Sequence[str]) -> Any:
    """Parse a line's options. Raises ConfigError for an unknown, repeated or invalid option."""
    fields = {field.name: field for field in msgspec.structs.fields(step.options)}
    given: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in fields:
            known = f"it has {', '.join(fields)}" if fields else "it has none"
            raise ConfigError(f"no option {name!r:.40}{suggest_name(name, fields)} ({known})")
        if name in given:
            raise ConfigError(f"{name} is given twice")
        given[name] = value
    try:
        read = msgspec.convert(given, step.options, strict=False)
    except msgspec.ValidationError as problem:
        message, _, at = str(problem).partition(" - at `$.")
        name = at.rstrip("`")
        raise ConfigError(
            f"{name} {_explain_type(message)}, got {given.get(name, '')!r:.40}"
        ) from None
    for name, value in msgspec.to_builtins(read).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} must be a number, got {given[name]!r:.40}")
    if isinstance(read, RuleOptions):
        compile_pattern(read.on, "on")
    return read


def _explain_type(message: str) -> str:
    """Rewrite msgspec's message about a value without type names."""
    words = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    match = re.match(r"Expected `(\w+)[^`]*`(.*?)(, got .*)?$", message)
    return (
        f"must be {words.get(match[1], match[1])}{match[2]}" if match else message.replace("`", "")
    )


def _format_value(value: Any) -> str:
    """Format an option's value as in a line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_integer_format(name: str) -> IntFormat:
    """Parse an integer format. Raises ConfigError for any other."""
    parsed = parse_format(name)
    if not (isinstance(parsed, IntFormat) and parsed.is_plain):
        raise ConfigError(f"{name} is not an integer format such as int8, int4-g64 or int3-g128-zp")
    return parsed


def _check_quantized(text: str) -> None:
    if parse_format(text).name in DTYPES:
        raise ConfigError(f"{text} does not quantize: use 'store: {text}'")


# Arguments of methods.
FORMAT = Argument("FORMAT", parse_format)
QUANTIZED = Argument("FORMAT", _check_quantized)
INTEGER_FORMAT = Argument("FORMAT", parse_integer_format)
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]  # type of an option
