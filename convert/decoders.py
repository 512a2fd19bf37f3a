"""Fields and rotary settings shared by the tables of `jaxllm.models.decoder`'s families."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.config.model import COMMON_ROPE_FIELDS, ROPE_FIELDS, Rope
from jaxllm.convert.tables import (
    COMMON_ALLOWED,
    COMMON_IGNORED,
    REQUIRED,
    Architecture,
    Field,
    divide_exactly,
    read_fields,
    refuse,
)
from jaxllm.errors import ConfigError
from jaxllm.models.decoder_config import DecoderConfig
from jaxllm.models.hybrid_attention import LocalRopeConfig

FIELDS = (
    Field("vocab_size", "vocab_size", REQUIRED),
    Field("hidden_size", "hidden_size", REQUIRED),
    Field("intermediate_size", "intermediate_size", REQUIRED),
    Field("num_hidden_layers", "num_hidden_layers", REQUIRED),
    Field("num_attention_heads", "num_attention_heads", REQUIRED),
    Field("num_key_value_heads", "num_key_value_heads", None),  # as many as query heads
    Field("head_dim", "head_dim", None),  # hidden_size / num_attention_heads
    Field("hidden_act", "hidden_act", "silu"),
    Field("max_position_embeddings", "max_position_embeddings", 2048),
    Field("rms_norm_eps", "norm_eps", 1e-6),
    Field("tie_word_embeddings", "tie_word_embeddings", False),
)
ATTENTION_BIAS = Field("attention_bias", "attention_bias", False)
MLP_BIAS = Field("mlp_bias", "mlp_bias", False)
SLIDING_WINDOW = Field("sliding_window", "sliding_window", None)
LAYER_TYPES = Field("layer_types", "layer_types", None)
PARTIAL_ROTARY_FACTOR = "partial_rotary_factor"
DIVISOR_FIELDS = frozenset({"short_factor", "long_factor", "divisors"})  # lists
ORIGINAL_CONTEXT = "original_max_position_embeddings"
ROPE_FIELD_NAMES = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
ROPE_SETTINGS = frozenset(
    {"type", "max_position_embeddings", *(field.name for field in dataclasses.fields(Rope))}
)
# Like `COMMON_ALLOWED`, for rotary settings.
ROPE_ALLOWED: dict[str, tuple[Any, ...]] = {
    "alpha": (1,),
    "interleaved": (False,),
    "llama_4_scaling_beta": (0,),
    "mrope_interleaved": (False,),
    "mrope_section": ([],),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderArchitecture(Architecture):
    """The table of a family of `jaxllm.models.decoder`.

    Attributes:
        theta: The default of `rope_theta`.
        prepare: Changes config.json before its fields are read.
        derive: Converts fields that differ from ours in more than their names. Called with our
            fields, the complaints so far, and config.json.
        finish: Converts fields back. Called with our configuration and config.json's fields.
    """

    config: type[DecoderConfig]
    theta: float = 10000.0
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda data: data
    derive: Callable[[dict[str, Any], list[str], Mapping[str, Any]], None] = lambda *_: None
    finish: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda config, data: data

    def parse_config(self, data: Mapping[str, Any]) -> DecoderConfig:
        prepared = self.prepare(data)
        fields, complaints = read_fields(self, prepared)
        context = fields.get("max_position_embeddings")
        rope = read_rope(prepared, context, complaints, theta=self.theta)
        if (
            rope is not None
            and rope.partial_rotary_factor
            and PARTIAL_ROTARY_FACTOR not in self.ignored_fields
        ):
            complaints.append(
                f"{PARTIAL_ROTARY_FACTOR} must be 1 or null, got {rope.partial_rotary_factor}:"
                " transformers rotates whole heads in this family"
            )
        fields["rope"] = rope
        refuse("config.json", complaints)
        if fields.get("num_key_value_heads") is None:
            fields["num_key_value_heads"] = fields["num_attention_heads"]
        if fields.get("head_dim") is None:
            fields["head_dim"] = divide_exactly("hidden_size", fields, "num_attention_heads")
        self.derive(fields, complaints, data)
        refuse("config.json", complaints)
        made = self.config(**fields)
        if "layer_types" not in fields and (stated := prepared.get("layer_types")) is not None:
            kinds = ("full_attention", "sliding_attention")
            meant = [kinds[made.window(i) is not None] for i in range(made.num_hidden_layers)]
            if stated != meant:
                complaints.append(
                    f"layer_types must be null or {meant[0]!r} in every layer, got {stated!r:.60}"
                )
        refuse("config.json", complaints)
        return made

    def write_config(self, config: Any) -> dict[str, Any]:
        """Return config.json's fields in a spelling that every version of transformers reads.

        Raises ConfigError for a kind of attention and for head counts that transformers' class
        refuses.
        """
        if config.attention is not None:
            raise ConfigError(
                f"attention of kind {config.attention.kind!r} cannot be saved in the Hugging Face"
                " format: transformers would use its own. Save the model in the native format"
            )
        check_heads(config, self)
        rope = write_rope(config.rope, config.max_position_embeddings)
        return self.finish(config, {**super().write_config(config), **rope})


def make_table(
    architecture: str,
    config: type[DecoderConfig],
    *fields: Field,
    allowed_values: Mapping[str, tuple[Any, ...]] | None = None,
    ignored_fields: frozenset[str] = frozenset(),
    omit: tuple[str, ...] = (),
    prefix: str = "model.",
    **options: Any,
) -> DecoderArchitecture:
    """Return a family's table.

    Args:
        architecture: The prefix of its class names.
        config: The class of its configurations.
        fields: Fields that extend or replace the common ones.
        omit: Common fields that the family lacks.
        options: Other arguments of `DecoderArchitecture`.
    """
    own = {f.key for f in fields} | {f.name for f in fields} | set(omit)
    common = tuple(f for f in FIELDS if f.key not in own and f.name not in own)
    options.setdefault("model_type", config.model_type)
    options.setdefault("classifier", f"{architecture}ForSequenceClassification")
    options.setdefault("architectures", (f"{architecture}ForCausalLM", f"{architecture}Model"))
    return DecoderArchitecture(
        config=config,
        fields=(*common, *fields),
        allowed_values={**COMMON_ALLOWED, **(allowed_values or {})},
        # use_sliding_window: if no row reads it, sliding_window alone decides.
        ignored_fields=COMMON_IGNORED
        | ROPE_FIELD_NAMES
        | {"layer_types"}
        | ({"use_sliding_window"} if "sliding_window" in own else set())
        | ignored_fields,
        buffers=(r"(layers\.\d+\.(self_attn|attention)\.)?rotary_emb\.inv_freq",),
        prefix=prefix,
        writes_prefix=True,
        **options,
    )


def check_heads(config: DecoderConfig, table: DecoderArchitecture) -> None:
    """Raise ConfigError for a head count that transformers' class refuses.

    It requires hidden_size to be a multiple of the head count or, if the table has no head_dim,
    exactly head count x head size.
    """
    hidden, heads, size = config.hidden_size, config.num_attention_heads, config.head_dim
    fixed = all(field.name != "head_dim" for field in table.fields)
    if fixed and heads * size != hidden:
        wanted = f"hidden_size {hidden} = num_attention_heads x {size}"
    elif table.heads_divide_width and hidden % heads:
        group = heads // config.num_key_value_heads
        fit = [n for n in range(group, heads + 1, group) if hidden % n == 0]
        wanted = f"one of {', '.join(map(str, fit))}" if fit else f"a divisor of {hidden}"
    else:
        return
    raise ConfigError(
        f"num_attention_heads is invalid in the Hugging Face format: got {heads}, expected {wanted}"
        f", as transformers' {table.architectures[0]} requires. Prune heads to such a number, or"
        " save the model in the native format"
    )


def resolve_layer_types(fields: dict[str, Any], slides: Callable[[int], bool]) -> None:
    """Derive missing layer_types. slides: whether a layer has a sliding window."""
    if fields["layer_types"] is None:
        names = ("full_attention", "sliding_attention")
        layers = range(fields["num_hidden_layers"])
        fields["layer_types"] = tuple(names[slides(i)] for i in layers)


def write_rope(rope: Rope, context: int) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` as in published files. context: maximum length."""
    settings = {k: v for k, v in dataclasses.asdict(rope).items() if v is not None}
    theta, share = settings.pop("rope_theta"), settings.pop("partial_rotary_factor", None)
    if rope.rope_type == "divisors":  # transformers has it only as this special case of longrope
        divisors = list(settings.pop("divisors"))
        settings = {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors}
        settings |= {"factor": 1.0, "attention_factor": 1.0, ORIGINAL_CONTEXT: context}
    data = {"rope_theta": theta, "rope_scaling": None if rope.rope_type == "default" else settings}
    return data if share is None else {**data, "partial_rotary_factor": share}


def set_rotary_share(data: Mapping[str, Any], share: float) -> Mapping[str, Any]:
    """Return config.json with this fraction of rotated dimensions if it has none."""
    settings = (data, data.get("rope_scaling"), data.get("rope_parameters"))
    if any(isinstance(s, Mapping) and s.get(PARTIAL_ROTARY_FACTOR) for s in settings):
        return data
    return {**data, PARTIAL_ROTARY_FACTOR: share}


def write_rotary_share(config: DecoderConfig, data: dict[str, Any]) -> dict[str, Any]:
    """Write the fraction of rotated dimensions even if it is 1, which is not the default."""
    return {PARTIAL_ROTARY_FACTOR: 1.0, **data}


def split_ropes(
    data: Mapping[str, Any], local_theta: Any
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return config.json with the rotary settings of full layers, and those of sliding ones.

    Settings outside `rope_parameters` are the full layers'; the others then have only a base.
    """
    ropes = data.get("rope_parameters")
    if not isinstance(ropes, Mapping) or not {"full_attention", "sliding_attention"} & set(ropes):
        return data, {"rope_theta": local_theta}
    local = ropes.get("sliding_attention")
    if local is None or isinstance(local, Mapping):
        local = {"rope_theta": local_theta, **(local or {})}
    return {**data, "rope_parameters": ropes.get("full_attention")}, {"rope_parameters": local}


def write_ropes(config: LocalRopeConfig, data: dict[str, Any]) -> dict[str, Any]:
    """Add the rotary settings of both kinds of layers as transformers 5 has them."""
    both = {
        kind: {k: v for k, v in dataclasses.asdict(rope).items() if v is not None}
        for kind, rope in (
            ("full_attention", config.rope),
            ("sliding_attention", config.local_rope),
        )
    }
    return {**data, "rope_theta": None, "rope_scaling": None, "rope_parameters": both}


def unknown_rope_settings(data: Mapping[str, Any]) -> list[str]:
    """Return the rotary settings in a config.json that no type has, as "rope_scaling.NAME"."""
    unknown = []
    for name in sorted(ROPE_FIELD_NAMES & data.keys()):
        given = data[name] if isinstance(data[name], Mapping) else {}
        inner = {k: v for k, v in given.items() if isinstance(v, Mapping)}  # per layer type
        for where, settings in {
            name: given,
            **{f"{name}.{k}": v for k, v in inner.items()},
        }.items():
            known = ROPE_SETTINGS | ROPE_ALLOWED.keys() | inner.keys()
            unknown += [f"{where}.{key}" for key in settings if key not in known]
    return unknown


def read_rope(
    data: Mapping[str, Any],
    context: Any,
    complaints: list[str],
    *,
    theta: float = 10000.0,
) -> Rope | None:
    """Read `rope_theta`, `rope_scaling` (published files), `rope_parameters` (transformers 5)."""
    settings: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = data.get(name)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            complaints.append(f"{name} must be an object, got {given!r:.60}")
            return None
        given = {k: v for k, v in given.items() if v is not None}
        spelled = given.pop("type", None)
        if spelled is not None and given.setdefault("rope_type", spelled) != spelled:
            complaints.append(f"{name} has both type {spelled!r} and another rope_type")
        for key, value in given.items():
            neutral = ROPE_ALLOWED.get(key, (value,))
            if isinstance(value, Mapping):
                complaints.append(f"{name}.{key} is an object, which this family does not support")
            elif value not in neutral:
                values = " or ".join(map(repr, neutral))
                complaints.append(f"{name}.{key} must be {values}, got {value!r:.60}")
            if settings.setdefault(key, value) != value:
                complaints.append(f"{key} differs between rope_scaling and rope_parameters")
    for name in ("rope_theta", *COMMON_ROPE_FIELDS):
        value = data.get(name)
        if value is not None and settings.setdefault(name, value) != value:
            complaints.append(f"{name} differs between rope_parameters and the top level")
    settings.setdefault("rope_theta", theta)
    kind = settings.setdefault("rope_type", "default")
    if kind == "su":  # LongRoPE's name in early files
        kind = settings["rope_type"] = "longrope"
    for name, absent in (("partial_rotary_factor", 1), ("mscale", 0), ("mscale_all_dim", 0)):
        if settings.get(name) == absent:
            del settings[name]
    if not isinstance(kind, str) or kind not in ROPE_FIELDS or kind == "divisors":  # jaxllm only
        known = ", ".join(name for name in ROPE_FIELDS if name != "divisors")
        complaints.append(f"rope_type {kind!r:.40} is not supported (known: {known})")
        return None
    required, optional = ROPE_FIELDS[kind]
    if ORIGINAL_CONTEXT in required and (said := data.get(ORIGINAL_CONTEXT, context)) is not None:
        settings.setdefault(ORIGINAL_CONTEXT, said)
    # Files contain leftovers of other types; transformers reads only the settings of its type.
    used = {"rope_type", "rope_theta", *required, *optional, *COMMON_ROPE_FIELDS}
    missing = [name for name in required if name not in settings]
    if missing:
        complaints.append(f"rope_type {kind!r} requires {', '.join(missing)}")
    if complaints:
        return None
    for name in DIVISOR_FIELDS & set(settings):
        if isinstance(settings[name], list):
            settings[name] = tuple(settings[name])
    rope = {k: v for k, v in settings.items() if k in used}
    short, long = rope.get("short_factor"), rope.get("long_factor")
    if kind == "longrope" and short == long and rope.get("attention_factor") == 1:
        shared = {name: rope[name] for name in COMMON_ROPE_FIELDS if name in rope}
        return Rope(rope_type="divisors", rope_theta=rope["rope_theta"], divisors=short, **shared)
    return Rope(**rope)
