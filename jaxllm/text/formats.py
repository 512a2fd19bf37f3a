"""The three file formats of tokenizers, all read as one `tokenizer.json` tree.

The configuration files (special tokens, begin-of-text token) are merged into that tree here, so
that its users need not know the format. `auto_map`, `tokenizer_class` and all other fields that
name code are ignored. Any of the formats is written as Hugging Face's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.files import atomic_file, path_exists, path_inside, read_json, write_json
from jaxllm.runtime.schema import as_schema
from jaxllm.text.byte_level import read_byte_level
from jaxllm.text.sentencepiece_model import derive_merges, make_added_token, read_sentencepiece
from jaxllm.text.tokenizer_limits import check_tree

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "modules.json",
    "config_sentence_transformers.json",
)
ADDITIONAL_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja
ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")

# The usual token of a role that no file names (as in GPT-2's own tokenizer_config.json).
_USUAL_NAMES = {"bos": ("<s>", "<|endoftext|>"), "eos": ("</s>", "<|endoftext|>")}
_FORMATS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))


@dataclass(frozen=True)
class TokenizerTree:
    """A tokenizer as data: the tree for `tokenizers`, and settings outside it.

    `tree` has the structure of a `tokenizer.json`; every added token in it has its final id.
    `roles` maps those of `ROLES` that the checkpoint defines to the token's text. `adds_bos`:
    whether prompts of this checkpoint start with a begin-of-text token. end: the token that its
    post-processor puts after a text. `scores`: those of SentencePiece's pieces by id, NaN for
    pieces that no merge makes; None if the merges are in `tree`.
    """

    tree: dict[str, Any]
    roles: Mapping[str, str]
    adds_bos: bool
    end: str | None = None
    scores: Sequence[float] | None = None

    def with_merges(self) -> dict[str, Any]:
        """Return the tree with its merges: two seconds for 262,144 pieces with scores."""
        if self.scores is None:
            return self.tree
        model, scores = self.tree["model"], self.scores
        merges = derive_merges({piece: scores[i] for piece, i in model["vocab"].items()})
        return self.tree | {"model": model | {"merges": merges}}


def tokenizer_files(directory: Path) -> list[Path]:
    """Return the tokenizer files in a directory, for copying them with a checkpoint.

    With them come the settings of embeddings: sentence-transformers' files, and the folder of
    the pooling's; and the folder of further chat templates.
    """
    files = [file for name in TOKENIZER_FILES if (file := directory / name).is_file()]
    folders = [file.parent for file in sorted(directory.glob("*_Pooling/config.json"))]
    folders += filter(Path.is_dir, [directory / ADDITIONAL_TEMPLATES])
    return [*files, *(folder for folder in folders if not folder.is_symlink())]


def find_tokenizer_format(directory: Path) -> tuple[str, ...] | None:
    """Return the file names of the first format that is complete in a directory, or None."""
    for names in _FORMATS:
        if all(path_exists(directory / name) for name in names):
            return names
    return None


def read_tree(directory: Path) -> TokenizerTree:
    """Read the tokenizer in a directory.

    Raises:
        CheckpointError: there is none, or one of its files is malformed or contradicts another.
    """
    form = find_tokenizer_format(directory)
    if form is None:
        looked_for = ", ".join(" with ".join(names) for names in _FORMATS)
        raise CheckpointError(f"no tokenizer in {directory}: looked for {looked_for}")
    config = _read_config(directory)
    own_roles: dict[str, str] = {}
    scores = None
    match form[0]:
        case "tokenizer.json":
            tree = read_json(path_inside(directory, form[0]))
        case "vocab.json":
            tree = read_byte_level(
                directory, add_prefix_space=config.get("add_prefix_space") is True
            )
        case _:
            tree, own_roles, scores = read_sentencepiece(path_inside(directory, form[0]))
    check_tree(tree, str(directory / form[0]))
    model, added = tree["model"], tree.setdefault("added_tokens", [])
    if (unknown := token_text(model.get("unk_token"))) is not None:
        own_roles["unk"] = unknown

    known = token_ids(tree)
    if len(set(known.values())) != len(known):
        raise CheckpointError(f"{directory / form[0]}: two tokens have the same id")
    tokens = _read_token_fields(directory, config)
    names = {index: content for content, index in known.items()}
    for content, token in tokens.items():
        index = known.setdefault(content, token["id"])
        if index != token["id"] or names.setdefault(index, content) != content:
            raise CheckpointError(
                f"{directory}: contradictory ids: {content!r} is {token['id']} in the"
                f" configuration, but {names[index]!r} is {index} in {form[0]}"
            )
    roles = _find_roles(directory, config, known, default=own_roles)
    special = {*roles.values(), *_read_special_texts(directory, config)}
    tree["added_tokens"] = _merge_tokens(added, tokens, special, known)
    tree["truncation"] = tree["padding"] = None
    if model.get("type", "BPE") == "BPE":
        model["dropout"] = None
    says = config.get("add_bos_token")
    if not isinstance(says, bool):
        says = form[0] == "tokenizer.model" or roles.get("bos") in _tokens_around(tree, 0)
    end = next((token for token in _tokens_around(tree, -1) if token in known), None)
    if end is None and config.get("add_eos_token") is True:
        end = roles.get("eos")
    return TokenizerTree(tree, roles, says and "bos" in roles, end, scores)


def token_text(value: Any) -> str | None:
    """Return the text of a token given as a string or as AddedToken fields, else None."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Read `{"bos_token": "<s>", ...}` from the configuration files in a directory.

    Raises:
        CheckpointError: a file is malformed.
    """
    config = _read_config(directory)
    names = ((f"{role}_token", token_text(config.get(f"{role}_token"))) for role in ROLES)
    return {name: content for name, content in names if content is not None}


def _read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if path_exists(directory / name):
            config |= read_json(path_inside(directory, name))
    return config


def token_ids(tree: dict[str, Any]) -> dict[str, int]:
    """Return the ids of all tokens of a tokenizer.json."""
    vocab = tree["model"]["vocab"]
    pieces = vocab if isinstance(vocab, dict) else {p: index for index, (p, _) in enumerate(vocab)}
    added = {token["content"]: token["id"] for token in tree["added_tokens"]}
    return pieces if added.items() <= pieces.items() else pieces | added


def _read_token_fields(directory: Path, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Read `added_tokens.json` and `added_tokens_decoder`; the latter takes precedence."""
    declared: dict[str, dict[str, Any]] = {}
    if path_exists(path := directory / "added_tokens.json"):
        ids = as_schema(read_json(path_inside(directory, path.name)), dict[str, int], str(path))
        for content, index in ids.items():
            declared[content] = make_added_token(index, content, special=False)
    decoder = config.get("added_tokens_decoder") or {}
    path = directory / "tokenizer_config.json"
    if not isinstance(decoder, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder must be an object")
    for key, fields in decoder.items():
        text = token_text(fields)
        if text is None or not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise CheckpointError(f"{path}: added_tokens_decoder[{key!r}] is not a token")
        token = make_added_token(int(key), text, special=False)
        flags = fields if isinstance(fields, dict) else {}
        declared[text] = token | {k: v for k, v in flags.items() if k in token and k != "id"}
    return declared


def _read_special_texts(directory: Path, config: dict[str, Any]) -> set[str]:
    listed: set[str] = set()
    for field in ("additional_special_tokens", "extra_special_tokens"):
        values = config.get(field) or []
        if not isinstance(values, list | dict):
            raise CheckpointError(f"{directory}: {field} must be a list or an object")
        texts = (token_text(v) for v in (values.values() if isinstance(values, dict) else values))
        listed |= {text for text in texts if text is not None}
    return listed


def _find_roles(
    directory: Path,
    config: dict[str, Any],
    token_ids: Mapping[str, int],
    *,
    default: dict[str, str],
) -> dict[str, str]:
    """Return role -> text; a token that is not in the vocabulary gets no role."""
    roles = {}
    for role in ROLES:
        field = f"{role}_token"
        if field in config:
            content = token_text(config[field])
            if content is None and config[field] not in (None, "", False):
                raise CheckpointError(f"{directory}: {field} must be a token, a string or null")
        else:
            usual = (name for name in _USUAL_NAMES.get(role, ()) if name in token_ids)
            content = default.get(role) or next(usual, None)
        if content is not None and content in token_ids:
            roles[role] = content
    return roles


def _merge_tokens(
    added: Iterable[dict[str, Any]],
    declared: Mapping[str, dict[str, Any]],
    special: Iterable[str],
    token_ids: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Return all added tokens by id; special ones are matched before normalization.

    A single character that a configuration uses for padding ("!") does not become special.
    """
    merged = dict(declared) | {token["content"]: token for token in added}
    for content in special:
        if content in merged:
            merged[content] = merged[content] | {"special": True}
        elif content in token_ids and len(content) > 1:
            merged[content] = make_added_token(token_ids[content], content, special=True)
    tokens = (t | {"normalized": False} if t.get("special") else t for t in merged.values())
    return sorted(tokens, key=lambda token: token["id"])


def _tokens_around(tree: dict[str, Any], place: int) -> list[str]:
    """Return the special tokens that the post-processor puts before (0) or after (-1) a text."""
    processor = tree.get("post_processor")
    if not isinstance(processor, dict):
        return []
    tokens, steps = [], processor.get("processors") or [processor]
    for step in steps if isinstance(steps, list) else []:
        single = step.get("single") if isinstance(step, dict) else None
        item = single[place] if isinstance(single, list) and single else None
        special = item.get("SpecialToken") if isinstance(item, dict) else None
        if isinstance(special, dict) and isinstance(special.get("id"), str):
            tokens.append(special["id"])
    return tokens


def write_tokenizer(
    source: TokenizerTree, templates: Mapping[str, str], directory: Path
) -> list[Path]:
    """Write tokenizer.json, tokenizer_config.json and chat templates; return their paths.

    transformers can read them, and then prepends the begin-of-text token if `adds_bos` is set.

    Raises:
        CheckpointError: one cannot be written.
    """
    bos = source.roles.get("bos")
    tree = {**source.with_merges(), "truncation": None, "padding": None}
    if source.adds_bos and bos is not None:
        tree["post_processor"] = _bos_processor(bos, tree["model"]["vocab"][bos])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": source.adds_bos,
        "clean_up_tokenization_spaces": False,
        **({} if source.end is None else {"add_eos_token": True}),
        **{f"{role}_token": text for role, text in source.roles.items()},
    }
    files = {"tokenizer.json": tree, "tokenizer_config.json": config}
    for name, data in files.items():
        write_json(directory / name, data)
    paths = [directory / name for name in files]
    folder = directory / ADDITIONAL_TEMPLATES
    if templates.keys() - {"default"}:
        folder.mkdir()
        paths.append(folder)
    for name, template in templates.items():
        path = folder / f"{name}.jinja"
        if name == "default":
            paths.append(path := directory / "chat_template.jinja")
        with atomic_file(path, "w") as file:
            file.write(template)
    return paths


def _bos_processor(bos: str, index: int) -> dict[str, Any]:
    """Return a post-processor that prepends this token to a text."""
    token, first = (
        {"SpecialToken": {"id": bos, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    second = [{"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": [token, first],
        "pair": [token, first, *second],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }
