"""Groups of options that commands share: dataclasses whose fields are flags."""

import dataclasses
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.cli.eval_data import Corpus, Text, make_loader, read_corpus
from jaxllm.cli.options import (
    Attention,
    CacheDtype,
    Dtype,
    Exact,
    Mesh,
    PrecisionFile,
    Quantize,
    Strict,
    load_model,
    parse_dtype,
    read_json_option,
    read_text_option,
)
from jaxllm.errors import SamplingError
from jaxllm.generation.option_table import OPTIONS
from jaxllm.runtime import multihost

if TYPE_CHECKING:
    from jaxllm.evaluate.likelihood.data import Loader
    from jaxllm.lm import LM


def draw_seed() -> int:
    """Return a random seed, the same in all processes of a group."""
    return int(multihost.broadcast_from_zero(lambda: str(secrets.randbelow(1 << 32))))


# Options of `LM.generate` that have flags, with their spellings; grammars are files.
_FILES = ("json_schema", "lark", "gbnf")
_FLAGS = {
    "max_new_tokens": "--max-new-tokens -n",
    "temperature": "--temperature --temp -t",
    **dict.fromkeys(("top_k", "top_p", "min_p", "repetition_penalty", "regex", "choice"), ""),
    **dict.fromkeys(_FILES, ""),
}
_METAVARS = {"regex": "REGEX", "choice": "A,B,...", **dict.fromkeys(_FILES, "FILE")}


def _add_flags(cls: type) -> type:
    """Add the fields of `_FLAGS`; their help is what the options do."""
    hints: dict[str, Any] = {}
    for name, spellings in _FLAGS.items():
        row = OPTIONS[name]
        kind = int if row.whole else Path if name in _FILES else str if row.expected else float
        text = row.effect[0].upper() + row.effect[1:].rstrip(".")
        text += f" ({row.remark})" * bool(row.remark)
        option = typer.Option(*spellings.split(), metavar=_METAVARS.get(name), help=f"{text}.")
        hints[name] = Annotated[kind | None, option]
        setattr(cls, name, None)
    cls.__annotations__ = hints | cls.__annotations__
    return cls


@dataclasses.dataclass(frozen=True, kw_only=True)
@_add_flags
class SamplingOptions:
    """Options of text generation.

    Attributes:
        more: Any other option of LM.generate, with a JSON value: -o min_p=0.05 -o num_beams=4
        seed: Random seed [default: random for generate and chat, which print it; 0 for batch].
    """

    more: Annotated[list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE")] = None
    seed: Annotated[str | None, typer.Option(metavar="N|random")] = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of `LM.generate` by name, without the seed; grammars are read from files."""
        named = {name: getattr(self, name) for name in _FLAGS}
        for name, value in named.items():
            if isinstance(value, Path):
                named[name] = read_text_option(f"--{name.replace('_', '-')}", value)
        return named

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
    """The same for comparisons with a reference, which run in float32 by default.

    Attributes:
        dtype: Dtype: float32, bfloat16 or float16.
    """

    dtype: Annotated[str, typer.Option(callback=parse_dtype)] = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterOptions(WeightOptions):
    """Options of weight loading, with adapters.

    Attributes:
        adapter: Adapter to load with the model: a PEFT directory (LoRA, DoRA) or a GGUF file.
            Repeatable; -o adapter=NAME selects one [default: the first].
    """

    adapter: Annotated[list[str] | None, typer.Option("--adapter", metavar="[NAME=]DIR")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadingOptions(AdapterOptions):
    """Options of model loading: formats, mesh, adapters, cache.

    Attributes:
        int8_inputs: Round the inputs of integer weights to int8: faster, not exact.
        invariant: A text's bits do not depend on what else runs (docs/same_bits.md).
    """

    int8_inputs: bool = False
    invariant: bool = False
    cache_dtype: CacheDtype = None
    attention: Attention = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalTextOptions:
    """Options of an evaluation text and its windows.

    Attributes:
        documents: JSON lines with "text" (joined by blank lines) or "tokens" (ids, concatenated).
        window: Tokens per window [default: 512, or fewer if the context or the text is shorter].
        stride: Tokens from one window to the next [default: the window, no overlap].
        batch: Windows per batch [default: as many as 256 MB allow].
    """

    text: Text = None
    documents: Path | None = None
    window: int | None = None
    stride: int | None = None
    batch: Annotated[int | None, typer.Option("--batch-size", "--batch")] = None

    def read(self, separate: bool = False) -> Corpus:
        """Call `eval_data.read_corpus` with these options."""
        return read_corpus(self.text, self.documents, separate)

    def make_loader(
        self, lm: "LM", corpus: Corpus, **kwargs: Any
    ) -> "tuple[Loader, dict[str, Any]]":
        """Call `eval_data.make_loader` with these options and `kwargs`."""
        return make_loader(
            lm, corpus, window=self.window, stride=self.stride, batch=self.batch, **kwargs
        )
