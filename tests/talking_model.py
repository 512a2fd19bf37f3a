"""A checkpoint that says a given text after a given prompt, with a published kind of vocabulary.

GPT-2 whose blocks compute nothing: a position's embedding alone decides the next token. The
tokenizer is byte-level as Qwen's: `<tool_call>` is an ordinary added token, `<|im_end|>` a special
one, and the embeddings have more rows than there are tokens.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxllm.text.byte_level import BYTE_OF_SYMBOL

WIDTH, POSITIONS, PADDING = 320, 2048, 100
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ORDINARY = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_TURNS = """{%- for m in messages %}
{%- if m.tool_calls %}{% for c in m.tool_calls %}CALL{% endfor %}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_LIST = "{% for t in tools %}{{ t | tojson }}\\n{% endfor %}"
_ARGUMENTS = "{{ c.function.arguments | tojson }}"


def _template(tools: str, call: str) -> str:
    begin, end = "{{ '<|im_start|>system\\n' }}", "{{ '<|im_end|>\\n' }}"
    return "{%- if tools %}" + begin + tools + end + "{% endif %}" + _TURNS.replace("CALL", call)


# In the form of published ones: how each shows tools and the calls of earlier turns.
TEMPLATES = {
    "hermes": _template(
        "<tools>" + _LIST + '</tools> Answer with <tool_call>\\n{"name": NAME, "arguments": ARGS}'
        "\\n</tool_call>",
        '<tool_call>{"name": "{{ c.function.name }}", "arguments": ' + _ARGUMENTS + "}</tool_call>",
    ),
    "llama": _template(
        "Environment: ipython\\n" + _LIST + 'Respond with {"name": NAME, "parameters": ARGS}',
        '{"name": "{{ c.function.name }}", "parameters": ' + _ARGUMENTS + "}",
    ),
    "mistral": _template(
        "[AVAILABLE_TOOLS]" + _LIST + "[/AVAILABLE_TOOLS]",
        "{% if c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric"
        " strings with length 9!') }}{% endif %}[TOOL_CALLS] [{{ c | tojson }}]",
    ),
    "granite": _template(
        "You have tools: " + _LIST + "Call them as <|tool_call|>[...]",
        '<|tool_call|>[{"name": "{{ c.function.name }}", "arguments": ' + _ARGUMENTS + "}]",
    ),
    "harmony": _template(
        "namespace functions " + _LIST,
        "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
        + _ARGUMENTS + "<|call|>{{ m.thinking }}",
    ),
    "qwen3-coder": _template(
        _LIST + "<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n"
        "</function>\\n</tool_call>",
        "<tool_call>\\n<function={{ c.function.name }}>\\n"
        "{% for k, v in c.function.arguments.items() %}"
        "<parameter={{ k }}>\\n{{ v }}\\n</parameter>\\n{% endfor %}</function>\\n</tool_call>",
    ),
    "gemma4": _template(
        _LIST,
        "{{ '<|tool_call>call:' + c.function.name + '{' }}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}:<|\"|>{{ v }}<|\"|>{% endfor %}"
        "{{ '}<tool_call|>' }}",
    ),
    "lfm2": _template(
        "List of tools: <|tool_list_start|>[" + _LIST + "]<|tool_list_end|>",
        "<|tool_call_start|>[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}"
        "{{ k }}={{ v | tojson }}{% endfor %})]<|tool_call_end|>",
    ),
}  # fmt: skip
# Marks that are special tokens in the published tokenizers.
MARKS = {
    "mistral": ("[TOOL_CALLS]",), "llama": ("<|python_tag|>",), "granite": ("<|tool_call|>",),
    "gemma4": ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
}  # fmt: skip


def write_talker(
    path: Path, style: str, text: str, after: int, *, entries: int = 0, end: str = "<|im_end|>"
) -> int:
    """Write a checkpoint that says `text` and `end` after a prompt of `after` tokens.

    entries: tokens that a script adds to the vocabulary, for its size. Returns the number of
    tokens, which the embeddings exceed by `PADDING` rows.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    path.mkdir(parents=True, exist_ok=True)
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(BYTE_OF_SYMBOL))}
    vocabulary |= {f"Ġx{i}": len(vocabulary) + i for i in range(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [*SPECIAL, *MARKS.get(style, ())]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ORDINARY])
    tokenizer.save(str(path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": end,
                "chat_template": TEMPLATES[style]}  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_head": 1,
              "vocab_size": size + PADDING, "n_positions": POSITIONS, "n_embd": WIDTH,
              "n_inner": 8, "eos_token_id": tokenizer.token_to_id(end)}  # fmt: skip
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    ids = tokenizer.encode(text + end, add_special_tokens=False).ids
    assert len(ids) < WIDTH
    save_file(_make_weights(size + PADDING, ids, after), path / "model.safetensors")
    return size


def _make_weights(rows: int, ids: list[int], after: int) -> dict[str, np.ndarray]:
    """Return weights: position `after - 1 + i` has the direction in which only `ids[i]` points."""
    token_VD, place_TD = np.zeros((rows, WIDTH)), np.zeros((POSITIONS, WIDTH))
    for i, token in enumerate(ids):
        token_VD[token, i] = 1
        place_TD[after - 1 + i, i] = 1000
    shapes: dict[str, Any] = {
        "attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH), "mlp.c_fc": (WIDTH, 8),
        "mlp.c_proj": (8, WIDTH),
    }  # fmt: skip
    weights = {"wte.weight": token_VD, "wpe.weight": place_TD}
    for name, shape in shapes.items():
        weights[f"h.0.{name}.weight"] = np.zeros(shape)
        weights[f"h.0.{name}.bias"] = np.zeros(shape[1])
    for norm in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        weights |= {f"{norm}.weight": np.ones(WIDTH), f"{norm}.bias": np.zeros(WIDTH)}
    return {f"transformer.{name}": w.astype(np.float32) for name, w in weights.items()}
