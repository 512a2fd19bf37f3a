"""Checkpoints in the formats of GPTQ's and AWQ's tools, and the numbers that they represent.

Written from the formats' descriptions, one number at a time, independently of the code under test.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.tiny_models import random_torch_model, theirs

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns of eight in a word, from the lowest bits up

HEADS = ("lm_head", "embed_out")
WIDE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "llama": {**WIDE, "head_dim": 16},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96},
    "phi3": {**WIDE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gpt_neox": WIDE,
}


def words_along_rows(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack `[R, N]` into int32 `[R, N bits / 32]`: each row is one long number, lowest first."""
    rows = []
    for row in numbers:
        whole = sum(int(n) << (bits * i) for i, n in enumerate(row))
        count = len(row) * bits // 32
        rows.append([(whole >> (32 * w)) & 0xFFFFFFFF for w in range(count)])
    return np.array(rows, np.uint32).view(np.int32)


def words_of_awq(numbers: np.ndarray) -> np.ndarray:
    """Pack `[R, N]` into int32 `[R, N / 8]` in AWQ's column order."""
    out = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for place, column in enumerate(AWQ_COLUMNS):
        out |= numbers[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return out.view(np.int32)


def packed_gptq(
    codes_IO: np.ndarray, zeros_GO: np.ndarray, index_I: np.ndarray, bits: int, less: int
) -> dict[str, np.ndarray]:
    stored = (zeros_GO.astype(np.int64) - less) % 2**bits
    return {
        "qweight": words_along_rows(codes_IO.T, bits).T,
        "qzeros": words_along_rows(stored, bits),
        "g_idx": index_I.astype(np.int32),
    }


def packed_awq(codes_IO: np.ndarray, zeros_GO: np.ndarray) -> dict[str, np.ndarray]:
    return {"qweight": words_of_awq(codes_IO), "qzeros": words_of_awq(zeros_GO)}


def rounded(
    weight_OI: np.ndarray, index_I: np.ndarray, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes `[I, O]`, zero points and float16 scales `[G, O]`, rounded to nearest."""
    most = 2**bits - 1
    low, high = [], []
    for g in range(index_I.max() + 1):
        some = weight_OI[:, index_I == g]
        low.append(np.minimum(some.min(1), 0))
        high.append(np.maximum(some.max(1), 0))
    low_GO, high_GO = np.array(low), np.array(high)
    if symmetric:
        high_GO = np.maximum(-low_GO, high_GO)
        low_GO = -high_GO
    scale = (np.maximum(high_GO - low_GO, 1e-5) / most).astype(np.float16)
    wide = scale.astype(np.float64)
    zero = np.full_like(wide, 2 ** (bits - 1)) if symmetric else np.round(-low_GO / wide)
    steps = np.round(weight_OI.T / wide[index_I]) + zero[index_I]
    return np.clip(steps, 0, most).astype(np.int64), np.clip(zero, 0, most), scale


def random_model(family: str, **changes: Any) -> Any:
    """Return a tiny transformers model whose rows are whole groups of 32."""
    return random_torch_model(theirs(family, **{**SIZES[family], **changes}), spread=0.2)


def write(
    directory: Path,
    model: Any,
    method: str = "gptq",
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    act_order: bool = False,
    less: int = 1,
    head: bool = False,
    scales: Any = np.float16,
    shards: bool = False,
    **config: Any,
) -> dict[str, np.ndarray]:
    """Quantize and write the model's linears; the model then holds the values of its files.

    Returns:
        The dequantized matrices, float32 `[O, I]`, by path without a prefix.
    """
    rng = np.random.default_rng(0)
    state = {k: v.half().contiguous() for k, v in model.state_dict().items()}
    dense = {}
    for path, module in model.named_modules():
        conv = type(module).__name__ == "Conv1D"
        if not (conv or isinstance(module, torch.nn.Linear)) or (path in HEADS and not head):
            continue
        weight = module.weight.detach().numpy()
        weight_OI = weight.T if conv else weight
        columns = weight_OI.shape[1]
        size = columns if group == -1 else group
        index = np.arange(columns) // size
        if act_order:
            index = rng.permutation(index)
        codes, zeros, scale = rounded(weight_OI.astype(np.float64), index, bits, symmetric)
        scale = scale.astype(scales)
        pieces = (
            packed_awq(codes, zeros)
            if method == "awq"
            else packed_gptq(codes, zeros, index, bits, less)
        )
        pieces["scales"] = scale
        del state[f"{path}.weight"]
        for name, piece in pieces.items():
            state[f"{path}.{name}"] = torch.tensor(np.ascontiguousarray(piece))
        dequantized = ((codes - zeros[index]) * scale[index].astype(np.float64)).T.astype(
            np.float32
        )
        dense[f"{path.removeprefix('model.').removeprefix('transformer.')}.weight"] = dequantized
        with torch.no_grad():
            module.weight.copy_(
                torch.tensor(np.ascontiguousarray(dequantized.T if conv else dequantized))
            )
    for path, parameter in model.named_parameters():
        if path in state:  # the other tensors are rounded to float16
            with torch.no_grad():
                parameter.copy_(state[path].float())
    quantization = {"quant_method": method, "bits": bits, "group_size": group}
    if method == "gptq":
        quantization |= {"sym": symmetric, "desc_act": act_order, "damp_percent": 0.01}
        quantization |= {
            "checkpoint_format": "gptq" if less else "gptq_v2",
            "true_sequential": True,
        }
    else:
        quantization |= {"zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    settings = {**model.config.to_dict(), "quantization_config": {**quantization, **config}}
    directory.mkdir(exist_ok=True, parents=True)
    (directory / "config.json").write_text(json.dumps(settings))
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save(directory, state, shards)
    return dense


def save(directory: Path, state: dict[str, torch.Tensor], shards: bool = False) -> None:
    """Save one file, or three shards that separate the pieces of a matrix."""
    if not shards:
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
        return
    parts = [dict(list(state.items())[i::3]) for i in range(3)]
    names = [f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, directory / name, metadata={"format": "pt"})
    index = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
