"""Lenses: which token the model would name if it ended after each layer.

A lens maps the stream after a layer by an affine map, and the model's own final norm and output
matrix read it. Without a map it is the logit lens (nostalgebraist 2020). Trained maps make the
tuned lens (Belrose et al. 2023, arXiv 2303.08112), mean Jacobians the Jacobian lens (Gurnee et al.
2026, "Verbalizable Representations Form a Global Workspace in Language Models").
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm import models
from jaxllm.config.model import ModelConfig
from jaxllm.convert.gguf.writer import check_absent
from jaxllm.errors import CheckpointError, ConfigError, NonFiniteError, requires_extra
from jaxllm.files import as_path
from jaxllm.files.versions import LENS
from jaxllm.generation.embeddings import check_text, group_by_length, pad_batch
from jaxllm.models.inputs import Array, check_inputs, check_model
from jaxllm.models.interventions import Add, Set
from jaxllm.ops.products import einsum
from jaxllm.runtime.progress import status_bar, steps_bar
from jaxllm.runtime.validation import check_int
from jaxllm.steps import forward
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params
from jaxllm.weights.quantize import dequantize
from jaxllm.weights.safetensors import first_non_finite, open_tensors, read_header, write_tensors

CHUNK_LOGITS = 1 << 24  # at once, in the comparison with the model: 64 MB


class Lens(struct.PyTreeNode):
    """An affine map of the stream after each layer: `weight_LDD[l] @ x + bias_LD[l]`, float32."""

    weight_LDD: Any
    bias_LD: Any

    def map(self, stream_LBTD: jax.Array) -> jax.Array:
        """Return the mapped streams."""
        mapped = einsum("LBTI,LDI->LBTD", stream_LBTD, self.weight_LDD)
        return mapped + self.bias_LD[:, None, None]


def make_logit_lens(config: ModelConfig) -> Lens:
    """Return the lens that maps nothing."""
    L, D = config.num_hidden_layers, config.hidden_size
    return Lens(np.tile(np.eye(D, dtype=np.float32), (L, 1, 1)), np.zeros((L, D), np.float32))


def unembed(model: Model, params: Params, stream_BTD: jax.Array) -> jax.Array:
    """Return the logits of a stream, float32 `[B, T, V]`: the final norm, output matrix and caps.

    Call it inside `jit`: the layers before the stream then fall away as dead code.
    """
    last = f"blocks.{model.config.num_hidden_layers - 1}.resid_post"
    ids_BT = jnp.zeros(stream_BTD.shape[:2], jnp.int32)
    return forward(model, params, None, ids_BT, edits={last: Set(stream_BTD)}).logits


def lens_logits(
    model: Model, params: Params, tokens_BT: Array, lens: Lens | None = None
) -> jax.Array:
    """Return the logits after each layer, float32 `[L, B, T, V]`. lens: None: the logit lens.

    Raises what `jaxllm.forward` raises, and ConfigError for a lens of another model.
    """
    lens, token_BT = _check_lens(model, params, tokens_BT, lens)
    return _run_lens(model, params, token_BT, lens, None)


def top_tokens(
    model: Model, params: Params, tokens_BT: Array, lens: Lens | None = None, *, count: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return the likeliest tokens after each layer and their log-probabilities.

    Both are `[L, B, T, count]`, best first. It keeps the logits of one layer at a time. Raises what
    `lens_logits` raises.
    """
    lens, token_BT = _check_lens(model, params, tokens_BT, lens)
    count = check_int("count", count, 1, model.config.vocab_size)
    logprobs, tokens = _run_lens(model, params, token_BT, lens, count)
    if not np.isfinite(np.asarray(logprobs)).all():
        raise NonFiniteError("the lens gives NaN or infinite logits")
    return np.asarray(tokens), np.asarray(logprobs)


def fit_jacobian_lens(
    model: Model,
    params: Params,
    texts: Sequence[Sequence[int]],
    *,
    batch: int = 1,
    rows: int = 16,
    show_progress: bool | None = None,
) -> Lens:
    """Return the lens whose maps are mean Jacobians of the last stream by each layer's.

    With h the stream after the last layer and x that after layer l, its weight is the mean over
    tokens s of texts of the sum over tokens t from s on of dh[t] / dx[s]. One pass backward gives a
    row of the matrices of all layers.

    Args:
        texts: Token ids of texts.
        batch: Texts per batch.
        rows: Rows of the matrices to compute at once.

    Raises:
        ConfigError: without texts.
        TokenError, CapacityError: for invalid texts.
    """
    batches = _make_batches(model, params, texts, batch)
    rows, count = check_int("rows", rows, 1), 0
    total_LDD = np.zeros((), np.float32)
    with steps_bar("differentiating", len(batches), show_progress) as advance:
        for token_BT, position_BT in batches:
            total_LDD = total_LDD + _sum_jacobians(model, params, token_BT, position_BT, rows)
            count += int((position_BT >= 0).sum())
            advance()
    weight_LDD = np.asarray(total_LDD) / np.float32(count)
    return Lens(weight_LDD, np.zeros(weight_LDD.shape[:2], np.float32))


def fit_tuned_lens(
    model: Model,
    params: Params,
    texts: Sequence[Sequence[int]],
    *,
    steps: int = 200,
    learning_rate: float = 1e-3,
    batch: int = 8,
    show_progress: bool | None = None,
    log: Callable[[str], None] | None = None,
) -> Lens:
    """Train the affine map of each layer so that it predicts what the whole model does.

    Adam minimizes `lens_divergence` from the logit lens on, over batches of texts in turn. The
    model's weights stay. Raises what `fit_jacobian_lens` raises.

    Args:
        texts: Token ids of texts.
        steps: Optimizer steps.
        batch: Texts per step.
        log: Called with a line on the time and memory that training takes, before it starts.
    """
    with requires_extra("train", "training a lens"):
        import optax  # takes a while

    batches = _make_batches(model, params, texts, batch)
    steps = check_int("steps", steps, 1)
    # Every layer of every chunk reads the output matrix, which is therefore dequantized once.
    params = {**params, **dequantize(models.head_params(model, params))}
    if log is not None:
        log(_estimate_cost(model, params, batches, steps))
    optimizer = optax.adam(learning_rate)
    lens = jax.device_put(make_logit_lens(model.config))
    state = optimizer.init(lens)

    @jax.jit
    def step(params: Any, lens: Any, state: Any, token_BT: Any, position_BT: Any) -> Any:
        divergence_L, gradient = _divergence(model, params, token_BT, position_BT, lens)
        with jax.numpy_dtype_promotion("standard"):  # optax divides its counter by floats
            updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(lens, updates), state, divergence_L.mean()

    with status_bar("training", steps, show_progress) as report:
        for number in range(steps):
            lens, state, value = step(params, lens, state, *batches[number % len(batches)])
            report(number + 1, f"divergence {float(value):.4f}")
    trained: Lens = jax.tree.map(np.asarray, lens)
    if not all(np.isfinite(x).all() for x in (trained.weight_LDD, trained.bias_LD)):
        raise NonFiniteError("the training of the lens diverged. Reduce learning_rate")
    return trained


def lens_divergence(
    model: Model,
    params: Params,
    texts: Sequence[Sequence[int]],
    lens: Lens | None = None,
    *,
    batch: int = 8,
) -> np.ndarray:
    """Return the mean over tokens of KL(model || lens) after each layer, in nats, float32 `[L]`.

    Raises what `fit_jacobian_lens` raises.
    """
    batches = _make_batches(model, params, texts, batch)
    lens = _fit_lens(model, lens)
    counts = [(position_BT >= 0).sum() for _, position_BT in batches]
    means = [np.asarray(_jit_divergence(model, params, *arrays, lens)[0]) for arrays in batches]
    return np.average(means, axis=0, weights=counts).astype(np.float32)


def read_lens(path: str | Path, config: ModelConfig) -> Lens:
    """Read a lens that `write_lens` wrote. Raises CheckpointError for anything else."""
    path, L, D = as_path(path), config.num_hidden_layers, config.hidden_size
    LENS.check(read_header(path).metadata, path)
    tensors, arrays = open_tensors(path), []
    for name, shape in {"weight": (L, D, D), "bias": (L, D)}.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != np.float32:
            got = "nothing" if tensor is None else f"{tensor.dtype} {tensor.shape}"
            raise CheckpointError(
                f"{path} is not a lens of this model: {name} is {got}, expected float32 {shape}"
            )
        arrays.append(np.array(tensor.read()))
        if first_non_finite(arrays[-1]) is not None:
            raise CheckpointError(f"{path}: {name} holds NaN or infinity")
    return Lens(*arrays)


def write_lens(path: str | Path, lens: Lens) -> None:
    """Write a lens as safetensors: `weight` `[L, D, D]` and `bias` `[L, D]`, float32.

    Raises:
        CheckpointError: If the file exists or cannot be written.
    """
    path = as_path(path)
    check_absent(path)
    arrays = {"weight": lens.weight_LDD, "bias": lens.bias_LD}
    lazy = {name: LazyTensor.from_array(np.asarray(x)) for name, x in arrays.items()}
    write_tensors(path, lazy, aligned=False, metadata=LENS.text_mark)


def _fit_lens(model: Model, lens: Lens | None) -> Lens:
    """Return the lens, the logit lens for None. Raises ConfigError for one of another model."""
    plain = make_logit_lens(model.config)
    if lens is None:
        return plain
    if not isinstance(lens, Lens) or np.shape(lens.weight_LDD) != plain.weight_LDD.shape:
        raise ConfigError(
            f"the lens does not fit a model of {plain.bias_LD.shape[0]} layers and width"
            f" {plain.bias_LD.shape[1]}"
        )
    return lens


def _check_lens(
    model: Model, params: Params, tokens_BT: Array, lens: Lens | None
) -> tuple[Lens, Array]:
    check_model(model, params)
    return _fit_lens(model, lens), check_inputs(model, None, tokens_BT, None)[0]


def _make_batches(model: Model, params: Params, texts: Any, batch: int) -> list[Any]:
    """Return tokens and positions of texts in batches. Raises ConfigError without texts."""
    check_model(model, params)
    batch = check_int("batch", batch, 1)
    ids = [check_text(model, number, text) for number, text in enumerate(texts)]
    if not ids:
        raise ConfigError("a lens requires at least one text to fit")
    groups = group_by_length(ids, batch)
    return [pad_batch([ids[member] for member in members], batch) for members in groups]


def _streams(model: Model) -> list[str]:
    return [f"blocks.{layer}.resid_post" for layer in range(model.config.num_hidden_layers)]


@partial(jax.jit, static_argnums=(0, 4))
def _run_lens(
    model: Model, params: Params, token_BT: jax.Array, lens: Lens, count: int | None
) -> Any:
    """Return the logits after each layer, or the `count` likeliest tokens."""
    sites = forward(model, params, None, token_BT, read=_streams(model)).sites
    stream_LBTD = jnp.stack([x.astype(jnp.float32) for x in sites.values()])

    def read_out(stream_BTD: jax.Array) -> Any:
        logits_BTV = unembed(model, params, stream_BTD)
        if count is None:
            return logits_BTV
        return jax.lax.top_k(jax.nn.log_softmax(logits_BTV), count)

    return jax.lax.map(read_out, lens.map(stream_LBTD))


def _divergence(
    model: Model,
    params: Params,
    token_BT: jax.Array,
    position_BT: jax.Array,
    lens: Lens,
) -> tuple[jax.Array, Lens]:
    """Return the mean over real tokens of KL(model || lens) after each layer, `[L]`, and the
    gradient of their sum by the lens.

    It keeps the logits of `CHUNK_LOGITS` at a time.
    """
    out = forward(model, params, None, token_BT, positions_BT=position_BT, read=_streams(model))
    stream_LBTD = jnp.stack([x.astype(jnp.float32) for x in out.sites.values()])
    mapped_LBTD, pull_back = jax.vjp(lambda lens: lens.map(stream_LBTD), lens)
    shape, rows = mapped_LBTD.shape, _chunk_rows(model, token_BT)

    def split(x: jax.Array) -> jax.Array:  # [..., N, D] to chunks [C, ..., R, D]
        x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, -x.shape[-2] % rows), (0, 0)])
        return jnp.moveaxis(x.reshape(*x.shape[:-2], -1, rows, x.shape[-1]), -3, 0)

    real_N1 = (position_BT >= 0).astype(jnp.float32).reshape(-1, 1)
    share_N1 = real_N1 / real_N1.sum()
    chunks = (
        split(stream_LBTD[-1].reshape(-1, shape[-1])),
        split(mapped_LBTD.reshape(shape[0], -1, shape[-1])),
        split(share_N1),
    )
    divergence_CL, gradient_CLRD = jax.lax.map(partial(_compare_chunk, model, params), chunks)
    gradient_LND = jnp.moveaxis(gradient_CLRD, 0, 1).reshape(shape[0], -1, shape[-1])
    (gradient,) = pull_back(gradient_LND[:, : len(real_N1)].reshape(shape))
    return divergence_CL.sum(axis=0), gradient


_jit_divergence = jax.jit(_divergence, static_argnums=0)


def _chunk_rows(model: Model, token_BT: Array) -> int:
    """Return for how many tokens the logits are computed at once."""
    return max(1, min(token_BT.size, CHUNK_LOGITS // model.config.vocab_size))


def _compare_chunk(model: Model, params: Params, chunk: Any) -> tuple[jax.Array, jax.Array]:
    """Return the divergence after each layer, `[L]`, and the gradient by the streams, `[L, R, D]`.

    Args:
        chunk: the last stream `[R, D]`, the mapped streams `[L, R, D]`, and the weights `[R, 1]`.
    """
    last_RD, mapped_LRD, share_R1 = chunk

    def read_out(stream_RD: jax.Array) -> jax.Array:
        return unembed(model, params, stream_RD[None])[0]

    target_RV = jax.nn.log_softmax(read_out(last_RD))
    target_prob_RV = jnp.exp(target_RV)

    def compare(stream_RD: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_RV, pull_back = jax.vjp(read_out, stream_RD)
        logprob_RV = jax.nn.log_softmax(logits_RV)
        divergence_R1 = (target_prob_RV * (target_RV - logprob_RV)).sum(axis=-1, keepdims=True)
        slope_RV = (jnp.exp(logprob_RV) - target_prob_RV) * share_R1
        total = jnp.where(share_R1 > 0, divergence_R1 * share_R1, 0).sum()
        return total, pull_back(slope_RV)[0]

    divergence_L, gradient_LRD = jax.lax.map(compare, mapped_LRD)
    return divergence_L, gradient_LRD


def _estimate_cost(model: Model, params: Params, batches: list[Any], steps: int) -> str:
    """Return a line on the time and memory of training: of one chunk, times their number."""
    L, D, V = (
        getattr(model.config, name) for name in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    rows = max(_chunk_rows(model, token_BT) for token_BT, _ in batches)
    zeros = jnp.zeros((rows, D), jnp.float32)
    chunk = zeros, zeros[None], jnp.ones((rows, 1), jnp.float32)
    compare = jax.jit(_compare_chunk, static_argnums=0)
    for _ in range(2):  # the first compiles
        start = time.perf_counter()
        jax.block_until_ready(compare(model, params, chunk))
    seconds = (time.perf_counter() - start) * (L + 0.5) / 1.5  # the target: half of a comparison
    chunks = np.mean([-(-token_BT.size // _chunk_rows(model, token_BT)) for token_BT, _ in batches])
    size = 4 * (5 * rows * V + V * D + 4 * L * D * D)  # the dequantized output matrix
    return (
        f"training takes about {seconds * chunks * steps:,.0f} s, and {size / 2**30:,.1f} GiB"
        " besides the model"
    )


@partial(jax.jit, static_argnums=(0, 4))
def _sum_jacobians(
    model: Model, params: Params, token_BT: jax.Array, position_BT: jax.Array, rows: int
) -> jax.Array:
    """Return the sum over tokens of each layer's Jacobian, float32 `[L, D, D]`."""
    names, real_BT1 = _streams(model), (position_BT >= 0)[:, :, None]
    D, dtype = model.config.hidden_size, jnp.float32

    def run_last(shift_LBTD: jax.Array) -> jax.Array:
        edits = {name: Add(shift_LBTD[layer]) for layer, name in enumerate(names)}
        out = forward(
            model, params, None, token_BT, positions_BT=position_BT, read=names[-1:], edits=edits
        )
        return out.sites[names[-1]].astype(dtype)

    _, pull_back = jax.vjp(run_last, jnp.zeros((len(names), *token_BT.shape, D), dtype))

    def one_row(unit_D: jax.Array) -> jax.Array:
        (gradient_LBTD,) = pull_back(jnp.where(real_BT1, unit_D[None, None], 0))
        return gradient_LBTD.sum(axis=(1, 2))

    row_DLD = jax.lax.map(one_row, jnp.eye(D, dtype=dtype), batch_size=min(rows, D))
    return jnp.moveaxis(row_DLD, 0, 1)
