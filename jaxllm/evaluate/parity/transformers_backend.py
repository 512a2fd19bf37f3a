"""The transformers backend: a Hugging Face model with hooks that record every activation.

Module outputs come from forward hooks. Queries, keys and values after RoPE, and the attention
output per head, come from an attention function that is registered during one forward pass; it
records its arguments and calls the model's own eager attention.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.convert.hf import read_config
from jaxllm.convert.rotary_pairs import head_order, paired_rows
from jaxllm.convert.tables import Architecture
from jaxllm.errors import requires_extra
from jaxllm.evaluate.parity.activations import (
    ParityCase,
    activation_names,
    decoded_arrays,
    head_names,
)
from jaxllm.models import get_family
from jaxllm.models.site_inputs import is_mixture
from jaxllm.runtime.validation import check_dtype

TAPS = "jaxllm_taps"

# Modules that transformers names differently, used if our name does not exist.
RECURRENT = ("linear_attn", "conv", "mamba")  # in the place of attention
MODULE_NAMES = {
    "attention": ("self_attn", *RECURRENT),
    "down_proj": ("w2", "output_linear"),
    "input_layernorm": ("operator_norm",),
    "gate": ("router",),
    "mlp": ("feed_forward", "block_sparse_moe", "shared_mlp"),  # Granite 4 has the sum of the last
    "moe": ("router",),
    "norm": ("embedding_norm",),
    "post_attention_layernorm": ("ffn_norm",),
}


@dataclasses.dataclass(frozen=True)
class TransformersBackend:
    """A transformers model (`model`) on the CPU, with eager attention."""

    name: str
    dtype: str
    model: Any

    @classmethod
    def load(cls, directory: Path, dtype: str = "float32") -> "TransformersBackend":
        """Load a Hugging Face directory in one format: float32, bfloat16 or float16.

        Raises ConfigError for another format, or where torch or transformers are not installed.
        """
        dtype = check_dtype("the reference's dtype", dtype)
        torch, transformers = _import()
        with _hide_progress(transformers.utils.logging):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=getattr(torch, dtype),
                attn_implementation="eager",
                local_files_only=True,
                use_safetensors=True,
            )
        return cls(f"transformers {transformers.__version__}", dtype, model.eval())

    def activations(self, case: ParityCase) -> dict[str, np.ndarray]:
        """Return every activation, using transformers' own cache if the case has cached tokens."""
        cache = self._cache()
        outputs: dict[str, Any] = {}
        if case.num_cached:
            self._run(*case.pieces[0], case.position_BT[:, : case.num_cached], cache)
        with self._record_outputs(outputs):
            logits = self._run(*case.pieces[-1], case.position_BT, cache)
        outputs["logits"] = logits
        router, shape = get_family(self._family).router, (*logits.shape[:2], -1)
        for name in self._activation_names:
            if router and name.endswith(f".{router}"):  # all tokens are flattened into one axis
                outputs[name] = outputs[name].reshape(shape)
        return {name: _numpy(outputs[name]) for name in self._activation_names}

    def decode(
        self, case: ParityCase, steps: int, forced_BN: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Run each piece, then one pass for each new token after the first."""
        cache = self._cache()
        position_BS = case.position_BT[:, :0]
        for tokens_BT, position_BT in case.pieces:
            position_BS = np.concatenate([position_BS, position_BT], axis=1)
            logits = _numpy(self._run(tokens_BT, position_BT, position_BS, cache))
            last_B = np.argmax(
                np.where(position_BT >= 0, np.arange(position_BT.shape[1]), -1), axis=1
            )
            steps_BV = [np.take_along_axis(logits, last_B[:, None, None], axis=1)[:, 0]]
        for n in range(1, steps):
            before_B = steps_BV[-1].argmax(axis=1) if forced_BN is None else forced_BN[:, n - 1]
            position_B1 = position_BS.max(axis=1, keepdims=True) + 1
            position_BS = np.concatenate([position_BS, position_B1], axis=1)
            logits = self._run(before_B[:, None], position_B1, position_BS, cache)
            steps_BV.append(_numpy(logits)[:, 0])
        layers = get_family(self._family).layers
        return decoded_arrays(
            [f"{layers}.{layer}" for layer in range(len(cache.layers))],
            steps_BV,
            [self._entries(layer) for layer in cache.layers],
            position_BS,
        )

    @property
    def _family(self) -> str:
        """Our name of the model_type."""
        return self._read_config[0].model_type

    @property
    def _head_order(self) -> Any:
        """An index of a head of transformers, of queries and keys, that gives our order."""
        config, table = self._read_config
        return head_order(config, table.layouts)

    @property
    def _read_config(self) -> tuple[ModelConfig, Architecture]:
        return read_config(self.model.config.to_dict())

    def _entries(self, layer: Any) -> tuple[np.ndarray, ...]:
        """Return a layer's keys and values in our order; latents and rotated dimensions in one."""
        if getattr(layer, "keys", None) is None:
            return ()
        k, v = _heads_last(layer.keys), _heads_last(layer.values)
        config, _ = self._read_config
        if config.value_heads(0) or not config.kv_heads(0):
            return k[..., self._head_order], v
        if self._family == "deepseek_v2":  # its class leaves pairs side by side
            v = v[..., paired_rows(1, v.shape[-1], 0, v.shape[-1])]
        return (np.concatenate([v, k], axis=-1),)

    @property
    def _activation_names(self) -> list[str]:
        config: Any = self._read_config[0]
        return activation_names(
            self._family,
            self.model.config.num_hidden_layers,
            partial(is_mixture, config),
            partial(head_names, config),
        )

    @property
    def _body(self) -> Any:
        return self.model.get_submodule(self.model.base_model_prefix)

    def _cache(self) -> Any:
        return _import()[1].DynamicCache(config=self.model.config)

    def _run(
        self, tokens_BT: np.ndarray, position_BT: np.ndarray, position_BS: np.ndarray, cache: Any
    ) -> Any:
        """Return logits. position_BS: positions in the cache, including the new tokens."""
        torch, _ = _import()
        with torch.no_grad():
            return self.model(
                torch.tensor(tokens_BT.astype(np.int64)),
                attention_mask=torch.tensor((position_BS >= 0).astype(np.int64)),
                position_ids=torch.tensor(np.maximum(position_BT, 0).astype(np.int64)),
                past_key_values=cache,
                use_cache=True,
            ).logits

    @contextmanager
    def _record_outputs(self, outputs: dict[str, Any]) -> Iterator[None]:
        """Record the activations of one forward pass in `outputs` while the context is open."""
        layers = get_family(self._family).layers
        body, order = self._body, self._head_order

        def tap(name: str) -> Callable[..., None]:
            def hook(*given: Any) -> None:  # the last is the output, or the inputs in a pre-hook
                x = given[-1]
                x = x[0] if isinstance(x, tuple) else x
                outputs[name] = x + outputs[name] if name in outputs else x.clone()

            return hook

        def tap_heads(name: str) -> Callable[..., None]:
            def hook(_: Any, given: Any) -> None:
                outputs[name] = given[0].reshape(outputs[name].shape).clone()

            return hook

        def attend(
            module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
        ) -> tuple[Any, Any]:
            path, new = f"{layers}.{module.layer_idx}", query.shape[2]
            for name, x in (("q", query[..., order]), ("k", key[..., order]), ("v", value)):
                outputs[f"{path}.{name}"] = x[:, :, -new:].transpose(1, 2).clone()
            eager = sys.modules[type(module).__module__].eager_attention_forward
            heads, weights = eager(module, query, key, value, mask, **options)
            outputs[f"{path}.heads"] = heads.clone()
            return heads, weights

        with ExitStack() as stack:
            stack.enter_context(_replace_attention(self.model, attend))
            for name in self._activation_names:
                path, _, last = name.rpartition(".")
                if last == "heads":  # they may be gated before the output projection
                    attention = getattr(body.get_submodule(path), "self_attn", None)
                    if (projection := getattr(attention, "o_proj", None)) is None:
                        continue
                    hook = projection.register_forward_pre_hook(tap_heads(name))
                    stack.callback(hook.remove)
                if last in ("q", "k", "v", "heads", "logits"):
                    continue
                if last in ("input", "embeddings"):
                    module = _find_modules(body, path if last == "input" else f"{layers}.0")[0]
                    stack.callback(module.register_forward_pre_hook(tap(name)).remove)
                    continue
                for module in _find_modules(body, name):
                    stack.callback(module.register_forward_hook(tap(name)).remove)
            yield


def _find_modules(body: Any, path: str) -> list[Any]:
    """Return transformers' modules for our path. If there are several, their sum is ours."""
    found = [body]
    for part in path.split("."):
        each = (getattr(found[0], name, None) for name in (part, *MODULE_NAMES.get(part, ())))
        found = [module for module in each if module is not None]
    return found


@contextmanager
def _replace_attention(model: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """Replace the model's attention function by `attend`, through transformers' registry."""
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(TAPS, attend)
    AttentionMaskInterface.register(TAPS, eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(TAPS)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _hide_progress(logging: Any) -> Iterator[None]:
    """Hide transformers' progress bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _heads_last(x: Any) -> np.ndarray:
    """Transpose transformers' `[B, K, S, H]` to our `[B, S, K, H]`."""
    return _numpy(x.transpose(1, 2))


def _numpy(x: Any) -> np.ndarray:
    """Convert a tensor bit for bit; numpy has no native bfloat16."""
    torch, _ = _import()
    if x.dtype == torch.bfloat16:
        bits: np.ndarray = x.contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: np.ndarray = x.numpy()
    return array


def _import() -> tuple[Any, Any]:
    with requires_extra("test", "comparing with transformers"):
        import torch
        import transformers
    return torch, transformers
