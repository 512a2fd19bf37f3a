"""PEFT's adapter_config.json (version 0.21); every field is read, known as harmless, or rejected.

PEFT itself only warns of unknown fields and ignores them, which may change the adapter.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.adapters.lora_config import LoraConfig
from jaxllm.errors import CheckpointError, ConfigError

# Fields of `LoraConfig` with the same name and meaning.
READ_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(LoraConfig)
    if field.name not in ("rules", "init_lora_weights")
)
# Fields without effect on the trained adapter: provenance, runtime and initialization.
IGNORED_FIELDS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ephemeral_gpu_offload",
        "eva_config",
        "fan_in_fan_out",  # the layout of the base checkpoint, known from its table
        "inference_mode",
        "init_lora_weights",  # see _INITS
        "loftq_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)
ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
}
# Initializations that leave the base unchanged. Others (pissa, olora, corda, loftq, lora_ga) modify
# the base weights too, so the adapter does not fit the original base.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_EMPTY_VALUES: tuple[Any, ...] = (None, False, [], {})
_REMEDY = "merge it with PEFT (merge_and_unload) and load the merged model"


def parse_peft_config(data: Mapping[str, Any], where: str) -> LoraConfig:
    """Parse adapter_config.json. Raises CheckpointError with all unsupported fields."""
    complaints = []
    for name, values in ALLOWED_VALUES.items():
        if name in data and data[name] not in values:
            known = " or ".join(map(repr, values))
            complaints.append(f"{name} must be {known}, got {data[name]!r:.60}")
    init = data.get("init_lora_weights")
    if not any(
        init is value or (isinstance(init, str) and init == value) for value in _PLAIN_INITS
    ):
        complaints.append(
            f"init_lora_weights {init!r:.60} requires a modified base model; save the adapter as"
            " plain LoRA (path_initial_model_for_weight_conversion)"
        )
    for name, value in data.items():
        known_name = name in READ_FIELDS or name in IGNORED_FIELDS or name in ALLOWED_VALUES
        if not known_name and not any(value is x or value == x for x in _EMPTY_VALUES):
            complaints.append(f"{name} is not supported (got {value!r:.60})")
    if "peft_type" not in data:
        complaints.append("peft_type is missing")
    if data.get("target_modules") is None:
        complaints.append("target_modules is missing")
    if complaints:
        raise CheckpointError(f"{where}: {'; '.join(complaints)}; {_REMEDY}")
    fields = {name: data[name] for name in READ_FIELDS if data.get(name) is not None}
    if init == "gaussian":
        fields["init_lora_weights"] = "gaussian"
    try:
        return LoraConfig(**fields)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


def make_peft_config(
    lora: LoraConfig,
    target_modules: list[str],
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    *,
    transposed: bool,
    base: str | None,
) -> dict[str, Any]:
    """Return the contents of adapter_config.json for PEFT.

    ranks, alphas: by module name, where they differ from the common ones. transposed: whether the
    base's linear layers are Conv1D. base: name or directory of the base model.
    """
    return {
        "alpha_pattern": {name: _as_json_number(alpha) for name, alpha in alphas.items()},
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": None,
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "init_lora_weights": "gaussian" if lora.init_lora_weights == "gaussian" else True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _as_json_number(lora.lora_alpha),
        "lora_bias": False,
        "lora_dropout": lora.lora_dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.r,
        "rank_pattern": dict(ranks),
        "revision": None,
        "target_modules": target_modules,
        "task_type": "CAUSAL_LM",
        "use_dora": lora.use_dora,
        "use_rslora": lora.use_rslora,
    }


def _as_json_number(alpha: float) -> float | int:
    """Return whole numbers as int, as PEFT writes them."""
    return int(alpha) if float(alpha).is_integer() else alpha
