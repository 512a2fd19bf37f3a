"""Sparse autoencoders: features of the array at a site, loaded, trained, and set through edits.

A sparse autoencoder writes an activation as a sum of few directions of a large dictionary. One
decision: an autoencoder is a pytree with the arrays of SAELens' files, so it goes through `jit`
and `grad`; what those files fold into the arithmetic is folded into the arrays when they load.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import as_path, atomic_directory, path_inside, read_json, write_json
from jaxllm.models.interventions import Apply, Clamp, Edit
from jaxllm.ops.products import einsum
from jaxllm.runtime.progress import steps_bar
from jaxllm.runtime.validation import check_int, check_seed, is_number
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.safetensors import first_non_finite, open_tensors, write_tensors

WEIGHTS, CONFIG = "sae_weights.safetensors", "cfg.json"
_STEPS = 25  # of training, in one program
_Moments = tuple[jax.Array, jax.Array, jax.Array]


class SparseAutoencoder(struct.PyTreeNode):
    """A dictionary of F directions in activations of width D.

    Features are `f = act((x - bias) @ encoder + encoder_bias)`, and x is about `f @ decoder +
    bias`. The function act is ReLU (Cunningham et al. 2023, arXiv 2309.08600; Bricken et al. 2023),
    JumpReLU (Rajamanoharan et al. 2024, arXiv 2407.14435), or ReLU of the k largest (Gao et al.
    2024, arXiv 2406.04093).

    Attributes:
        encoder_DF, encoder_bias_F, decoder_FD, bias_D: float32.
        threshold_F: JumpReLU's; None otherwise.
        k: Number of active features of top-k; None otherwise. Static.
        subtract_bias: Whether x's bias is subtracted before encoding. Static.
        site: The site that it was trained on, or None. Static.
    """

    encoder_DF: jax.Array
    encoder_bias_F: jax.Array
    decoder_FD: jax.Array
    bias_D: jax.Array
    threshold_F: jax.Array | None = None
    k: int | None = struct.field(pytree_node=False, default=None)
    subtract_bias: bool = struct.field(pytree_node=False, default=True)
    site: str | None = struct.field(pytree_node=False, default=None)

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the features `[..., F]` of activations `[..., D]`, float32."""
        x = jnp.asarray(x).astype(jnp.float32)
        x_ND = x.reshape(-1, x.shape[-1])
        if self.subtract_bias:
            x_ND = x_ND - self.bias_D[None]
        f_NF = jax.nn.relu(einsum("ND,DF->NF", x_ND, self.encoder_DF) + self.encoder_bias_F[None])
        if self.threshold_F is not None:
            f_NF = jnp.where(f_NF > self.threshold_F[None], f_NF, 0.0)
        if self.k is not None:
            top_Nk, index_Nk = jax.lax.top_k(f_NF, self.k)
            row_N1 = jnp.arange(len(f_NF), dtype=jnp.int32)[:, None]
            f_NF = jnp.zeros_like(f_NF).at[row_N1, index_Nk].set(top_Nk)
        return f_NF.reshape(*x.shape[:-1], -1)

    def decode(self, f: jax.Array) -> jax.Array:
        """Return the activations `[..., D]` of features `[..., F]`."""
        f_NF = f.reshape(-1, f.shape[-1])
        x_ND = einsum("NF,FD->ND", f_NF, self.decoder_FD) + self.bias_D[None]
        return x_ND.reshape(*f.shape[:-1], -1)

    def clamp(self, feature: int, value: Any, **where: Any) -> Edit:
        """Return the edit that sets a feature's activation and keeps the rest of x.

        Args:
            value: One number, or one for each row; for top-k, one number.
            where: `heads`, `positions` and `rows` of the edit.

        Raises:
            ConfigError: For a feature that does not exist.
        """
        feature = check_int("feature", feature, 0, len(self.encoder_bias_F) - 1, ConfigError)
        decoder_D = self.decoder_FD[feature]
        if self.k is not None:  # whether a feature is active depends on all others
            parts = self, feature, jnp.float32(value)
            return Apply(jax.tree_util.Partial(_set_feature, *parts), **where)
        encoder_D, bias = self.encoder_DF[:, feature], self.encoder_bias_F[feature]
        if self.subtract_bias:
            bias = bias - self.bias_D @ encoder_D
        threshold = 0.0 if self.threshold_F is None else self.threshold_F[feature]
        return Clamp(encoder_D, decoder_D, value, bias=bias, threshold=threshold, **where)


def _set_feature(sae: SparseAutoencoder, feature: int, value: jax.Array, x: jax.Array) -> jax.Array:
    change = value - sae.encode(x)[..., feature, None]
    return x + change * sae.decoder_FD[feature].reshape(*[1] * (x.ndim - 1), -1)


def load_autoencoder(directory: str | Path) -> SparseAutoencoder:
    """Load a directory of SAELens: `sae_weights.safetensors` and `cfg.json`.

    Raises:
        CheckpointError: For files that are missing, malformed, or of another kind of autoencoder.
    """
    home = as_path(directory)
    config, tensors = read_json(path_inside(home, CONFIG)), path_inside(home, WEIGHTS)
    metadata = config.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    kind = _activation_kind(home, config)
    names = ("W_enc", "b_enc", "W_dec", "b_dec", *["threshold"] * (kind == "jumprelu"))
    x = _read_arrays(home, open_tensors(tensors), names, config)
    if config.get("rescale_acts_by_decoder_norm", False):
        norm_F = jnp.linalg.norm(x["W_dec"], axis=1)
        x["W_enc"], x["b_enc"] = x["W_enc"] * norm_F[None], x["b_enc"] * norm_F
        x["W_dec"] = x["W_dec"] / jnp.where(norm_F == 0, 1, norm_F)[:, None]
    k = None
    if kind == "topk":
        options = config.get("activation_fn_kwargs")
        k = config.get("k", options.get("k") if isinstance(options, dict) else None)
        k = check_int(f"{home / CONFIG}: k", k, 1, len(x["b_enc"]), CheckpointError)
    site = metadata.get("hook_name", config.get("hook_name", config.get("hook_point")))
    return SparseAutoencoder(
        x["W_enc"], x["b_enc"], x["W_dec"], x["b_dec"], x.get("threshold"),
        k=k,
        subtract_bias=config.get("apply_b_dec_to_input", True) is True,
        site=site if isinstance(site, str) else None,
    )  # fmt: skip


def save_autoencoder(sae: SparseAutoencoder, directory: str | Path) -> None:
    """Write the form that `load_autoencoder` and SAELens read.

    Raises:
        CheckpointError: If it cannot be written.
    """
    D, F = sae.encoder_DF.shape
    arrays = {
        "W_enc": sae.encoder_DF, "b_enc": sae.encoder_bias_F,
        "W_dec": sae.decoder_FD, "b_dec": sae.bias_D, "threshold": sae.threshold_F,
    }  # fmt: skip
    kind = "topk" if sae.k is not None else "jumprelu"
    kind = "standard" if sae.k is None and sae.threshold_F is None else kind
    config: dict[str, Any] = {
        "architecture": kind, "d_in": D, "d_sae": F, "dtype": "float32", "device": "cpu",
        "apply_b_dec_to_input": sae.subtract_bias, "normalize_activations": "none",
        "metadata": {"hook_name": sae.site},
    }  # fmt: skip
    config |= {} if sae.k is None else {"k": sae.k}
    with atomic_directory(as_path(directory), CONFIG) as partial:
        tensors = {
            name: LazyTensor.from_array(np.asarray(x, np.float32))
            for name, x in arrays.items()
            if x is not None
        }
        write_tensors(partial / WEIGHTS, tensors, aligned=False)
        write_json(partial / CONFIG, config)


def train_autoencoder(
    x_ND: Any,
    features: int,
    *,
    k: int | None = None,
    l1: float | None = None,
    steps: int,
    batch: int = 256,
    learning_rate: float = 1e-3,
    seed: int,
    site: str | None = None,
    show_progress: bool | None = None,
) -> tuple[SparseAutoencoder, np.ndarray]:
    """Train an autoencoder on activations by Adam; return it and the loss of each step.

    The loss is `mean |x - decode(f)|^2`, with `l1` also `l1 * sum_i f_i |decoder_i|`, which a
    larger decoder does not lower (Conerly et al. 2024, "Update on how we train SAEs"). It is for
    activations scaled to `mean |x|^2 = D`; the scale is folded into the result.

    Args:
        x_ND: Activations, for example from `read=` at many tokens.
        features: F, the size of the dictionary.
        k: Active features of top-k. Give this or l1.
        l1: Weight of the sparsity penalty, with ReLU.
        batch: Activations in a step, drawn at random.
        site: The site's name, to be kept in the file.
        show_progress: None shows a progress bar on a terminal or in a notebook.

    Raises:
        ConfigError: For values that cannot be trained on.
    """
    x_ND = np.asarray(x_ND, np.float32)
    if x_ND.ndim != 2 or not x_ND.size or not np.isfinite(x_ND).all():
        raise ConfigError(f"activations must be finite numbers [N, D], got shape {x_ND.shape}")
    features = check_int("features", features, 1, error=ConfigError)
    steps, batch = (
        check_int(*x, 1, error=ConfigError) for x in (("steps", steps), ("batch", batch))
    )
    if (k is None) == (l1 is None):
        raise ConfigError("training an autoencoder needs either k or l1")
    if k is not None:
        k = check_int("k", k, 1, features, ConfigError)
    elif not is_number(l1) or not 0 <= cast(float, l1) < np.inf:
        raise ConfigError(f"l1 must be a number from 0, got {l1!r:.60}")
    if not is_number(learning_rate) or not 0 < learning_rate < np.inf:
        raise ConfigError(f"learning_rate must be a positive number, got {learning_rate!r:.60}")
    key = jax.random.key(check_seed(seed))
    scale = float(np.sqrt(x_ND.shape[1] / max(np.square(x_ND).sum(axis=1).mean(), 1e-30)))
    x_ND = jnp.asarray(x_ND * scale)
    sae = _init(jax.random.fold_in(key, steps), x_ND, features).replace(k=k, site=site)

    def loss(sae: SparseAutoencoder, x_BD: jax.Array) -> jax.Array:
        f_BF = sae.encode(x_BD)
        square = jnp.square(sae.decode(f_BF) - x_BD).sum(axis=1).mean()
        if l1 is None:
            return square
        norm_F = jnp.linalg.norm(sae.decoder_FD, axis=1)
        return square + l1 * (f_BF * norm_F[None]).sum(axis=1).mean()

    @jax.jit
    def run_steps(carry: Any, number_S: jax.Array, x_ND: jax.Array) -> Any:
        def step(carry: Any, number: jax.Array) -> Any:
            sae, *moments = carry
            row_B = jax.random.randint(jax.random.fold_in(key, number), (batch,), 0, len(x_ND))
            value, slope = jax.value_and_grad(loss)(sae, x_ND[row_B])
            moved = jax.tree.map(partial(_adam, number), slope, *moments)
            update, *moments = jax.tree.transpose(jax.tree.structure(sae), None, moved)
            sae = jax.tree.map(lambda x, by: x - learning_rate * by, sae, update)
            return (sae, *moments), value

        return jax.lax.scan(step, carry, number_S)

    zeros = jax.tree.map(jnp.zeros_like, sae)
    carry, losses = (sae, zeros, zeros), list[np.ndarray]()
    pieces = np.split(np.arange(steps, dtype=np.int32), range(_STEPS, steps, _STEPS))
    with steps_bar("training", len(pieces), show_progress) as advance:
        for numbers in pieces:
            carry, values = run_steps(carry, numbers, x_ND)
            losses.append(np.asarray(values))
            advance()
    sae = carry[0]
    return sae.replace(
        encoder_DF=sae.encoder_DF * scale,
        decoder_FD=sae.decoder_FD / scale,
        bias_D=sae.bias_D / scale,
    ), np.concatenate(losses)


def _init(key: jax.Array, x_ND: jax.Array, features: int) -> SparseAutoencoder:
    """Return random unit directions, the encoder their transpose, and the mean as bias."""
    decoder_FD = jax.random.normal(key, (features, x_ND.shape[1]))
    decoder_FD = decoder_FD / jnp.linalg.norm(decoder_FD, axis=1, keepdims=True)
    return SparseAutoencoder(decoder_FD.T, jnp.zeros(features), decoder_FD, x_ND.mean(axis=0))


def _adam(step: jax.Array, slope: jax.Array, mean: jax.Array, square: jax.Array) -> _Moments:
    """Return Adam's update and moments (Kingma and Ba 2014, arXiv 1412.6980), for steps from 0."""
    mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope**2
    time = (step + 1).astype(jnp.float32)
    update = (mean / (1 - 0.9**time)) / (jnp.sqrt(square / (1 - 0.999**time)) + 1e-8)
    return update, mean, square


def _activation_kind(home: Path, config: Mapping[str, Any]) -> str:
    """Return "standard", "jumprelu" or "topk". Raises CheckpointError for other arithmetic."""
    kind = config.get("architecture", "standard")
    function = config.get("activation_fn", config.get("activation_fn_str", "relu"))
    if kind == "standard" and function == "topk":
        kind = "topk"
    complaints = {
        "architecture": (kind, ("standard", "jumprelu", "topk")),
        "activation_fn": (function, ("relu", "topk", "jumprelu")),
        "normalize_activations": (config.get("normalize_activations", "none"), ("none", False)),
        "finetuning_scaling_factor": (config.get("finetuning_scaling_factor", False), (False,)),
        "rescale_acts_by_decoder_norm": (
            config.get("rescale_acts_by_decoder_norm", False),
            (False, True) if kind == "topk" else (False,),
        ),
    }
    for name, (value, known) in complaints.items():
        if not isinstance(value, str | bool) or value not in known:
            expected = " or ".join(map(str, known))
            raise CheckpointError(f"{home / CONFIG}: {name} is {value!r:.60}, expected {expected}")
    return str(kind)


def _read_arrays(
    home: Path, tensors: Mapping[str, LazyTensor], names: tuple[str, ...], config: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Return these arrays as float32. Raises CheckpointError for the first that does not fit."""
    where, arrays = home / WEIGHTS, dict[str, jax.Array]()
    if missing := [name for name in names if name not in tensors]:
        raise CheckpointError(f"{where} lacks {', '.join(missing)}")
    shape = tensors["W_enc"].shape
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{where}: W_enc has shape {shape}, expected [D, F]")
    D, F = shape
    stated = config.get("d_in", D), config.get("d_sae", F)
    if stated != shape:
        raise CheckpointError(f"{where}: W_enc has shape {shape}, but {CONFIG} states {stated}")
    shapes = {"W_enc": (D, F), "b_enc": (F,), "W_dec": (F, D), "b_dec": (D,), "threshold": (F,)}
    for name in names:
        tensor = tensors[name]
        if tensor.shape != shapes[name]:
            raise CheckpointError(
                f"{where}: {name} has shape {tensor.shape}, expected {shapes[name]}"
            )
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise CheckpointError(f"{where}: {name} is {tensor.dtype}, expected floats")
        x = np.array(tensor.read(), np.float32)
        if (bad := first_non_finite(x)) is not None:
            raise CheckpointError(f"{where}: {name} holds {x.reshape(-1)[bad]} at index {bad}")
        arrays[name] = jnp.asarray(x)
    return arrays
