"""Writing a trained demo model in half precision, with its README: as Hugging Face has it, or not.

One decision: everything is written beside the destination and takes its place when it is complete.
"""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import numpy as np
from tokenizers import Tokenizer

from jaxllm.checkpoints.native import Checkpoint, save as write_whole, with_params
from jaxllm.config.model import ModelConfig
from jaxllm.convert.hf import write_hf
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.paths import Params, flatten
from jaxllm.weights.precision import Precision
from scripts.demo_models.demo_data import BOS, BOS_ID, EOS, EOS_ID, PAD, PAD_ID

# A talk is one story: the lines and their continuations, in turn.
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


def save(
    directory: Path, config: ModelConfig, params: Params, tokenizer: Tokenizer, readme: str
) -> None:
    """Write model, tokenizer and README.md into `directory`, in place of what was there."""
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
    """The same in jaxllm's own form, for models that Hugging Face's has no words for.

    Raises CheckpointError where there is a checkpoint.
    """
    generation = {**GENERATION, "max_length": config.max_position_embeddings}
    precision = Precision.uniform("float16")
    opened = Checkpoint(directory, config, {}, generation, precision)
    with TemporaryDirectory() as made:
        beside = Path(made)
        tokenizer.save(str(beside / "tokenizer.json"))
        write_tokenizer_config(beside, config.max_position_embeddings)
        (beside / "README.md").write_text(readme, encoding="utf-8")
        files = sorted(beside.iterdir())
        write_whole(directory, with_params(opened, params, precision), files=files)


def write_tokenizer_config(directory: Path, length: int) -> None:
    """Name the special tokens, in the words that transformers and jaxllm both read."""
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
