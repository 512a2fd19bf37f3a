"""Groups of options that commands share: dataclasses whose fields are flags."""

import dataclasses
import functools
import inspect
import re
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_type_hints

from jaxllm.cli.eval_data import (
    BatchSize,
    Corpus,
    Documents,
    Stride,
    Text,
    Window,
    make_loader,
    read_corpus,
)
from jaxllm.cli.options import (
    Adapters,
    CacheDtype,
    Dtype,
    Exact,
    ExtraOptions,
    FullDtype,
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
    from jaxllm.evaluate.likelihood.data import Loader
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
class WeightOptions:
    """Options of weight loading: formats, mesh."""

    dtype: Dtype = None
    quantize: Quantize = None
    precision: PrecisionFile = None
    mesh: Mesh = None
    exact: Exact = False
    strict: Strict = False

    def load(self, model: str, **kwargs: Any) -> "LM":
        """Call `options.load_model` with these options and `kwargs`."""
        options = dict(vars(self))
        return load_model(model, adapters=options.pop("adapter", None), **options, **kwargs)

    def facts(self) -> dict[str, Any]:
        """Return the options as JSON values, with the content of the --precision file."""
        file = self.precision
        table = None if file is None else read_json_option("--precision", file)
        return {**vars(self), "precision": table}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceWeightOptions(WeightOptions):
    """The same for comparisons with a reference, which run in float32 by default."""

    dtype: FullDtype = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterOptions(WeightOptions):
    """Options of weight loading, with adapters."""

    adapter: Adapters = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadingOptions(AdapterOptions):
    """Options of model loading: formats, mesh, adapters, cache."""

    cache_dtype: CacheDtype = None
    self_extend: SelfExtend = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalTextOptions:
    """Options of an evaluation text and its windows."""

    text: Text = None
    documents: Documents = None
    window: Window = None
    stride: Stride = None
    batch: BatchSize = None

    def read(self, separate: bool = False) -> Corpus:
        """Call `eval_data.read_corpus` with these options."""
        return read_corpus(self.text, self.documents, separate)

    def make_loader(
        self, lm: "LM", corpus: Corpus, **kwargs: Any
    ) -> "tuple[Loader, dict[str, Any]]":
        """Call `eval_data.make_loader` with these options and `kwargs`."""
        windows: dict[str, Any] = {
            "window": self.window,
            "stride": self.stride,
            "batch": self.batch,
        }
        return make_loader(lm, corpus, **windows, **kwargs)


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command: each parameter of a dataclass type becomes that dataclass's fields as flags.

    The flags stand in place of the parameter, in the order of the fields.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    groups = {p.name: hints[p.name] for p in parameters if dataclasses.is_dataclass(hints[p.name])}

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
        options = {}
        for name, kind in groups.items():
            names = [field.name for field in dataclasses.fields(kind) if field.name in kwargs]
            options[name] = kind(**{field: kwargs.pop(field) for field in names})
        function(*args, **kwargs, **options)

    spliced = [
        part
        for p in parameters
        for part in (
            flags(groups[p.name])
            if p.name in groups
            else [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY)]
        )
    ]
    command.__signature__ = inspect.Signature(spliced)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in spliced}
    return command
