"""Options that several commands have, and what is made of them."""

import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm import distributed
from jaxllm.cli.console import waiting
from jaxllm.errors import CheckpointError, ConfigError, SamplingError

if TYPE_CHECKING:
    from jaxllm.api import LM
    from jaxllm.options import Kind
    from jaxllm.weights.precision import Precision


def dtype_named(name: str | None) -> str | None:
    """A format of numbers by its full name. Raises ConfigError for an unknown name."""
    from jaxllm.whole import dtype_name

    return None if name is None else dtype_name("a dtype", name)


def cache_dtype_named(name: str | None) -> str | None:
    """A format of keys and values: as `dtype_named`, or int8."""
    return name if name == "int8" else dtype_named(name)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A directory, a GGUF file, a demo (demo:llama, demo:gpt2) or hf:owner/name. Also as"
        " -m MODEL or --model MODEL.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        callback=dtype_named, help="float32, bfloat16 or float16; by default the checkpoint's."
    ),
]
FullDtype = Annotated[str, typer.Option(callback=dtype_named, help="float32, bfloat16 or float16.")]
Quantize = Annotated[
    str | None,
    typer.Option(help="Weights: int8, int4, int4-g32, bf16-packed, ... as in jaxllm quantize."),
]
PrecisionFile = Annotated[
    Path | None,
    typer.Option("--precision", help="A JSON table of formats by module path; see the README."),
]
NewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", "-n", help="Default: 256, or what fits.")
]
CacheDtype = Annotated[
    str | None,
    typer.Option(
        callback=cache_dtype_named,
        help="Of keys and values: as --dtype, or int8; by default as the activations.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "--temp",
        "-t",
        help="Sampling temperature [default: greedy, as with 0].",
    ),
]
TopK = Annotated[int | None, typer.Option(help="Sample among the k best tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the best tokens of mass p.")]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Sample among tokens of at least p times the best one's mass."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Divide the scores of tokens that are in the text by this; 1 is off."),
]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this text; may be given more than once.")
]
Overflow = Annotated[
    str | None,
    typer.Option(
        help="When the context is full: refuse, slide, sinks, heavy, pooled, pooled-by-use,"
        " segments."
    ),
]
More = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="Any other option of LM.generate, its value as JSON: -o min_p=0.05 -o num_beams=4",
    ),
]


def check_folder(out: Path) -> Path:
    """An output, if the folder it is to be in is there. Raises CheckpointError if it is not."""

    def complaint() -> str:
        there = os.path.isdir(out.parent)
        return "" if there else f"cannot write {out}: no such folder: {out.parent}"

    if said := distributed.told(complaint):
        raise CheckpointError(said)
    return out


Out = Annotated[
    Path, typer.Argument(metavar="OUT", callback=check_folder, help="The directory to write.")
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]DIR",
        help="An adapter beside the model: PEFT's directory (LoRA, DoRA), or a GGUF file. May be"
        " given more than once: the first is taken where none is named (-o adapter=NAME).",
    ),
]
SelfExtend = Annotated[
    str | None,
    typer.Option(
        metavar="G,W",
        callback=lambda text: text and ",".join(map(str, group_and_window(text))),
        help="Read longer texts without training (Self-Extend): tokens more than W away count by"
        " groups of G, as in 8,512.",
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="AXES",
        help="Spread the model over devices, as data=2,tensor=4: rows, and heads, MLPs and"
        " vocabulary. JAX_NUM_CPU_DEVICES=8 in the environment has a CPU pass for eight.",
    ),
]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="With --mesh: sum as one device does, and send twice as much."),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse settings of a checkpoint's files that nothing reads."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Seed = Annotated[
    str | None,
    typer.Option(
        metavar="N|random",
        help="Random seed [default: random for generate and chat, which print it; 0 for batch].",
    ),
]


def group_and_window(text: str) -> tuple[int, int]:
    """The two numbers of --self-extend. Raises ConfigError for what is no such pair."""
    numbers = re.fullmatch(r"\s*(\d{1,9})\s*,\s*(\d{1,9})\s*", text)
    if not numbers:
        raise ConfigError(
            "--self-extend takes the size of a group and the window of neighbours, as in 8,512;"
            f" got {text!r:.40}"
        )
    return int(numbers[1]), int(numbers[2])


def begin_reading(model: str, *changes: str | Path | None) -> None:
    """Begin with what can be done beside importing JAX: threads look through a directory's weights,
    if nothing asks for `changes` of what they are."""
    from jaxllm.weights.ahead import begin

    if changes.count(None) == len(changes):
        begin(model)


def load_model(
    model: str,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    *,
    quantize: str | None = None,
    precision: Path | None = None,
    int8_inputs: bool = False,
    adapters: list[str] | None = None,
    self_extend: str | None = None,
    mesh: str | None = None,
    exact: bool = False,
    fsdp: bool = False,
    strict: bool = False,
    reuse_compiled: bool = True,
    show_progress: bool | None = None,
) -> "LM":
    """The model in the formats that the options name; what is not named is the checkpoint's.

    adapters: directories beside it, each after its name and "=" where it is given one.
    self_extend: "G,W", as `group_and_window` reads it. mesh, exact, fsdp, strict: as `load` takes
    them. reuse_compiled: look first for programs that an earlier process compiled. show_progress:
    by default where stderr is a terminal.
    """
    table = None if precision is None else read_json_option("--precision", precision)
    # Importing JAX takes seconds; a download and reading weights have bars of their own.
    quiet = show_progress is False or model.startswith("hf:")
    with waiting(None if quiet else f"loading {model}"):
        from jaxllm.loading import load, open_checkpoint
        from jaxllm.programs import keep_programs

        if reuse_compiled:
            keep_programs()
        opened = open_checkpoint(model, strict=strict)
        chosen = opened.precision
        if dtype is not None:
            chosen = chosen.in_dtype(dtype)
        if table is not None:
            chosen = precision_over(chosen, table, f"--precision {precision}")
        if cache_dtype is not None:
            chosen = dataclasses.replace(chosen, cache=cache_dtype)
        if int8_inputs:
            chosen = dataclasses.replace(chosen, int8_inputs=True)
    if self_extend is not None:  # before the weights are read
        opened.config.self_extended(*group_and_window(self_extend))
    lm = load(
        opened,
        dtype=chosen,
        quantize=quantize,
        adapters=_adapters(adapters or []),
        mesh=mesh,
        exact=exact,
        fsdp=fsdp,
        show_progress=show_progress,
    )
    if self_extend is None:
        return lm
    group_size, neighbor_window = group_and_window(self_extend)
    return lm.self_extended(group_size=group_size, neighbor_window=neighbor_window)


def _adapters(given: list[str]) -> dict[str, Path] | list[Path]:
    """Directories, by name where all have one, as `load` takes them."""
    pairs = [item.partition("=") for item in given]
    if not any(equals for _, equals, _ in pairs):
        return [Path(item) for item in given]
    named: dict[str, Path] = {}
    for name, equals, directory in pairs:
        path = Path(directory if equals else name)
        name = name if equals else path.resolve().name.removesuffix(".gguf")
        if name in named:
            raise ConfigError(f"--adapter: two adapters are called {name!r:.60}; name one NAME=DIR")
        named[name] = path
    return named


def read_json_option(option: str, file: Path) -> Any:
    """What a JSON file that an option names says. Raises ConfigError for what is no JSON."""
    from jaxllm.files import parse_json, read_text

    try:
        return parse_json(read_text(file), str(file), ConfigError)
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"{option}: {error}") from None


def precision_over(base: "Precision", data: Any, where: str) -> "Precision":
    """A table over `base`: an object of `Precision`'s fields, or its overrides alone.

    Overrides are rows `[regex over module paths, {"weights": ..., "activations": ..., "output":
    ...}]`, the first that matches wins. Raises ConfigError for what is neither.
    """
    from jaxllm.weights.precision import Precision

    if isinstance(data, list):
        data = {"overrides": data}
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: an object or a list of rows, got {data!r:.40}")
    return Precision.from_dict({**dataclasses.asdict(base), **data}, where)


def check_writable(option: str, path: Path | None) -> None:
    """Find out before the work whether a file can be written there, so far as can be known; of a
    group of processes the first looks, and all are told.

    Raises:
      CheckpointError: its folder is not there or may not be written to, or it is a directory.
    """
    if path is not None:
        distributed.once(lambda: _check_writable(option, path))


def _check_writable(option: str, path: Path) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise CheckpointError(f"{option} {path}: {folder} is not a directory")
    if path.is_dir():
        raise CheckpointError(f"{option} {path} is a directory; name a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise CheckpointError(f"{option} {path}: may not be written to")


def read_options(more: list[str] | None, kind: "Kind" = "generate", **named: Any) -> dict[str, Any]:
    """Options of `LM.generate`: those given, checked. Naming top-k, top-p or min-p means to sample.

    kind: what they are for. Raises SamplingError for what no model would take.
    """
    options = {name: value for name, value in named.items() if value not in (None, [])}
    options |= read_more(more)
    if options.keys() & {"top_k", "top_p", "min_p"}:
        options.setdefault("do_sample", True)
    with waiting("starting"):  # JAX is imported
        from jaxllm.options import check_options
    check_options(options, kind)
    return options


def read_more(more: list[str] | None, source: str = "--option") -> dict[str, Any]:
    """Options that were given as NAME=VALUE, not checked. Raises SamplingError for another form.

    source: what gave them, for messages.
    """
    options = {}
    for item in more or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise SamplingError(f"{source} takes NAME=VALUE, got {item!r:.80}")
        name = name.replace("-", "_")
        options["stop_strings" if name == "stop" else name] = _value(f"{source} {name}", value)
    return options


def _value(where: str, text: str) -> Any:
    """What an option's JSON says; whatever does not begin as JSON is a text without its quotes."""
    from jaxllm.files import parse_json

    try:
        return parse_json(text, where, SamplingError)
    except SamplingError:
        if re.match(r'[\[{"]|-?\d+$', text):
            raise
        return text
