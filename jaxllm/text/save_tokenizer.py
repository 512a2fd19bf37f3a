"""Writes a tokenizer in Hugging Face's format, for checkpoints that store it in another."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.files import atomic_file, write_json
from jaxllm.text.formats import ADDITIONAL_TEMPLATES, TokenizerTree


def write_tokenizer(
    source: TokenizerTree, templates: Mapping[str, str], directory: Path
) -> list[Path]:
    """Write tokenizer.json, tokenizer_config.json and chat templates; return their paths.

    transformers can read them, and then prepends the begin-of-text token if `adds_bos` is set.

    Raises:
      CheckpointError: one cannot be written.
    """
    bos = source.roles.get("bos")
    tree = {**source.with_merges(), "truncation": None, "padding": None}
    if source.adds_bos and bos is not None:
        tree["post_processor"] = _bos_processor(bos, tree["model"]["vocab"][bos])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": source.adds_bos,
        "clean_up_tokenization_spaces": False,
        **({} if source.end is None else {"add_eos_token": True}),
        **{f"{role}_token": text for role, text in source.roles.items()},
    }
    files = {"tokenizer.json": tree, "tokenizer_config.json": config}
    for name, data in files.items():
        write_json(directory / name, data)
    paths = [directory / name for name in files]
    folder = directory / ADDITIONAL_TEMPLATES
    if templates.keys() - {"default"}:
        folder.mkdir()
        paths.append(folder)
    for name, template in templates.items():
        path = folder / f"{name}.jinja"
        if name == "default":
            paths.append(path := directory / "chat_template.jinja")
        with atomic_file(path, "w") as file:
            file.write(template)
    return paths


def _bos_processor(bos: str, index: int) -> dict[str, Any]:
    """Return a post-processor that prepends this token to a text."""
    token, first = (
        {"SpecialToken": {"id": bos, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    second = [{"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": [token, first],
        "pair": [token, first, *second],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }
