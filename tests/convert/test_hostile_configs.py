"""config.json's fields are checked before they are used, in every family."""

import contextlib
import tracemalloc
from typing import Any

import pytest

from jaxllm.convert.hf import TABLES, read_config
from jaxllm.errors import ConfigError
from tests.tiny_models import theirs

HOSTILE: tuple[Any, ...] = (
    "x", "4", "", True, False, 0, -1, 1, 2, 0.5, -0.0, 1e300, float("inf"), float("nan"),
    2**31, 2**63, 10**30, [], [[]], [None], [0], ["0"], [0.5, "x"], [1] * 5000, {}, {"": None},
    {"x": [1]}, "full_attention", ["full_attention"], {"rope_type": 3}, {"factor": "8"},
    {"full_attention": 1},
)  # fmt: skip
MANY = 3_000_000  # of layers, labels, experts, ...: small enough that a fault does not end the test
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "layer_types")
OTHERS = ("attention", "n_ctx", "architectures", "model_type", "quantization_config", "id2label",
          "num_labels", "pad_token_id", "problem_type")  # fmt: skip


def _names(kind: str) -> list[str]:
    table = TABLES[kind]
    rows = (field.key for field in table.fields)
    return list(dict.fromkeys([*rows, *table.aliases, *table.allowed_values, *ROPE, *OTHERS]))


def _configs(kind: str, values: tuple[Any, ...]) -> Any:
    """Yield a valid config.json in which one field, or one within a rotary setting, is replaced."""
    data = theirs(kind).to_dict()
    classifier = TABLES[kind].classifier
    for name in _names(kind):
        for value in values:
            head = {"architectures": [classifier]} if name in OTHERS and classifier else {}
            yield name, {**data, **head, name: value}


@pytest.mark.parametrize("kind", TABLES)
def test_read_config_checks_every_field_first(kind: str) -> None:
    """With any field replaced by a value of another type or size, read_config returns a
    configuration or raises ConfigError, in one line that names the field.
    """
    for name, data in _configs(kind, HOSTILE):
        try:
            read_config(data)
        except ConfigError as error:
            assert "\n" not in str(error)
        except Exception as error:
            raise AssertionError(f"{name}: {data[name]!r:.60}: {error!r}") from error


@pytest.mark.parametrize("kind", TABLES)
def test_read_config_uses_no_memory_for_counts(kind: str) -> None:
    """A count of millions is refused, or accepted, before anything of that size is made."""
    tracemalloc.start()
    try:
        for name, data in _configs(kind, (MANY,)):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with contextlib.suppress(ConfigError):
                read_config(data)
            assert tracemalloc.get_traced_memory()[1] - before < 1 << 20, name
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", TABLES)
def test_read_config_names_the_files_fields(kind: str) -> None:
    """An error names the field as config.json spells it, for each row of the table."""
    aliases = TABLES[kind].aliases
    data = {k: v for k, v in theirs(kind).to_dict().items() if k not in aliases}
    for field in TABLES[kind].fields:
        with pytest.raises(ConfigError, match=rf"\b{field.key} must be .*{{"):
            read_config({**data, field.key: {"x": 1}})
