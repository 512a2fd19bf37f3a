"""Checkpoint locations: a path, a bundled demo, or a repository of the Hugging Face hub."""

import re
from os import PathLike
from pathlib import Path

from jaxllm.errors import CheckpointError, requires_extra
from jaxllm.files import path_exists
from jaxllm.text.formats import ADDITIONAL_TEMPLATES, TOKENIZER_FILES

DEMO_DIR = Path(__file__).parents[1] / "demo"
MAX_ERROR_CHARS = 240  # characters of a network error to show
_REPO = r"[\w.-]+/[\w.-]+"
_FILE = rf"(?P<repo>{_REPO})/(?P<file>.+\.gguf)"
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def resolve_path(path: str | Path) -> Path:
    """Return the directory or file that `path` of `load` names; download only for "hf:...".

    Raises CheckpointError if it does not exist.
    """
    if not isinstance(path, str | PathLike):
        raise CheckpointError(
            f"the checkpoint path must be a str or a Path, got {path!r:.60}. Give a directory, a"
            " GGUF file, demo:llama or hf:owner/name"
        )
    text = str(path)
    if path == "":
        raise CheckpointError(
            "the checkpoint path is empty. Give a directory, a GGUF file, a demo or hf:owner/name"
        )
    if text.startswith("demo:"):
        demos = {f"demo:{file.parent.name}": file.parent for file in DEMO_DIR.glob("*/config.json")}
        if text not in demos:
            raise CheckpointError(
                f"no demo {text!r:.60}: expected one of {', '.join(sorted(demos))}"
            )
        return demos[text]
    if text.startswith("hf:"):
        return _download(text[3:])
    if path_exists(local := Path(path)):
        return local
    named = not text.startswith(".") and (re.fullmatch(_REPO, text) or re.fullmatch(_FILE, text))
    hint = f" To download from the hub, write hf:{text}" if named else ""
    raise CheckpointError(f"{text:.200} is not a directory or file.{hint}")


def _download(text: str) -> Path:
    """Download a repository's safetensors files, or its Flax weights if it has none; or one GGUF
    file with its other parts.
    """
    one = re.fullmatch(_FILE, text)
    if not one and not re.fullmatch(_REPO, text):
        raise CheckpointError(
            f"hf:{text} does not name a repository (hf:owner/name) or a GGUF file in one"
            " (hf:owner/name/file.gguf)"
        )
    with requires_extra("hub", f"hf:{text}"):
        from huggingface_hub import snapshot_download

    try:
        if one:
            parts = _PART.sub(r"-*-of-\1.gguf", one["file"])
            return Path(snapshot_download(one["repo"], allow_patterns=[parts])) / one["file"]
        wanted = ["*.safetensors", "*.json", *TOKENIZER_FILES, f"{ADDITIONAL_TEMPLATES}/*"]
        folder = Path(snapshot_download(text, allow_patterns=wanted))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(text, allow_patterns=["flax_model*.msgpack"])
    except Exception as error:  # network errors are long; one line is enough
        said = " ".join(str(error).split())
        said = (
            said
            if len(said) < MAX_ERROR_CHARS
            else said[:MAX_ERROR_CHARS].rpartition(" ")[0] + " ..."
        )
        raise CheckpointError(
            f"hf:{text} could not be downloaded: {said} Without a network, copy the directory from"
            " a machine that has it (hf download) and load it by its path"
        ) from error
    return folder
