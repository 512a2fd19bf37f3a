"""Writing of trained demo models in half precision, with a README: Hugging Face or native format.

One decision: files are written to a temporary directory, which replaces the destination when it is
complete.
"""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import numpy as np
from tokenizers import Tokenizer

from jaxllm.checkpoints.native import Checkpoint, save as write_native, with_params
from jaxllm.config.model import ModelConfig
from jaxllm.convert.hf import write_hf
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.paths import Params, flatten
from jaxllm.weights.precision import Precision
from scripts.demo_models.demo_data import BOS, BOS_ID, EOS, EOS_ID, PAD, PAD_ID

# A chat is one story: user lines and continuations alternate.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' and not loop.first %}{{ ' ' }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)
GENERATION = {
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "max_length": 512,
}


def save_hf(
    directory: Path, config: ModelConfig, params: Params, tokenizer: Tokenizer, readme: str
) -> None:
    """Write model, tokenizer and README.md in Hugging Face format; replace `directory`."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    tensors = {
        path: LazyTensor.from_array(np.asarray(jax.device_get(leaf)))
        for path, leaf in flatten(params)
    }
    generation = {**GENERATION, "max_length": config.max_position_embeddings}
    precision = Precision.uniform("float16")
    write_hf(partial, Checkpoint(directory, config, tensors, generation, precision))
    tokenizer.save(str(partial / "tokenizer.json"))
    write_tokenizer_config(partial, config.max_position_embeddings)
    (partial / "README.md").write_text(readme, encoding="utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def save_native(
    directory: Path, config: ModelConfig, params: Params, tokenizer: Tokenizer, readme: str
) -> None:
    """Write model, tokenizer and README.md in jaxllm's native format.

    It supports attention kinds that Hugging Face's format does not.

    Raises:
        CheckpointError: if `directory` has a checkpoint.
    """
    generation = {**GENERATION, "max_length": config.max_position_embeddings}
    precision = Precision.uniform("float16")
    opened = Checkpoint(directory, config, {}, generation, precision)
    with TemporaryDirectory() as name:
        scratch = Path(name)
        tokenizer.save(str(scratch / "tokenizer.json"))
        write_tokenizer_config(scratch, config.max_position_embeddings)
        (scratch / "README.md").write_text(readme, encoding="utf-8")
        files = sorted(scratch.iterdir())
        write_native(directory, with_params(opened, params, precision), files=files)


def write_tokenizer_config(directory: Path, length: int) -> None:
    """Write the special tokens and the chat template, in fields that transformers also reads."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
