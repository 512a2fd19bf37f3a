"""A Llama checkpoint as a stateful OpenVINO model, compiled for the CPU.

One decision: the graph is traced from our own forward around transformers' weights, in the form
that OpenVINO's fusions expect: rotary embedding, grouped attention, and a cache that is
concatenated, reordered by `beam_idx` and held as model state. NNCF compresses the weights, 4 bits
in groups of 128. Everything else is OpenVINO's default, which rounds the inputs of integer weights,
and keys and values, to 8 bits.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino._offline_transformations import apply_make_stateful_transformation
from transformers import AutoModelForCausalLM

from jaxllm.errors import ConfigError

INPUTS = ("input_ids", "position_ids", "beam_idx")


class LlamaForward(torch.nn.Module):
    """The traced forward: `[B, T]` tokens to the last token's logits and all keys and values.

    Keys and values have shape `[B, K, S, H]`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.head, self.config = model.model, model.lm_head, model.config

    def forward(
        self, input_ids: Any, position_ids: Any, beam_idx: Any, *past: Any
    ) -> tuple[Any, ...]:
        c = self.config
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        x = self.model.embed_tokens(input_ids)
        angle = position_ids[:, None, :, None].float() * self.model.rotary_emb.inv_freq
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin, present = angle.cos(), angle.sin(), []
        slots = torch.arange(past[0].shape[2] + input_ids.shape[1])
        mask = slots <= position_ids[:, None, :, None]

        def split_heads(y: Any, count: int) -> Any:
            return y.view(y.shape[0], -1, count, head_dim).transpose(1, 2)

        def rotate(y: Any) -> Any:
            half = y.shape[-1] // 2
            return y * cos + torch.cat((-y[..., half:], y[..., :half]), dim=-1) * sin

        def repeat_groups(y: Any) -> Any:
            B, K, S, H = y.shape
            groups = c.num_attention_heads // c.num_key_value_heads
            return y[:, :, None].expand(B, K, groups, S, H).reshape(B, -1, S, H)

        for i, layer in enumerate(self.model.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q = rotate(split_heads(attention.q_proj(normed), c.num_attention_heads))
            k = rotate(split_heads(attention.k_proj(normed), c.num_key_value_heads))
            v = split_heads(attention.v_proj(normed), c.num_key_value_heads)
            k, v = (
                torch.cat((old.index_select(0, beam_idx), new), dim=2)
                for old, new in zip(past[2 * i : 2 * i + 2], (k, v), strict=True)
            )
            present += [k, v]
            out = torch.nn.functional.scaled_dot_product_attention(
                q, repeat_groups(k), repeat_groups(v), attn_mask=mask
            )
            x = x + attention.o_proj(
                out.transpose(1, 2).reshape(x.shape[0], -1, q.shape[1] * head_dim)
            )
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(self.model.norm(x[:, -1:])), *present


def convert(directory: str) -> ov.Model:
    """Convert to OpenVINO with float32 weights and with the cache as state, initially empty."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    ).eval()
    c = model.config
    if c.model_type != "llama":
        raise ConfigError(f"OpenVINO is compared on Llama models only, got {c.model_type}")
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    names = [f"{kind}.{i}" for i in range(c.num_hidden_layers) for kind in ("key", "value")]
    past = [torch.zeros(2, c.num_key_value_heads, 3, head_dim) for _ in names]
    ids = torch.zeros((2, 4), dtype=torch.long)
    example = (ids, ids + torch.arange(3, 7), torch.arange(2, dtype=torch.int32), *past)
    with torch.no_grad():
        graph = ov.convert_model(LlamaForward(model), example_input=example)
    shapes = [[-1, -1], [-1, -1], [-1], *[[-1, c.num_key_value_heads, -1, head_dim]] * len(names)]
    for port, name, shape in zip(graph.inputs, (*INPUTS, *names), shapes, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(ov.PartialShape(shape))
    for port, name in zip(graph.outputs, ("logits", *(f"new.{n}" for n in names)), strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, {name: f"new.{name}" for name in names})
    rows = ops.gather(ops.shape_of(graph.input("input_ids"), "i64"), [0], 0)
    for op in graph.get_ops():
        if op.get_type_name() == "ReadValue":  # the state before the first assignment
            shape = ops.concat([rows, ops.constant([c.num_key_value_heads, 0, head_dim])], 0)
            op.set_arguments([ops.broadcast(ops.constant(0.0, np.float32), shape)])
    graph.validate_nodes_and_infer_types()
    return graph


def compile_model(directory: str, precision: str) -> tuple[Callable[[np.ndarray, int], Any], Any]:
    """Compile a model; return `(step, reset)`.

    `step(ids_BT, past)` runs tokens after `past` cached ones and returns logits; `reset()` empties
    the cache.

    Args:
        precision: float32, bfloat16, int8 or int4.

    Raises:
        ConfigError: if the model is not a Llama.
    """
    graph = convert(directory)
    if precision.startswith("int"):
        import nncf

        mode = nncf.CompressWeightsMode
        options = {"mode": mode.INT8_SYM if precision == "int8" else mode.INT4_SYM}
        options |= {"group_size": 128, "all_layers": False} if precision == "int4" else {}
        graph = nncf.compress_weights(graph, **options)
    hints = {
        "INFERENCE_PRECISION_HINT": "f32" if precision == "float32" else "bf16",
        "INFERENCE_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
        "PERFORMANCE_HINT": "LATENCY",
    }
    if precision == "float32":  # the default caches keys and values in 8 bits
        hints["KV_CACHE_PRECISION"] = "f32"
    request = ov.Core().compile_model(graph, "CPU", hints).create_infer_request()

    def step(ids_BT: np.ndarray, past: int) -> Any:
        B, T = ids_BT.shape
        position = np.broadcast_to(np.arange(past, past + T), (B, T))
        rows = np.arange(B, dtype=np.int32)
        return request.infer(dict(zip(INPUTS, (ids_BT, position, rows), strict=True)))["logits"]

    return step, request.reset_state
