"""The `quantization_config` of GPTQ and AWQ checkpoints: how their integers are stored.

It is read by a table, like the model's own fields; unknown fields are refused by name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.convert.tables import REQUIRED, Field, FieldTable, read_fields, refuse, unknown_fields
from jaxllm.errors import ConfigError

CONFIG_KEY = "quantization_config"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """Storage of the quantized matrices of a checkpoint.

    Attributes:
        method: "gptq" or "awq".
        group_size: The number of columns that share a scale; None: a whole row.
        zero_offset: The number subtracted from stored zero points, 1 in version 1 of GPTQ's format.
        symmetric: Whether all zero points must be the middle level; None: any.
        act_order: Whether a column may belong to any group.
    """

    method: str
    bits: int
    group_size: int | None
    zero_offset: int = 0
    symmetric: bool | None = None
    act_order: bool = False


# Settings of the quantization run, and the choice of kernels.
_IGNORED = frozenset(
    {
        "act_group_aware",
        "backend",
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "damp_auto_increment",
        "damp_percent",
        "dataset",
        "disable_exllama",
        "do_fuse",
        "exllama_config",
        "fuse_max_seq_len",
        "lm_head",  # its tensors show it
        "max_input_length",
        "meta",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "modules_in_block_to_quantize",  # the tensors show it
        "modules_to_fuse",
        "modules_to_not_convert",  # the tensors show it
        "module_name_preceding_first_block",
        "mse",
        "pad_token_id",
        "quant_method",
        "static_groups",
        "tokenizer",
        "true_sequential",
        "use_cuda_fp16",
        "use_exllama",
    }
)


_FORMATS = ("gptq", "gptq_v2")
_COMMON = (Field("bits", "bits", REQUIRED), Field("group_size", "group", REQUIRED))
_GPTQ = FieldTable(
    fields=(
        *_COMMON,
        Field("sym", "symmetric", True),
        Field("desc_act", "act_order", False),
        Field("checkpoint_format", "version", None),
        Field("format", "same_version", None),  # newer files' second name
        Field("dynamic", "dynamic", None),
    ),
    allowed_values={
        "awq_gemm_checkpoint": (False,),
        "is_marlin_format": (False,),
        "pack_dtype": ("int32",),
    },
    ignored_fields=_IGNORED,
)
_AWQ = FieldTable(
    fields=_COMMON,
    allowed_values={
        "version": ("gemm", "GEMM"),
        "format": ("gemm", "GEMM"),
        "zero_point": (True, False),  # the stored zero points decide
        "sym": (True, False),  # transformers writes it for every method
        "desc_act": (False,),
    },
    ignored_fields=_IGNORED,
)
_METHODS = {"gptq": (_GPTQ, (2, 3, 4, 8)), "awq": (_AWQ, (4,))}


def read_scheme(data: Mapping[str, Any], where: str = f"config.json: {CONFIG_KEY}") -> Scheme:
    """Return how the weights are stored, from the contents of a `quantization_config`.

    Args:
        where: The place of the settings, for messages.

    Raises:
        ConfigError: With every option that is missing, unknown or not supported.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be an object, got {data!r:.60}")
    method = data.get("quant_method")
    if method is None and {"group_size", "bits"} <= data.keys():
        raise ConfigError(
            f"{where} has no quant_method: MLX writes such quantized checkpoints, which are not"
            " supported. Load the unquantized checkpoint"
        )
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigError(
            f"{where}: quant_method {method!r:.40} is not supported (known: {', '.join(_METHODS)},"
            " compressed-tensors). Load the unquantized checkpoint"
        )
    table, widths = _METHODS[method]
    stated = {name: value for name, value in data.items() if value is not None}
    fields, complaints = read_fields(table, stated)
    complaints += [f"{name} is not supported" for name in unknown_fields(table, stated)]
    bits, group = fields.get("bits"), fields.get("group")
    if "bits" in fields and (type(bits) is not int or bits not in widths):
        known = ", ".join(map(str, widths))
        complaints.append(f"bits {bits!r:.40} is not supported (known for {method}: {known})")
    if "group" in fields and (type(group) is not int or not (group == -1 or group > 0)):
        complaints.append(f"group_size must be -1 or a positive number, got {group!r:.40}")
    if method == "awq":
        if data.get("backend") == "llm-awq":
            complaints.append("backend 'llm-awq' has another layout, which is not supported")
    else:
        complaints += _check_gptq_fields(fields)
    refuse(where, complaints)
    assert isinstance(bits, int)
    assert isinstance(group, int)
    group = None if group == -1 else group
    if method == "awq":
        return Scheme(method=method, bits=bits, group_size=group)
    version = fields["version"] or fields["same_version"] or _FORMATS[0]
    return Scheme(
        method=method,
        bits=bits,
        group_size=group,
        zero_offset=1 if version == "gptq" else 0,
        symmetric=True if fields["symmetric"] else None,
        act_order=fields["act_order"],
    )


def _check_gptq_fields(fields: Mapping[str, Any]) -> list[str]:
    """Return complaints about the fields that only GPTQ has."""
    complaints = [
        f"{key} must be true or false, got {fields[name]!r:.40}"
        for key, name in (("sym", "symmetric"), ("desc_act", "act_order"))
        if type(fields[name]) is not bool
    ]
    said = [v for v in (fields["version"], fields["same_version"]) if v is not None]
    for version in said:
        if version not in _FORMATS:
            known = ", ".join(_FORMATS)
            complaints.append(
                f"checkpoint_format {version!r:.40} is not supported (known: {known})"
            )
    if len(said) == 2 and said[0] != said[1]:
        complaints.append(f"checkpoint_format {said[0]!r:.40} differs from format {said[1]!r:.40}")
    dynamic = fields["dynamic"]
    if dynamic is not None and not (
        isinstance(dynamic, Mapping) and all(rule.startswith("-:") for rule in dynamic)
    ):
        complaints.append(
            "dynamic sets options per module, which is not supported (only '-:' rules are):"
            f" {dynamic!r:.80}"
        )
    return complaints
