"""From a checkpoint's files to a language model: which, in what precision, and where to."""

import dataclasses
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxllm import checkpoint, distributed, programs
from jaxllm.adapters.load import Adapters, with_directories
from jaxllm.api import LM
from jaxllm.errors import ConfigError, UnreadWarning
from jaxllm.forms import open_path, read_texts
from jaxllm.located import resolve
from jaxllm.mesh import Axes, placed
from jaxllm.models import FAMILIES
from jaxllm.settings import UNSUPPORTED
from jaxllm.weights.copies import check_same
from jaxllm.weights.paths import Place, flatten, map_leaves
from jaxllm.weights.precision import Precision, freeze
from jaxllm.weights.quantize import Rules
from jaxllm.weights.reading import Elsewhere
from jaxllm.whole import Dtype


def load(
    path: str | Path | checkpoint.Checkpoint,
    *,
    dtype: Dtype | Precision | None = None,
    quantize: Rules | None = None,
    adapters: Adapters = (),
    place: Place | None = None,
    mesh: str | Axes | None = None,
    exact: bool = False,
    fsdp: bool = False,
    strict: bool = False,
    keep_programs: bool | str | Path = False,
    show_progress: bool | None = None,
) -> LM:
    """Load a language model from a Hugging Face directory, a GGUF file, or jaxllm's own form.

    FAMILIES

    Args:
        path: a directory, or a GGUF file (any part of a split one); "demo:llama", "demo:gpt2" and
            so on for the checkpoints that jaxllm brings; "hf:owner/name" or
            "hf:owner/name/file.gguf", which is downloaded; or the result of `open_checkpoint`.
        dtype: of weights, activations and cache: a name ("bfloat16", "bf16"), a dtype of NumPy,
            JAX or PyTorch, or a `Precision`. The default is the checkpoint's.
        quantize: a format ("int8", "int4", "bf16-packed", ...) or ordered rules, as
            `jaxllm.quantize` takes them, applied to each tensor while loading.
        adapters: PEFT directories (LoRA, DoRA) or GGUF files: one, a list, or `{name: directory}`
            with the names that `generate` takes. The first is used by default.
        place: a function of an array's path and the array that returns its device or sharding, or
            None for the default.
        mesh: the devices that share the model, as "data=2,tensor=4" (`jaxllm.mesh`), instead of
            `place`.
        exact: with `mesh`, compute the same bits as one device, at twice the communication.
        fsdp: with `mesh`, also shard each matrix over `data`, for training.
        strict: refuse fields of config.json, or keys of a GGUF file, that nothing here reads,
            instead of a warning.
        keep_programs: keep what this process compiles from now on, so that the next one starts
            sooner, as commands do: True in this user's caches, or a folder
            (`jaxllm.programs.keep_programs`).
        show_progress: by default, whether stderr is a terminal.

    Raises:
        CheckpointError: with all that is wrong with the files.
        ConfigError: for arguments or a configuration that cannot be used.
    """
    if keep_programs is not False:
        programs.keep_programs(None if keep_programs is True else keep_programs)
    if isinstance(path, checkpoint.Checkpoint):
        opened = path
    else:
        opened = open_checkpoint(path, strict=strict)
    precision = dtype if isinstance(dtype, Precision) else opened.precision
    if dtype is not None and not isinstance(dtype, Precision):
        precision = precision.in_dtype(dtype)
    if quantize is not None:
        precision = dataclasses.replace(precision, quantize=freeze(quantize))
    for name, neutral in UNSUPPORTED.items():
        if opened.generation.get(name, neutral) not in (neutral, None):
            warnings.warn(f"generation_config.json: {name} is not supported yet", stacklevel=2)
    distributed.agree(_identity(opened, precision, quantize, mesh, exact, fsdp))
    check_same(opened.tensors, opened.directory, show_progress)
    model, into = placed(opened.config, precision, place, mesh, exact, fsdp)
    with ThreadPoolExecutor(1) as beside:  # a large tokenizer takes as long as looking for NaN
        reading = beside.submit(read_texts, opened)
        params = checkpoint.load_params(opened, precision, into=into, show_progress=show_progress)
    texts = reading.result()
    if adapters and any(isinstance(leaf, Elsewhere) for _, leaf in flatten(params)):
        raise ConfigError(
            "an adapter stands beside all layers, and these processes have stages of them: merge it"
            " into the weights first (jaxllm merge), or use a mesh with stage=1"
        )
    params, names = with_directories(opened.config, params, adapters)
    if into is not None and names:
        params = map_leaves(into.beside, params)
    if into is not None:
        params = into.finished(params)
    return LM(
        config=opened.config,
        model=model,
        params=params,
        tokenizer=texts.tokenizer,
        generation=opened.generation,
        path=opened.directory,
        chat_template=texts.chat_template,
        recipe=opened.recipe,
        adapters=names,
        adapter=next(iter(names), None),
    )


load.__doc__ = str(load.__doc__).replace(
    "FAMILIES",
    textwrap.fill(
        f"Families (config.json's `model_type`): {', '.join(sorted(FAMILIES))}.",
        width=92,
        subsequent_indent="    ",
    ),
)


def _identity(opened: checkpoint.Checkpoint, *asked: Any) -> dict[str, str]:
    """What says of a checkpoint and of how it is to be read whether another process has the same,
    but for its numbers.
    """
    if not distributed.several():
        return {}
    kept = opened.generation, opened.precision, opened.formats, opened.form
    named = [(n, t.shape, str(t.dtype)) for n, t in sorted(opened.tensors.items())]
    return {
        "model's configuration": repr(opened.config),
        "model's precision and settings": repr((kept, asked)),
        "weights' names, shapes and formats": repr(named),
    }


def open_checkpoint(path: str | Path, *, strict: bool = False) -> checkpoint.Checkpoint:
    """Open a checkpoint in any form, and check all but its numbers; arguments as for `load`.

    Warns with UnreadWarning, once, of settings that nothing here reads.
    """
    opened = open_path(resolve(path), strict=strict)
    warn_unread(opened)
    return opened


def warn_unread(opened: checkpoint.Checkpoint) -> None:
    """Warn, in one line, of the settings that nothing here reads."""
    if opened.ignored:
        warnings.warn(
            f"{opened.directory}: ignored, since nothing here reads them:"
            f" {', '.join(opened.ignored)}",
            UnreadWarning,
            stacklevel=3,
        )
