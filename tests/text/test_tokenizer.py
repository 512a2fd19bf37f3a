"""Tokenizers: ids of the checkpoint, no unrequested special tokens, errors that name the file."""

import ast
import contextlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

import jaxllm.text
from jaxllm.errors import CheckpointError, TokenError
from jaxllm.text import TOKENIZER_FILES, Tokenizer, has_tokenizer
from jaxllm.text.byte_level import symbols_to_bytes
from jaxllm.text.tokenizer import _hide_special
from tests.text.conftest import TEXTS

FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def tree(vocab: dict[str, int] | list[Any], **fields: Any) -> dict[str, Any]:
    """Return a tokenizer.json whose vocabulary is single characters."""
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": None}
    return {"version": "1.0", "model": model | fields.pop("model", {}), "added_tokens": []} | fields


def added(index: int, content: str, **fields: Any) -> dict[str, Any]:
    return {"id": index, "content": content, "special": True, **FLAGS, **fields}


def test_symbols_to_bytes_inverts_byte_level_alphabet() -> None:
    pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in map(chr, range(0x800)):
        [(symbols, _)] = pre_tokenizer.pre_tokenize_str(character)
        assert symbols_to_bytes(symbols) == character.encode()


def test_byte_level_bpe_round_trips_any_text(byte_level: Path) -> None:
    tokenizer = Tokenizer.from_directory(byte_level)

    @given(TEXTS)
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


@pytest.mark.parametrize("name", ["byte_level", "mergeable_specials", "spm"])
def test_encode_never_produces_special_tokens(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = Tokenizer.from_directory(request.getfixturevalue(name))
    control = tokenizer.special_ids - {tokenizer.unk_id}
    assert control

    @given(TEXTS)
    def check(text: str) -> None:
        assert control.isdisjoint(tokenizer.encode(text))

    check()


def test_encode_ignores_merges_that_spell_special_tokens(mergeable_specials: Path) -> None:
    """The tokenizers library would merge '<s>' into the bos token; encode does not."""
    raw = tokenizers.Tokenizer.from_file(str(mergeable_specials / "tokenizer.json"))
    raw.encode_special_tokens = True
    tokenizer = Tokenizer.from_directory(mergeable_specials)
    assert tokenizer.bos_id in raw.encode("<s>").ids
    assert tokenizer.bos_id not in tokenizer.encode("<s>")
    assert tokenizer.decode(tokenizer.encode("a <s>cat</s>")) == "a <s>cat</s>"


def test_hiding_special_tokens_costs_lookups_only() -> None:
    """What it costs to hide special tokens does not grow with their number: each piece and merge is
    looked up, and no list of the tokens is searched. Only merges that involve one are removed.
    """

    class Lookups(dict[str, str]):
        count = 0

        def __contains__(self, name: object) -> bool:
            self.count += 1
            return super().__contains__(name)

        def get(self, name: str, default: Any = None) -> Any:
            self.count += 1
            return super().get(name, default)

        def __iter__(self) -> Any:
            raise AssertionError("the tokens are searched one by one")

    merges = [("a", "b"), ("ab", "<s>"), ("<", "s>"), "a <7>", "< 7>", "b c"]
    content = tree({name: i for i, name in enumerate("abc")}, added_tokens=[added(3, "<s>")])
    content["model"]["merges"] = merges * 50
    hidden = Lookups({"<s>": "x", **{f"<{i}>": f"y{i}" for i in range(2000)}})
    kept = _hide_special(content, hidden)["model"]["merges"]
    assert kept == [("a", "b"), "b c"] * 50
    assert hidden.count <= 3 * 300 + 10


@pytest.mark.parametrize(
    "model",
    [
        {"type": "BPE", "vocab": {"<": 0, "s": 1, ">": 2, "<s>": 3}, "ignore_merges": True},
        {"type": "Unigram", "vocab": [["<", -2.0], ["s", -2.0], [">", -2.0], ["<s>", 0.0]]},
    ],
)
def test_encode_splits_special_tokens_in_vocabulary(
    model: dict[str, Any], write_json: Callable[[str, Any], Path]
) -> None:
    """A special token in the vocabulary too is split in text, and parsed by parse_special."""
    content = tree([], model=model, added_tokens=[added(3, "<s>")])
    tokenizer = Tokenizer.from_directory(write_json("tokenizer.json", content))
    assert tokenizer.encode("<s>") == [0, 1, 2]
    assert tokenizer.encode("<s>", parse_special=True) == [3]


def test_special_tokens_require_explicit_options(spm: Path) -> None:
    """bos, eos and parse_special must be requested; decode skips special tokens by default."""
    tokenizer = Tokenizer.from_directory(spm)
    ids = tokenizer.encode("the cat")
    assert tokenizer.encode("the cat", bos=True, eos=True) == [1, *ids, 2]
    assert tokenizer.encode("") == []
    assert tokenizer.decode([1, *ids, 2]) == "the cat"
    assert tokenizer.decode([1, *ids, 2], skip_special=False) == "<s> the cat</s>"
    assert tokenizer.encode("<s>the cat</s>", parse_special=True) == [1, *ids, 2]


def test_encode_refuses_missing_bos_and_eos(write_json: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_directory(write_json("tokenizer.json", tree({"a": 0})))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (None, None, False)
    with pytest.raises(TokenError, match="has no bos token"):
        tokenizer.encode("a", bos=True)
    with pytest.raises(TokenError, match="has no eos token"):
        tokenizer.encode("a", eos=True)


def test_decode_refuses_what_is_no_id(byte_level: Path) -> None:
    tokenizer = Tokenizer.from_directory(byte_level)
    for bad in (-1, 1.5, "1", None):
        with pytest.raises(TokenError):
            tokenizer.decode([0, bad])  # type: ignore[list-item]
        with pytest.raises(TokenError):
            tokenizer.token(bad)  # type: ignore[arg-type]
    assert tokenizer.decode(np.array([65], np.int32)) == tokenizer.decode([65])


def test_encode_refuses_invalid_text(byte_level: Path) -> None:
    tokenizer = Tokenizer.from_directory(byte_level)
    for bad in ("a\ud800", b"a", None, ["a"]):
        with pytest.raises(TokenError):
            tokenizer.encode(bad)  # type: ignore[arg-type]


def test_token_and_id_are_inverse(byte_level: Path) -> None:
    tokenizer = Tokenizer.from_directory(byte_level)
    assert [tokenizer.id(tokenizer.token(i)) for i in range(tokenizer.vocab_size)] == list(
        range(tokenizer.vocab_size)
    )
    assert tokenizer.id("no such token") is None
    assert repr(tokenizer).startswith("Tokenizer('byte_level")


def test_encode_ignores_truncation_padding_and_dropout(
    write_json: Callable[[str, Any], Path],
) -> None:
    """Truncation, padding and BPE dropout of tokenizer.json are not applied."""
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    model = {"merges": ["a a"], "dropout": 0.5}
    content = tree({"a": 0, "aa": 1}, truncation=truncation, padding=padding, model=model)
    tokenizer = Tokenizer.from_directory(write_json("tokenizer.json", content))
    assert {tuple(tokenizer.encode("a" * 12)) for _ in range(50)} == {(1,) * 6}


@pytest.mark.parametrize(
    ("file", "config"),
    [
        ("tokenizer_config.json", {"eos_token": "<e>"}),
        ("tokenizer_config.json", {"eos_token": {"__type": "AddedToken", "content": "<e>"}}),
        ("special_tokens_map.json", {"eos_token": {"content": "<e>", "lstrip": False}}),
    ],
)
def test_special_tokens_are_read_in_every_format(
    file: str, config: dict[str, Any], write_json: Callable[[str, Any], Path]
) -> None:
    """Names are read as strings or AddedToken objects from both config files; classes named in the
    config never run.
    """
    write_json("tokenizer.json", tree({"<": 0, "e": 1, ">": 2, "<e>": 3}))
    config |= {"auto_map": {"AutoTokenizer": ["evil.Code", None]}, "tokenizer_class": "Evil"}
    tokenizer = Tokenizer.from_directory(write_json(file, config))
    assert (tokenizer.eos_id, tokenizer.bos_id) == (3, None)
    assert tokenizer.encode("<e>") == [0, 1, 2]
    assert tokenizer.encode("<e>", parse_special=True) == [3]


def test_added_tokens_keep_configured_ids(
    write_json: Callable[[str, Any], Path],
) -> None:
    write_json("tokenizer.json", tree({"<": 0, "e": 1, ">": 2}, added_tokens=[added(3, "<e>")]))
    write_json("added_tokens.json", {"<tool>": 4})
    decoder = {"3": {"content": "<e>"}, "5": {"content": "<f>", "special": True}}
    directory = write_json("tokenizer_config.json", {"added_tokens_decoder": decoder})
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("<e><tool><f>", parse_special=True) == [3, 4, 5]
    assert tokenizer.encode("<e><tool>") == [0, 1, 2, 4]
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (6, {3, 5})


@pytest.mark.parametrize("decoder", [{"3": "<f>"}, {"4": "<e>"}, {"5": "<f>"}])
def test_contradictory_added_token_ids_are_refused(
    decoder: dict[str, str], write_json: Callable[[str, Any], Path]
) -> None:
    write_json("tokenizer.json", tree({"<": 0, "e": 1, ">": 2}, added_tokens=[added(3, "<e>")]))
    directory = write_json("tokenizer_config.json", {"added_tokens_decoder": decoder})
    with pytest.raises(CheckpointError, match=r"contradictory ids|leaves a gap"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize("pieces", [{"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 3, "c": 5}])
@pytest.mark.parametrize("without", [(), (4,), (1, 7), (9,)])
def test_missing_ids_are_all_others(
    pieces: dict[str, int], without: tuple[int, ...], write_json: Callable[[str, Any], Path]
) -> None:
    """Those below a size, whether the vocabulary has gaps or none."""
    tokenizer = Tokenizer.from_directory(write_json("tokenizer.json", tree(pieces)))
    for size in (1, 3, 6, 9):
        found = [i for missing in tokenizer.missing_ids(size, without) for i in missing]
        assert found == [i for i in range(size) if i not in {*pieces.values(), *without}]


def test_null_and_unknown_special_tokens_have_no_id(
    write_json: Callable[[str, Any], Path],
) -> None:
    """A special token that is null or unknown has the id None; a known one is used."""
    write_json("tokenizer.json", tree({"a": 0, "</s>": 1, "!": 2}))
    config = {"eos_token": None, "bos_token": "<nowhere>", "pad_token": "!"}
    tokenizer = Tokenizer.from_directory(write_json("tokenizer_config.json", config))
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (None, None, 2)
    assert tokenizer.decode(tokenizer.encode("a!")) == "a !"


def test_gpt2_files_without_config_define_bos_and_eos(byte_level: Path) -> None:
    tokenizer = Tokenizer.from_directory(byte_level)
    assert tokenizer.bos_id == tokenizer.eos_id == tokenizer.id("<|endoftext|>")
    assert not tokenizer.adds_bos


@pytest.mark.parametrize("says", [None, True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_adds_bos_follows_config_then_post_processor(
    says: bool | None, nested: bool, write_json: Callable[[str, Any], Path]
) -> None:
    """adds_bos is add_bos_token if set, otherwise whether the post-processor adds it; encode never
    adds it by itself.
    """
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, sequence],
        "pair": [sequence],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    processor = {"type": "Sequence", "processors": [template]} if nested else template
    write_json("tokenizer.json", tree({"a": 0, "<s>": 1}, post_processor=processor))
    config = {"add_bos_token": says, "bos_token": "<s>"}
    tokenizer = Tokenizer.from_directory(write_json("tokenizer_config.json", config))
    assert tokenizer.adds_bos is (says is not False)
    assert tokenizer.encode("a") == [0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", json.dumps(tree({"a": 0, "b": 0})).encode()),
        ("tokenizer.json", json.dumps(tree({"a": -1})).encode()),
        ("tokenizer.json", json.dumps(tree({"a": 0}, added_tokens=[{"id": 1}])).encode()),
        ("tokenizer.json", json.dumps(tree({"a": 0}, decoder={"type": "Evil"})).encode()),
        ("tokenizer.json", json.dumps(tree({"a": 0}, added_tokens=[added(7, "<s>")])).encode()),
        ("tokenizer.json", json.dumps(tree({"a": 0}, model={"merges": ["a b"]})).encode()),
        ("tokenizer.json", json.dumps(tree({"a": 0}, model={"merges": ["a"]})).encode()),
        ("tokenizer.json", json.dumps(tree({"a": 0}, model={"merges": ["a a a"]})).encode()),
        ("tokenizer.model", b"\x00\xffno such model"),
        ("tokenizer.model", b""),
        ("merges.txt", b"#version: 0.2\na b c\n"),
        ("vocab.json", b'{"a": 0}'),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b'{"eos_token": 3}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": "<s>"}}'),
        ("special_tokens_map.json", b"[]"),
        ("added_tokens.json", b'{"<s>": "3"}'),
    ],
)
def test_malformed_tokenizer_file_is_refused(
    name: str, content: bytes, byte_level: Path, tmp_path: Path
) -> None:
    """Each malformed file raises CheckpointError with the name of the directory."""
    if name not in ("tokenizer.json", "tokenizer.model"):
        shutil.copytree(byte_level, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        Tokenizer.from_directory(tmp_path)
    assert tmp_path.name in str(error.value)


def test_missing_tokenizer_error_names_searched_files(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    assert not has_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*merges\.txt.*tokenizer\.model"):
        Tokenizer.from_directory(tmp_path)


def test_tokenizer_files_constant_covers_all_files(byte_level: Path, spm: Path) -> None:
    for directory in (byte_level, spm):
        assert has_tokenizer(directory)
        assert {path.name for path in directory.iterdir()} <= set(TOKENIZER_FILES)


def test_encode_in_threads_equals_serial(byte_level: Path) -> None:
    tokenizer = Tokenizer.from_directory(byte_level)
    texts = [f"the {i} <|endoftext|> cat" * (i % 7) for i in range(400)]
    serial = [tokenizer.encode(text, parse_special=i % 2 == 0) for i, text in enumerate(texts)]
    with ThreadPoolExecutor(8) as pool:
        parallel = pool.map(
            lambda i: tokenizer.encode(texts[i], parse_special=i % 2 == 0), range(len(texts))
        )
        assert list(parallel) == serial


def test_text_package_imports_no_array_library() -> None:
    for path in Path(jaxllm.text.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.split(".")[0] for name in names}
            assert roots.isdisjoint({"jax", "flax", "torch", "transformers", "numpy"}), path


def test_tokenizer_file_precedence(byte_level: Path, spm: Path, tmp_path: Path) -> None:
    """vocab.json and merges.txt come before tokenizer.model, tokenizer.json before both."""
    for path in (*byte_level.iterdir(), *spm.iterdir()):
        shutil.copy(path, tmp_path)
    assert Tokenizer.from_directory(tmp_path).id("<|endoftext|>") is not None
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree({"a": 0})))
    assert Tokenizer.from_directory(tmp_path).vocab_size == 1


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_tokenizer_json_raises_only_own_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random changes of tokenizer.json load, or raise CheckpointError or TokenError."""
    fields = {"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}}
    content = tree({"a": 0, "<s>": 1}, added_tokens=[added(1, "<s>")], **fields)
    node, depth = content, data.draw(st.integers(0, 4))
    for level in range(depth + 1):
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else [0]))
        if level == depth or not isinstance(node[key], dict | list) or not node[key]:
            node[key] = data.draw(st.sampled_from([None, True, -1, "x", [], {}, [[]], [{"a": 1}]]))
            break
        node = node[key]
    path = tmp_path_factory.getbasetemp() / "mutilated"
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(content))
    with contextlib.suppress(CheckpointError, TokenError):
        Tokenizer.from_directory(path).encode("a<s>")
