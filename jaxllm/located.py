"""Where a checkpoint is: a path, one that jaxllm brings, or a repository of the hub."""

import re
from os import PathLike
from pathlib import Path

from jaxllm.errors import CheckpointError
from jaxllm.files import is_there
from jaxllm.text.formats import TOKENIZER_FILES

DEMOS = Path(__file__).parent / "demo"
MOST_SAID = 240  # characters of an error of the network
_REPO = r"[\w.-]+/[\w.-]+"
_FILE = rf"(?P<repo>{_REPO})/(?P<file>.+\.gguf)"
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def resolve(path: str | Path) -> Path:
    """The directory or file that `path` of `load` stands for; downloads only for "hf:...".

    Raises CheckpointError where there is none.
    """
    if not isinstance(path, str | PathLike):
        raise CheckpointError(
            "a checkpoint is a directory, a GGUF file, demo:llama or hf:owner/name, as a text or a"
            f" Path: got {path!r:.60}"
        )
    text = str(path)
    if path == "":
        raise CheckpointError(
            "the model's name is empty: expected a directory, a GGUF file, a demo or hf:owner/name."
        )
    if text.startswith("demo:"):
        demos = {f"demo:{file.parent.name}": file.parent for file in DEMOS.glob("*/config.json")}
        if text not in demos:
            raise CheckpointError(f"no demo {text!r:.60}: there are {', '.join(sorted(demos))}")
        return demos[text]
    if text.startswith("hf:"):
        return _download(text[3:])
    if is_there(found := Path(path)):
        return found
    named = re.fullmatch(_REPO, text) or re.fullmatch(_FILE, text)
    hint = f" To download from the hub, write hf:{text}" if named else ""
    raise CheckpointError(f"{text:.200} is not a directory, nor a file.{hint}")


def _download(text: str) -> Path:
    """A repository's files in Hugging Face's form, else of transformers 4's Flax classes; or the
    one GGUF file of many that is named, with the other parts of one in parts.
    """
    one = re.fullmatch(_FILE, text)
    if not one and not re.fullmatch(_REPO, text):
        raise CheckpointError(
            f"hf:{text} does not name a repository (hf:owner/name), nor a GGUF file in one"
            " (hf:owner/name/file.gguf)"
        )
    from huggingface_hub import snapshot_download

    try:
        if one:
            parts = _PART.sub(r"-*-of-\1.gguf", one["file"])
            return Path(snapshot_download(one["repo"], allow_patterns=[parts])) / one["file"]
        wanted = ["*.safetensors", "*.json", *TOKENIZER_FILES]
        found = Path(snapshot_download(text, allow_patterns=wanted))
        if not any(found.glob("*.safetensors")):
            snapshot_download(text, allow_patterns=["flax_model*.msgpack"])
    except Exception as error:  # whatever the network brings, one line of it is what helps
        said = " ".join(str(error).split())
        said = said if len(said) < MOST_SAID else said[:MOST_SAID].rpartition(" ")[0] + " ..."
        raise CheckpointError(f"hf:{text} could not be downloaded: {said}") from error
    return found
