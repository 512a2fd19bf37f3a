"""Options that several commands share, and the functions that parse them."""

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from jaxllm.cli.console import log, spinner
from jaxllm.errors import CheckpointError, ConfigError, SamplingError
from jaxllm.generation.option_table import overflow_names
from jaxllm.runtime import multihost, signals
from jaxllm.runtime.device_memory import describe_memory

if TYPE_CHECKING:
    from jaxllm.config.attention_kind import AttentionKind
    from jaxllm.generation.options import Call
    from jaxllm.lm import LM
    from jaxllm.weights.precision import Precision


V = TypeVar("V", int, float)


def parse_dtype(name: str | None) -> str | None:
    """Return a dtype by its full name. Raises ConfigError for an unknown name."""
    from jaxllm.runtime.validation import check_dtype

    return None if name is None else check_dtype("a dtype", name)


def parse_cache_dtype(name: str | None) -> str | None:
    """Return the dtype of cached keys and values: as `parse_dtype`, or int8."""
    return name if name == "int8" else parse_dtype(name)


def check_paths(values: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a command's model or adapter is neither a file nor a directory.

    A Hugging Face repository (`hf:`) is not checked: that would download it.
    """
    from jaxllm.checkpoints.resolve import resolve_path

    for model in values.get("models") or filter(None, [values.get("model")]):
        if model.startswith("hf:"):
            continue
        try:
            resolve_path(model)
        except CheckpointError as error:
            unread = "prompt" in values and not values["prompt"]
            hint = " Give a prompt after the model, or with -p." if unread else ""
            raise CheckpointError(f"{error}{hint}") from None
    adapters = values.get("adapter") or []
    for item in adapters if isinstance(adapters, list) else [adapters]:  # DIR or NAME=DIR
        path = str(item).partition("=")[2] or str(item)
        if not os.path.exists(path):
            raise CheckpointError(f"--adapter: {path} does not exist")


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Checkpoint directory, GGUF file, demo (demo:llama, demo:gpt2) or hf:owner/name.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        callback=parse_dtype,
        help="Dtype: float32, bfloat16 or float16 [default: the checkpoint's].",
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="Weight format: int8, int4, int4-g32, bf16-packed, ... as for jaxllm quantize."
    ),
]
PrecisionFile = Annotated[
    Path | None,
    typer.Option("--precision", help="JSON file of formats by module path (docs/quantization.md)."),
]
CacheDtype = Annotated[
    str | None,
    typer.Option(
        callback=parse_cache_dtype,
        help="Dtype of cached keys and values: as --dtype, or int8 [default: as the activations].",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Text to stop before, taken literally ($'\\n' is a line break); repeatable."),
]
Steer = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE[:STRENGTH]",
        help="Steering vector to add, GGUF or safetensors, with its strength [default: 1];"
        " repeatable.",
    ),
]


class _OverflowNames(str):
    """What --help shows as an option's value. Only then the names of other packages are read."""

    def __format__(self, spec: str) -> str:
        return "|".join(overflow_names())


Overflow = Annotated[
    str | None,
    typer.Option(
        metavar=_OverflowNames("NAME"), help="Policy for a full context [default: refuse]."
    ),
]


def check_folder(out: Path) -> Path:
    """Return an output path. Raises CheckpointError if its parent folder does not exist."""

    def complaint() -> str:
        exists = os.path.isdir(out.parent)
        return "" if exists else f"cannot write {out}: no such folder: {out.parent}"

    if said := multihost.broadcast_from_zero(complaint):
        raise CheckpointError(said)
    return out


def check_new(last_file: str, what: str) -> Callable[[Path], Path]:
    """Return a check of an output folder: that it can be written, and does not hold `what`."""

    def check(out: Path) -> Path:
        from jaxllm.files import check_vacant

        check_vacant(check_folder(out), last_file, what)
        return out

    return check


def _check_file(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Check before the work that an option's file can be written.

    In a group of processes the first one checks and all raise.
    """
    if path is None:
        return None
    option = max(param.opts, key=len)

    def complain() -> str:
        if not path.parent.is_dir():
            return f"{path.parent} is not a directory"
        if path.is_dir():
            return "a directory has this name; name another file"
        writable = os.access(path if path.exists() else path.parent, os.W_OK)
        return "" if writable else "no write permission"

    if complaint := multihost.broadcast_from_zero(complain):
        raise CheckpointError(f"{option} {path}: {complaint}")
    return path


def _check_plot(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Check before the work that a plot can be drawn and written."""
    if path is not None:
        from jaxllm.files.plots import check_plot

        check_plot(max(param.opts, key=len))
    return _check_file(param, path)


Out = Annotated[
    Path, typer.Argument(metavar="OUT", callback=check_folder, help="Directory to write.")
]
NewModel = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", callback=check_new("config.json", "a checkpoint"), help="Directory to write."
    ),
]
NewFile = Annotated[Path | None, typer.Option(callback=_check_file)]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", callback=_check_plot)]
BatchSize = Annotated[int, typer.Option("--batch-size", "--batch", min=1)]
Attention = Annotated[
    str | None,
    typer.Option(
        metavar="KIND:NAME=VALUE,...",
        help="Another kind of attention, which a package adds, and its settings"
        " (docs/long_context.md).",
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="AXES",
        help="Device mesh, for example data=2,tensor=4: data shards rows; tensor shards heads, MLPs"
        " and vocabulary. JAX_NUM_CPU_DEVICES=8 in the environment simulates eight CPU devices.",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact", help="With --mesh: the exact sums of one device, for twice the communication."
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Fail on unknown settings of a checkpoint.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def parse_attention(text: str) -> "AttentionKind":
    """Parse --attention: KIND:NAME=VALUE,... with values in JSON. Raises ConfigError."""
    from jaxllm.config.attention_kind import AttentionKind

    kind, _, settings = text.partition(":")
    fields: dict[str, Any] = {"kind": kind}
    for item in re.split(r",(?=\w+=)", settings) if settings else ():
        name, _, value = item.partition("=")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return AttentionKind.from_json(fields)


def load_model(
    model: str,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    *,
    quantize: str | None = None,
    precision: Path | None = None,
    int8_inputs: bool = False,
    invariant: bool = False,
    adapters: list[str] | None = None,
    attention: str | None = None,
    mesh: str | None = None,
    exact: bool = False,
    fsdp: bool = False,
    strict: bool = False,
    reuse_compiled: bool = True,
    show_progress: bool | None = None,
) -> "LM":
    """Load a model with the given options; the checkpoint decides what is None.

    Args:
        adapters: adapter paths, each optionally as NAME=DIR.
        attention: a kind of attention, parsed by `parse_attention`.
        mesh, exact, fsdp, strict: as in `load`.
        reuse_compiled: use programs that an earlier process compiled.
        show_progress: None shows progress if stderr is a terminal.
    """
    table = None if precision is None else read_json_option("--precision", precision)
    # Importing JAX takes seconds; downloads and weight loading show their own progress bars.
    quiet = show_progress is False or model.startswith("hf:")
    with spinner(None if quiet else f"loading {model}"):
        if reuse_compiled:
            from jaxllm.ops.compile_cache import enable_compile_cache, load_first_programs

            enable_compile_cache()
            load_first_programs((model, sys.argv[:2]))  # while our modules are imported
        from jaxllm.convert.registry import open_checkpoint
        from jaxllm.lm import load
        from jaxllm.sharding.mesh_spec import parse_mesh
        from jaxllm.weights.precision import freeze_rules

        if quantize is not None:
            freeze_rules(quantize)
        if mesh is not None:
            parse_mesh(mesh)
        opened = open_checkpoint(model, strict=strict)
        chosen = opened.precision
        if dtype is not None:
            chosen = chosen.with_dtype(dtype)
        if table is not None:
            chosen = override_precision(chosen, table, f"--precision {precision}")
        if cache_dtype is not None:
            chosen = dataclasses.replace(chosen, cache=cache_dtype)
        if attention is not None:
            config = opened.config.with_attention(parse_attention(attention))
            opened = dataclasses.replace(opened, config=config)
    lm = load(
        opened,
        dtype=chosen,
        quantize=quantize,
        int8_inputs=int8_inputs,
        invariant=invariant,
        adapters=_parse_adapters(adapters or []),
        mesh=mesh,
        exact=exact,
        fsdp=fsdp,
        show_progress=show_progress,
    )
    signals.end_start()
    seen = sys.stderr.isatty() if show_progress is None else show_progress
    if seen and (memory := describe_memory()) is not None:
        log(memory)
    return lm


def _parse_adapters(values: list[str]) -> dict[str, Path] | list[Path]:
    """Return adapter paths for `load`: a list, or a dict if at least one has a name."""
    pairs = [item.partition("=") for item in values]
    if not any(equals for _, equals, _ in pairs):
        return [Path(item) for item in values]
    named: dict[str, Path] = {}
    for name, equals, directory in pairs:
        path = Path(directory if equals else name)
        name = name if equals else path.resolve().name.removesuffix(".gguf")
        if name in named:
            raise ConfigError(
                f"--adapter: two adapters are named {name!r:.60}; rename one: NAME=DIR"
            )
        named[name] = path
    return named


def read_steering(values: list[str] | None) -> dict[int, Any]:
    """Return the sum of the vectors of --steer, by layer. Raises CheckpointError for bad files."""
    if not values:
        return {}
    with spinner("starting"):  # JAX is imported
        from jaxllm.inside.steering import combine_directions, read_directions
    parts = []
    for value in values:
        given = re.fullmatch(r"(.+):([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)", value)
        file, strength = given.groups() if given else (value, "1")
        parts.append((read_directions(file), float(strength)))
    return combine_directions(parts)


def steering_options(directions: dict[int, Any], lm: "LM") -> dict[str, Any]:
    """Return the option `edits` that adds a vector; none without one."""
    if not directions:
        return {}
    from jaxllm.inside.steering import check_fits_model, steering_edits

    check_fits_model(directions, lm.config, "the vector of --steer")
    return {"edits": steering_edits(directions)}


def read_json_option(option: str, file: Path) -> Any:
    """Return the content of an option's JSON file. Raises ConfigError if it cannot be read."""
    from jaxllm.files import parse_json

    text = read_text_option(option, file)
    try:
        return parse_json(text, str(file), ConfigError)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def read_text_option(option: str, file: Path) -> str:
    """Return the content of an option's text file. Raises ConfigError if it cannot be read."""
    from jaxllm.files import read_text

    try:
        return read_text(file)
    except CheckpointError as error:
        raise ConfigError(f"{option}: {error}") from None


def with_chat_template(lm: "LM", file: Path | None) -> "LM":
    """Return a model with the chat template of a file, if one is given."""
    from jaxllm.convert.registry import read_chat_template

    if file is None:
        return lm
    return dataclasses.replace(lm, chat_template=read_chat_template(file, lm.path))


def override_precision(base: "Precision", data: Any, where: str) -> "Precision":
    """Return `base` with a table applied: an object of `Precision` fields, or only its overrides.

    Overrides are rows `[regex over module paths, {"weights": ..., "activations": ..., "output":
    ...}]`; the first match wins. Raises ConfigError for any other data.
    """
    from jaxllm.weights.precision import Precision

    if isinstance(data, list):
        data = {"overrides": data}
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must be an object or a list of rows: got {data!r:.40}")
    return Precision.from_dict({**dataclasses.asdict(base), **data}, where)


def parts_dir(target: Path) -> Path:
    """Return the directory of the finished work of a run: OUT.parts, next to the result."""
    result = Path(os.path.realpath(target))
    return result.with_name(f"{result.name}.parts")


def check_choice(option: str, value: str, names: Iterable[str]) -> None:
    """Raise ConfigError for a value that is none of these names; call it before a model opens."""
    if value not in names:
        raise ConfigError(f"{option} must be one of {', '.join(names)}, got {value!r:.60}")


def check_exclusive(given: Mapping[str, object]) -> None:
    """Raise ConfigError if more than one option has a value; call it before a model opens."""
    names = [name for name, value in given.items() if value not in (None, False)]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} cannot be combined: leave one out")


def split_commas(text: str) -> list[str]:
    """Return the parts of a comma-separated text, without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def split_numbers(
    option: str, text: str, kind: Callable[[str], V] = int, *, least: int = 1
) -> list[V]:
    """Return comma-separated numbers. Raises ConfigError for fewer, or any other text."""
    with contextlib.suppress(ValueError):
        numbers = [kind(part) for part in split_commas(text)]
        if len(numbers) >= least:
            return numbers
    raise ConfigError(f"{option} must be numbers separated by commas, got {text!r:.60}")


def read_options(
    extra: list[str] | None, kind: "Call" = "generate", **flags: Any
) -> dict[str, Any]:
    """Return the given options of `LM.generate`, checked. top-k, top-p and min-p imply sampling.

    Args:
        kind: the method that they are for.

    Raises SamplingError for values that no model accepts.
    """
    options = {name: value for name, value in flags.items() if value not in (None, [])}
    options |= read_extra_options(extra)
    if options.keys() & {"top_k", "top_p", "min_p"}:
        options.setdefault("do_sample", True)
    with spinner("starting"):  # JAX is imported
        from jaxllm.generation.options import check_options
    check_options(options, kind)
    return options


def read_extra_options(extra: list[str] | None, source: str = "--option") -> dict[str, Any]:
    """Parse NAME=VALUE options, without checking them. Raises SamplingError for any other form.

    Args:
        source: the option or command they come from, for messages.
    """
    options = {}
    for item in extra or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise SamplingError(f"{source} must be NAME=VALUE: got {item!r:.80}")
        name = name.replace("-", "_")
        options["stop_strings" if name == "stop" else name] = _parse_value(
            f"{source} {name}", value
        )
    return options


def _parse_value(where: str, text: str) -> Any:
    """Parse an option's JSON value; what does not start like JSON is an unquoted string."""
    from jaxllm.files import parse_json

    try:
        return parse_json(text, where, SamplingError)
    except SamplingError:
        if re.match(r'[\[{"]|-?\d+$', text):
            raise
        return text
