"""Groups of options that commands share: dataclasses whose fields are flags."""

import dataclasses
import functools
import inspect
import re
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_type_hints

from jaxllm.cli.options import (
    Adapters,
    CacheDtype,
    Dtype,
    Exact,
    ExtraOptions,
    Mesh,
    MinP,
    NewTokens,
    PrecisionFile,
    Quantize,
    RepetitionPenalty,
    Seed,
    SelfExtend,
    Strict,
    Temperature,
    TopK,
    TopP,
    load_model,
    read_json_option,
)
from jaxllm.errors import SamplingError
from jaxllm.runtime import multihost

if TYPE_CHECKING:
    from jaxllm.lm import LM


def draw_seed() -> int:
    """Return a random seed, the same in all processes of a group."""
    return int(multihost.broadcast_from_zero(lambda: str(secrets.randbelow(1 << 32))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of text generation."""

    max_new_tokens: NewTokens = None
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    more: ExtraOptions = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    seed: Seed = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of `LM.generate` by name, without the seed."""
        return {name: x for name, x in vars(self).items() if name not in ("more", "seed")}

    def parse_seed(self, default: int | str) -> int | str:
        """Return --seed as a number or "random"; `default` if it is not given.

        Raises SamplingError for any other text.
        """
        if self.seed is None or self.seed == "random":
            return default if self.seed is None else "random"
        if not re.fullmatch(r"[0-9]{1,20}", self.seed):
            raise SamplingError(
                f"--seed must be a whole number from 0 to 2**64 - 1 or random, got {self.seed!r}"
            )
        return int(self.seed)

    def draw_seed(self) -> int:
        """Return --seed, or a random seed, the same in all processes of a group."""
        seed = self.parse_seed("random")
        return draw_seed() if seed == "random" else int(seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """Options of model loading: formats, adapters, mesh."""

    dtype: Dtype = None
    cache_dtype: CacheDtype = None
    quantize: Quantize = None
    precision: PrecisionFile = None
    adapter: Adapters = None
    mesh: Mesh = None
    exact: Exact = False
    self_extend: SelfExtend = None
    strict: Strict = False

    def load(self, model: str, **kwargs: Any) -> "LM":
        """Call `options.load_model` with these options and `kwargs`."""
        given = {name: x for name, x in vars(self).items() if name != "adapter"}
        return load_model(model, adapters=self.adapter, **given, **kwargs)

    def facts(self) -> dict[str, Any]:
        """Return the options as JSON values, with the content of the --precision file."""
        file = self.precision
        table = None if file is None else read_json_option("--precision", file)
        return {**vars(self), "precision": table}


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command: each parameter of a dataclass type becomes that dataclass's fields as flags.

    The flags follow the command's other parameters, in the order of the fields.
    """
    hints = get_type_hints(function, include_extras=True)
    given = inspect.signature(function).parameters.values()
    sets = {p.name: hints[p.name] for p in given if dataclasses.is_dataclass(hints[p.name])}
    own = [p for p in given if p.name not in sets]

    def flags(kind: Any) -> list[inspect.Parameter]:
        types = get_type_hints(kind, include_extras=True)
        return [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty
                if field.default is dataclasses.MISSING
                else field.default,
                annotation=types[field.name],
            )
            for field in dataclasses.fields(kind)
        ]

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        made = {}
        for name, kind in sets.items():
            names = [field.name for field in dataclasses.fields(kind) if field.name in kwargs]
            made[name] = kind(**{field: kwargs.pop(field) for field in names})
        function(*args, **kwargs, **made)

    arguments = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in own]
    spliced = [*arguments, *(flag for kind in sets.values() for flag in flags(kind))]
    command.__signature__ = inspect.Signature(spliced)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in spliced}
    return command
