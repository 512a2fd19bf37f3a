"""Long attention settings: validation, JSON, and the formats that can store them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm import models
from jaxllm.checkpoints.resolve import DEMO_DIR
from jaxllm.convert.gguf.settings import write_config as gguf_config
from jaxllm.convert.hf import open_hf, read_config, write_hf
from jaxllm.errors import ConfigError
from jaxllm.research.long_attention.settings import LONG_FIELDS, LongAttention
from tests.tiny_models import LLAMA, random_model

DILATED = {"kind": "dilated", "segment_lengths": (4, 12), "dilated_ratios": (1, 3)}
INFINI = {"kind": "infini", "segment_length": 8}


def config(**fields: Any) -> Any:
    return dataclasses.replace(random_model("llama")[0].config, **fields)


@pytest.mark.parametrize("fields", [DILATED, {**DILATED, "by": "heads", "dedupe": True}, INFINI])
def test_long_attention_round_trips_through_json(fields: dict[str, Any]) -> None:
    """The settings survive JSON in the native and Hugging Face forms, with equal hashes."""
    kind = LongAttention(**fields)
    long_config = config(attention=kind)
    written = json.loads(json.dumps(long_config.to_dict()))
    assert written["attention"] == json.loads(json.dumps(fields))
    assert models.config_from_dict(written) == long_config
    assert hash(models.config_from_dict(written)) == hash(long_config)
    data = {"model_type": "llama", **LLAMA, "attention": json.loads(json.dumps(fields))}
    assert read_config(data)[0].attention == kind
    assert [long_config.attention_kind(i) for i in range(3)] == [kind] * 3


def test_config_omits_absent_long_attention() -> None:
    """A config without long attention does not write the field, and null is read as none."""
    assert "attention" not in config().to_dict()
    assert random_model("gpt2")[0].config.attention_kind(0) is None
    assert read_config({"model_type": "llama", **LLAMA, "attention": None})[0].attention is None


def test_foreign_formats_refuse_long_attention(tmp_path: Path) -> None:
    """Hugging Face and GGUF files cannot hold the setting, and Mistral's config does
    not accept it.
    """
    long_config = config(attention=LongAttention(**DILATED))
    checkpoint = open_hf(DEMO_DIR / "llama")
    demo = dataclasses.replace(checkpoint.config, attention=long_config.attention)
    checkpoint = dataclasses.replace(checkpoint, config=demo)
    with pytest.raises(ConfigError, match=r"'dilated' cannot be saved in .* native format"):
        write_hf(tmp_path / "hf", checkpoint)
    with pytest.raises(ConfigError, match="GGUF does not support attention of kind 'dilated'"):
        gguf_config(long_config)
    with pytest.raises(ConfigError, match="attention must be null"):
        read_config({"model_type": "mistral", **LLAMA, "attention": DILATED})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "ring"}, r"kind 'ring' is not supported \(known: dilated, infini\)"),
        (
            {"segment_lengths": (12, 4), "dilated_ratios": (1, 2)},
            "segment_lengths must be strictly",
        ),
        ({"segment_lengths": (4, 4)}, "segment_lengths must be strictly"),
        ({"segment_lengths": (6, 12), "dilated_ratios": (1, 1)}, "dilated_ratios must be strictly"),
        ({"dilated_ratios": (2, 3)}, r"must include 1, got \[2, 3\]: .* pair \(w, 1\)"),
        ({"dilated_ratios": (1, 13)}, "dilated ratio 13 exceeds its segment length 12"),
        ({"segment_lengths": (4, 10)}, "segment length 10 must be a multiple of 4"),
        ({"dilated_ratios": (1,)}, "segment_lengths and dilated_ratios differ in length: 2 and 1"),
        ({"segment_lengths": None}, "segment_lengths is missing"),
        ({"segment_lengths": ()}, "segment_lengths must be"),
        ({"segment_lengths": (0, 12)}, "segment_lengths.* must be .*>= 1"),
        ({"dilated_ratios": (1, 2.5)}, "dilated_ratios"),
        ({"by": "rows"}, "by must be"),
        ({"dedupe": 1}, "dedupe must be"),
        ({"segment_length": 4}, "segment_length is not used by this kind"),
        ({"update": "delta"}, "update is not used by this kind"),
        ({**INFINI, "segment_lengths": None, "dilated_ratios": None, "segment_length": 0}, "must"),
        ({**INFINI, "dilated_ratios": None}, "segment_lengths is not used by this kind"),
        (
            {**INFINI, "segment_lengths": None, "dilated_ratios": None, "update": "twice"},
            "update must be",
        ),
    ],
)
def test_long_attention_refuses_bad_settings(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LongAttention(**{**DILATED, **change})


def test_long_attention_accepts_paper_settings() -> None:
    """LongNet's own setting (section 4.1) is valid, although 6 does not divide 16,384, nor 12
    divide 32,768.
    """
    w, r = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)
    kind = LongAttention(kind="dilated", segment_lengths=w, dilated_ratios=r)
    assert kind.pairs[3:] == ((16384, 6), (32768, 12))
    assert kind.period == 32768


@pytest.mark.parametrize("kind", LONG_FIELDS)
def test_long_attention_requires_fields_of_kind(kind: str) -> None:
    """A missing required field of either kind is an error that names it."""
    required, _ = LONG_FIELDS[kind]
    values: dict[str, Any] = {name: (4,) if name[-1] == "s" else 4 for name in required}
    values |= {"dilated_ratios": (1,)} if kind == "dilated" else {}
    for name in required:
        with pytest.raises(ConfigError, match=f"{name} is missing"):
            LongAttention(kind=kind, **{**values, name: None})


def test_config_refuses_incompatible_long_attention() -> None:
    """Sliding windows, more pairs than layers or heads, and unknown or malformed fields are
    refused.
    """
    kind = LongAttention(**DILATED)
    with pytest.raises(ConfigError, match="'dilated' excludes sliding_window"):
        config(attention=kind, sliding_window=5)
    three = {"segment_lengths": (4, 8, 16), "dilated_ratios": (1, 2, 4)}
    with pytest.raises(ConfigError, match="by layers has 3 pairs for 2 layers"):
        config(attention=dataclasses.replace(kind, by="layers", **three))
    with pytest.raises(ConfigError, match="by heads has 3 pairs for 8 heads"):
        config(attention=dataclasses.replace(kind, by="heads", **three))
    data = {"model_type": "llama", **LLAMA, "attention": {**DILATED, "colour": 3}}
    with pytest.raises(ConfigError, match=r"config.json: attention: .*colour"):
        read_config(data)
    with pytest.raises(ConfigError, match=r"config.json: attention"):
        read_config({**data, "attention": "dilated"})


def test_with_layers_moves_attention_pairs() -> None:
    """With pairs by layers, each layer takes its pair along, and only layers with equal pairs count
    as equal.
    """
    kind = LongAttention(
        kind="dilated", by="layers", segment_lengths=(4, 8, 8), dilated_ratios=(1, 2, 4)
    )
    long_config = config(attention=kind, num_hidden_layers=3)
    assert [long_config.attention_kind(i).pairs for i in range(3)] == [
        ((4, 1),),
        ((8, 2),),
        ((8, 4),),
    ]
    assert long_config.with_layers([2, 0]).attention.pairs == ((8, 4), (4, 1))
    assert [long_config.first_equal_layer(i) for i in range(3)] == [0, 1, 2]
    assert [config(num_hidden_layers=3).first_equal_layer(i) for i in range(3)] == [0, 0, 0]
