"""PEFT's adapter_config.json (version 0.21): every field is read, known to be harmless, or refused.

What PEFT itself does not know it warns of, and leaves out; an adapter without it is another.
"""

from collections.abc import Mapping
from typing import Any

from jaxllm.adapters.config import LoraConfig
from jaxllm.errors import CheckpointError, ConfigError

# Fields that are ours under the same name.
READ = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
)
# Without effect on what the matrices do: whose and when they are, and how they were found.
IGNORED = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ephemeral_gpu_offload",
        "eva_config",
        "fan_in_fan_out",  # how the base's file lies: its table knows
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
ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
}
# Those that leave the base as it is; others (pissa, olora, corda, loftq, lora_ga) take from it what
# they put into the adapter, whose base is then no longer the one that it names.
_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_NOTHING: tuple[Any, ...] = (None, False, [], {})
_REMEDY = "merge it with PEFT (merge_and_unload) and load the model that it gives"


def read_config(data: Mapping[str, Any], where: str) -> LoraConfig:
    """adapter_config.json as a `LoraConfig`.

    Raises CheckpointError with every field that asks for what is not supported, in one message.
    """
    complaints = []
    for name, values in ALLOWED.items():
        if name in data and data[name] not in values:
            known = " or ".join(map(repr, values))
            complaints.append(f"{name} must be {known}, got {data[name]!r:.60}")
    init = data.get("init_lora_weights")
    if not any(init is value or (isinstance(init, str) and init == value) for value in _INITS):
        complaints.append(
            f"init_lora_weights {init!r:.60} changes the base model, which this adapter then needs"
            " changed; save it as plain LoRA (path_initial_model_for_weight_conversion)"
        )
    for name, value in data.items():
        known_name = name in READ or name in IGNORED or name in ALLOWED
        if not known_name and not any(value is x or value == x for x in _NOTHING):
            complaints.append(f"{name} is not supported (got {value!r:.60})")
    if "peft_type" not in data:
        complaints.append("peft_type is missing")
    if data.get("target_modules") is None:
        complaints.append("target_modules is missing")
    if complaints:
        raise CheckpointError(f"{where}: {'; '.join(complaints)}; {_REMEDY}")
    given = {name: data[name] for name in READ if data.get(name) is not None}
    if init == "gaussian":
        given["init_lora_weights"] = "gaussian"
    try:
        return LoraConfig(**given)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


def written_config(
    lora: LoraConfig,
    target_modules: list[str],
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    *,
    transposed: bool,
    base: str | None,
) -> dict[str, Any]:
    """The fields that PEFT writes of such an adapter.

    ranks, alphas: of modules by name where they are not the common ones. transposed: whether the
    base's linears are Conv1D. base: its name or directory.
    """
    return {
        "alpha_pattern": {name: _plain(alpha) for name, alpha in alphas.items()},
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": None,
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "init_lora_weights": "gaussian" if lora.init_lora_weights == "gaussian" else True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _plain(lora.lora_alpha),
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


def _plain(alpha: float) -> float | int:
    """As PEFT writes it."""
    return int(alpha) if float(alpha).is_integer() else alpha
