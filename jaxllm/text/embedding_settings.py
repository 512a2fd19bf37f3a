"""How a checkpoint turns texts into vectors: sentence-transformers' files beside the weights."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import parse_json, path_exists, path_inside, read_json, read_text
from jaxllm.runtime.schema import as_schema

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
# What selects a pooling in its config.json: a field that is true, or the value of `pooling_mode`.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
}


@dataclass(frozen=True)
class EmbeddingSettings:
    """The defaults of `LM.embed`.

    prompts: texts to put before a text, by name. default_prompt: the name of the one to use if none
    is asked for.
    """

    pooling: str = "mean"
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    def prompt(self, name: str | None, instruction: str | None) -> str:
        """Return the text to put before each text, by a prompt's name or by an instruction.

        An instruction gives the form of Qwen3-Embedding's queries (Zhang et al. 2025, arXiv
        2506.05176). Raises ConfigError for an unknown name, and if both are given.
        """
        if instruction is not None:
            if name is not None or not isinstance(instruction, str):
                raise ConfigError("give either prompt_name or instruction, which is a text")
            return f"Instruct: {instruction}\nQuery:"
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise ConfigError(f"the checkpoint has no prompt {name!r:.40} (it has {known})")
        return self.prompts[name]


class _Module(msgspec.Struct):
    """A step from a text to its vector. path: the folder of its settings."""

    type: str
    path: str = ""


class _Prompts(msgspec.Struct):
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None


def read_embedding_settings(directory: Path) -> EmbeddingSettings:
    """Read the settings of a checkpoint directory; without files, the defaults.

    Raises:
        CheckpointError: a file is malformed, or asks for a step or a pooling that jaxllm lacks.
    """
    fields: dict[str, Any] = {}
    if path_exists(directory / MODULES):
        text = read_text(path_inside(directory, MODULES))
        where = str(directory / MODULES)
        for module in as_schema(parse_json(text, where), list[_Module], where):
            match module.type.rpartition(".")[2]:
                case "Transformer":
                    pass
                case "Pooling":
                    fields["pooling"] = _read_pooling(directory, module.path)
                case "Normalize":
                    fields["normalize"] = True
                case other:
                    raise CheckpointError(f"{where}: {other:.60} is not supported")
    if path_exists(directory / PROMPTS):
        where = str(directory / PROMPTS)
        given: _Prompts = as_schema(read_json(path_inside(directory, PROMPTS)), _Prompts, where)
        prompts, default = given.prompts or {}, given.default_prompt_name
        if default is not None and default not in prompts:
            raise CheckpointError(f"{where}: prompts has no {default!r:.40} (default_prompt_name)")
        fields |= {"prompts": prompts, "default_prompt": default}
    return EmbeddingSettings(**fields)


def _read_pooling(directory: Path, folder: str) -> str:
    plain = folder == os.path.basename(folder) and folder not in ("", ".", "..")
    if not plain or (directory / folder).is_symlink():
        raise CheckpointError(f"{directory / MODULES}: {folder!r:.80} is not a plain folder name")
    data = read_json(path_inside(directory / folder, "config.json"))
    modes = [name for name, on in data.items() if name.startswith("pooling_mode_") and on is True]
    if isinstance(one := data.get("pooling_mode"), str):
        modes = [one]
    if len(modes) != 1 or modes[0] not in _MODES or data.get("include_prompt") is False:
        raise CheckpointError(
            f"{directory / folder}: pooling must be one of {', '.join(_MODES)}, and include the"
            f" prompt: got {', '.join(modes) or 'none'},"
            f" include_prompt {data.get('include_prompt', True)}"
        )
    return _MODES[modes[0]]
