"""Tokenizers in GGUF files give the ids of their Hugging Face form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from jaxllm.convert.gguf.pre_tokenizers import (
    PRE_TOKENIZERS,
    find_pre_tokenizer,
    pre_tokenizer_json,
)
from jaxllm.convert.gguf.reader import read_parts
from jaxllm.convert.gguf.tokenizer_read import find_ends, read_tokenizer
from jaxllm.convert.gguf.tokenizer_write import dropped_settings, make_tokenizer_keys
from jaxllm.convert.registry import assets_from_gguf
from jaxllm.errors import CheckpointError, TemplateError
from jaxllm.text.formats import write_tokenizer
from jaxllm.text.tokenizer import Tokenizer
from tests.convert.gguf.gguf_files import finish

LINES = [
    "",
    " ",
    "  two  spaces and a tab\tand a trailing one ",
    "Hello, World! I'm he'LL we'Ve 'tis don't",
    "3 33 333 3333 12345678 3.14 ½ 4²",
    "\n\n \n\n\n  \r\n\t\n x",
    "нещо на Български, Ärger, naïve café, e\u0301te\u0301",
    "你好、世界 こんにちは 안녕하세요 กขค हिन्दी عربى",
    "\U0001f999\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f466 (normal)",
    "\U0001f636\u200d\U0001f32b\ufe0f (several in one)",
    "def f(x):\n    return x**2  # <|im_start|> CamelCaseAndUPPERCase snake_case",
    "\u2581already\u2581escaped <s> </s> <unk> <0x0A>",
    "----====!!!!???  ...../// \\\\ http://x.y/z?a=1&b=2",
]  # fmt: skip


def write_vocabulary(path: Path, arch: str, add: Callable[[gguf.GGUFWriter], object]) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    add(writer)
    finish(writer)
    return path


def add_pieces(writer: gguf.GGUFWriter, file: Path) -> None:
    """Add a SentencePiece model, as llama.cpp's converter does."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    kinds = (("Control", 3), ("Unknown", 2), ("Byte", 6), ("Unused", 5))
    types = [
        next((number for name, number in kinds if getattr(model, f"Is{name}")(i)), 1)
        for i in range(model.vocab_size())
    ]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(i) for i in range(model.vocab_size())])
    writer.add_token_scores([model.get_score(i) for i in range(model.vocab_size())])
    writer.add_token_types(types)
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_unk_token_id(model.unk_id())
    writer.add_remove_extra_whitespaces(model.encode("  ") == [])


def add_byte_level(writer: gguf.GGUFWriter, tree: dict[str, Any], pre: str | None) -> None:
    """Add a byte-level BPE from a tokenizer.json, as llama.cpp's converter does."""
    added = {token["id"]: token for token in tree["added_tokens"]}
    names = {index: name for name, index in tree["model"]["vocab"].items()}
    names |= {index: token["content"] for index, token in added.items()}
    count = max(names) + 1
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(count + 3)])
    kinds = [1 if i in names else 5 for i in range(count + 3)]
    for index, token in added.items():
        kinds[index] = 3 if token["special"] else 4
    writer.add_token_types(kinds)
    merges = tree["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])


def ours(path: Path) -> Tokenizer:
    tokenizer = assets_from_gguf(path).tokenizer
    assert tokenizer is not None
    return tokenizer


def wiki(data: Callable[[str], Path], lines: int = 150) -> list[str]:
    text = (data("corpora") / "wiki.test.raw").read_text(encoding="utf-8")
    return text.split("\n")[:lines]


@pytest.mark.parametrize("name", ["llama_tokenizer", "stories260K"])
def test_sentencepiece_vocabulary_equals_hugging_face(
    name: str, data: Callable[[str], Path], tmp_path: Path
) -> None:
    """Ids, decoding and special tokens equal the SentencePiece library's and those of
    tokenizer.json.
    """
    directory = data(name)
    file = write_vocabulary(
        tmp_path / "v.gguf", "llama", lambda w: add_pieces(w, directory / "tokenizer.model")
    )
    library = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    theirs = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    mine, whole = ours(file), Tokenizer.from_directory(directory)
    for text in [*LINES, *wiki(data)]:
        ids = mine.encode(text)
        assert ids == library.encode(text), text
        if name == "stories260K":  # whose tokenizer.json strips line breaks too
            continue
        if "<s>" not in text:  # a control token in the library, plain text here
            assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert mine.decode(ids) == whole.decode(ids)
        assert mine.encode(text, parse_special=True) == whole.encode(text, parse_special=True)
    assert (mine.bos_id, mine.eos_id, mine.unk_id) == (whole.bos_id, whole.eos_id, whole.unk_id)
    assert mine.adds_bos and mine.special_ids == whole.special_ids
    assert mine.vocab_size == whole.vocab_size


def test_gpt2_vocabulary_equals_hugging_face(data: Callable[[str], Path], tmp_path: Path) -> None:
    """The ids equal those of tokenizer.json, also without a pre-tokenizer key, which gpt2 does not
    need.
    """
    directory = data("gpt2_tokenizer")
    tree = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    theirs = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    for pre in ("gpt-2", None):  # the architecture gpt2 implies it
        file = write_vocabulary(
            tmp_path / f"{pre}.gguf", "gpt2", lambda w, pre=pre: add_byte_level(w, tree, pre)
        )
        mine = ours(file)
        for text in [*LINES, *wiki(data, 150 if pre else 5)]:
            expected = theirs.encode(text, add_special_tokens=False).ids
            assert mine.encode(text) == expected, text
            assert mine.decode(expected) == theirs.decode(expected)
    assert not mine.adds_bos


# llama.cpp's names by their split, as its `llama-vocab.cpp` maps them. Each expression of a split
# divides the pieces that the previous ones left whole.
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PLAIN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LEAD = r"[^\r\n\p{L}\p{N}]?"
WORDS = rf"{LEAD}{UPPER}*{LOWER}+%s|{LEAD}{UPPER}+{LOWER}*%s|"
SLASHES = REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
THREE = rf"{ENDINGS}|{LEAD}\p{{L}}+|\p{{N}}{{1,3}}{REST}"
ONE = rf"{ENDINGS}|{LEAD}\p{{L}}+|\p{{N}}{REST}"
SPLITS: dict[str, list[str]] = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe"
    " glm4 chatglm-bpe": [THREE],
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo"
    " jais trillion granite-docling exaone4": [PLAIN],
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": [r"\p{N}", PLAIN],
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": [ONE],
    "tekken": [WORDS % ("", "") + r"\p{N}" + SLASHES],
    "gpt-4o llama4 kanana2 talkie minimax-m2": [
        WORDS % (f"{ENDINGS}?", f"{ENDINGS}?") + r"\p{N}{1,3}" + SLASHES
    ],
    "deepseek-coder": [
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ],
    "seed-coder": [
        rf"{ENDINGS}|{LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "viking": [" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}"],
}  # fmt: skip
NAMES = {name: split for names, split in SPLITS.items() for name in names.split()}
# Those of published tokenizer.json files: Llama 3, Qwen 2, Mistral Nemo, Phi-4-mini, SmolLM, GPT-2.
PUBLISHED = ("llama-bpe", "qwen2", "tekken", "gpt-4o", "smollm", "gpt-2")


def trained(name: str) -> tokenizers.Tokenizer:
    """Train a small tokenizer that splits like a published one."""
    library = tokenizers.Tokenizer(models.BPE(ignore_merges=name in ("llama-bpe", "tekken")))
    if name in ("smollm", "gpt-2"):
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if name == "smollm":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    else:
        steps = [
            pre_tokenizers.Split(tokenizers.Regex(*NAMES[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    library.decoder = tokenizers.decoders.ByteLevel()
    if name == "qwen2":
        library.normalizer = tokenizers.normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    library.train_from_iterator(LINES * 2, trainer)
    library.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return library


@pytest.mark.parametrize("name", PUBLISHED)
def test_pre_tokenizers_equal_published_tokenizers(name: str, tmp_path: Path) -> None:
    """Each pre-tokenizer gives the ids of a tokenizer with the published splitting; padding entries
    are not tokens.
    """
    theirs = trained(name)
    tree = json.loads(theirs.to_str())

    def add(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, tree, name)
        writer.add_eos_token_id(0)

    mine = ours(write_vocabulary(tmp_path / "v.gguf", "llama", add))
    for text in [*LINES, "a<think>b<|end|>c", "x<think> 12345"]:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert mine.encode(text, parse_special=True) == expected, text
    assert mine.special_ids == {0} and mine.id("<think>") == theirs.token_to_id("<think>")
    assert mine.encode("a<|end|>") != mine.encode("a<|end|>", parse_special=True)
    assert mine.vocab_size == theirs.get_vocab_size()  # padding entries are not tokens


# llama.cpp's names for models that jaxllm does not support.
OTHERS = (
    "minicpm5",
    "deepseek-llm",
    "deepseek-v3",
    "falcon",
    "jais-2",
    "superbpe",
    "qwen35",
    "bloom",
)


def split_by(expressions: list[str], text: str) -> list[str]:
    """Split a text with the `regex` package into matches and the text between them."""
    pieces = [text]
    for expression in expressions:
        parts = [regex.split(f"({expression})", piece) for piece in pieces]
        pieces = [part for some in parts for part in some if part]
    return pieces


def test_every_llama_cpp_pre_tokenizer_splits_identically() -> None:
    """The whole table splits as the regex package does with the expressions that
    llama.cpp quotes.
    """
    assert PRE_TOKENIZERS.keys() == NAMES.keys() | {"default"}
    texts = [
        *LINES,
        "don't DON'T aNd'LL X'sY 'Re\u01c5o \u0301x a/b//\n/c 1,234,567.89 \u0661\u0662\u0663",
    ]
    for pre in {PRE_TOKENIZERS[name] for name in NAMES}:
        names = [
            name for name in NAMES if PRE_TOKENIZERS[name] is pre or PRE_TOKENIZERS[name] == pre
        ]
        expressions = NAMES[names[0]]
        assert all(NAMES[name] == expressions for name in names)
        steps = json.dumps(pre_tokenizer_json(pre)["pretokenizers"][:-1])
        splits = [
            pre_tokenizers.Split(tokenizers.Regex(step["pattern"]["Regex"]), "isolated")
            for step in json.loads(steps)
        ]
        ours = pre_tokenizers.Sequence(splits)
        for text in texts:
            found = [piece for piece, _ in ours.pre_tokenize_str(text)] if text else []
            assert found == split_by(expressions, text), (names, text)


@pytest.mark.parametrize("name", OTHERS)
def test_unsupported_pre_tokenizers_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"pre '{name}' is not supported"):
        find_pre_tokenizer(name, "a file", architecture="llama")


VOCABULARIES = ("llama-bpe", "llama-spm", "gpt-2", "qwen2", "starcoder", "phi-3", "refact", "mpt")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpp_vocabularies_give_their_reference_ids(
    name: str, data: Callable[[str], Path]
) -> None:
    """The files models/ggml-vocab-* of llama.cpp give the ids stored next to them, which are
    transformers'.
    """
    file = data("llama_cpp_vocabularies") / f"ggml-vocab-{name}.gguf"
    mine = ours(file)
    texts = Path(f"{file}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    rows = Path(f"{file}.out").read_text(encoding="utf-8").split("\n")
    for text, row in zip(texts, rows, strict=False):
        assert mine.encode(text) == [int(index) for index in row.split()], text


def byte_level_file(path: Path, change: Callable[[gguf.GGUFWriter], object]) -> Path:
    """Write a small byte-level vocabulary with some of its keys overwritten."""
    tree = json.loads(trained("gpt-2").to_str())

    def add(writer: gguf.GGUFWriter) -> None:
        change(writer)
        given = dict(writer.kv_data[0])
        writer.kv_data[0].clear()
        add_byte_level(writer, tree, "gpt-2")
        writer.kv_data[0].update(given)

    return write_vocabulary(path, "llama", add)


def test_vocabulary_may_lack_control_characters(tmp_path: Path) -> None:
    """SmolLM2's lacks six of them: a byte without a token is skipped. Letters are required."""
    tree = json.loads(trained("gpt-2").to_str())
    vocab, symbol = tree["model"]["vocab"], chr(256 + 4)  # of byte 4
    assert symbol in vocab
    tree["model"]["vocab"] = {
        "<unused>" if token == symbol else token: index for token, index in vocab.items()
    }
    path = write_vocabulary(
        tmp_path / "a.gguf", "llama", lambda writer: add_byte_level(writer, tree, "gpt-2")
    )
    mine = ours(path)
    assert mine.encode("a\x04b") == mine.encode("a") + mine.encode("b")


def test_special_ids_and_bos_flag_are_read(tmp_path: Path) -> None:
    """Special ids come from their keys, padding with an ordinary token does not make it special,
    and add_bos_token and add_eos_token are honored, also in files written from the tree.
    """

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_pad_token_id(5)

    mine = ours(byte_level_file(tmp_path / "a.gguf", add))
    assert (mine.bos_id, mine.eos_id, mine.pad_id, mine.adds_bos) == (0, 0, 5, False)
    assert mine.special_ids == {0}  # an ordinary token used for padding is not special
    assert mine.end_id is None
    says = byte_level_file(tmp_path / "b.gguf", lambda w: (add(w), w.add_add_bos_token(True)))
    assert ours(says).adds_bos
    ends = byte_level_file(tmp_path / "c.gguf", lambda w: (add(w), w.add_add_eos_token(True)))
    assert ours(ends).end_id == 0
    tree = read_tokenizer(read_parts(ends)[0].settings, ends)
    assert tree is not None
    assert make_tokenizer_keys(tree, {}, {}, 2000)["tokenizer.ggml.add_eos_token"]
    (tmp_path / "hf").mkdir()
    write_tokenizer(tree, {}, tmp_path / "hf")
    assert Tokenizer.from_directory(tmp_path / "hf").end_id == 0


QWEN = ["a", "<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "</s>"]
HARMONY = ["<|end|>", "<|return|>", "a", "<|call|>"]


@pytest.mark.parametrize(
    ("tokens", "keys", "ends"),
    [
        (["<eos>", "b", "<end_of_turn>"], {"eos": 0}, [0, 2]),
        (["a", "<|eot_id|>", "b", "<|eom_id|>", "<|end_of_text|>"], {"eos": 2}, [2, 1, 3, 4]),
        (QWEN, {"eos": 2}, [2, 1, 3, 4, 5]),
        (QWEN, {"eos": 0, "eot": 2, "fim_pad": 6}, [0, 2, 1, 6, 4, 5]),  # a key comes before names
        (["<fim_pad>", "[PAD]", "<PAD>"], {}, [0]),
        (HARMONY, {"eos": 1, "eot": 0}, [1, 3]),
        (HARMONY[:2], {"eos": 1}, [1, 0]),
        (["a", "b"], {}, []),
    ],
)
def test_texts_end_at_tokens_known_by_name(
    tokens: list[str], keys: dict[str, int], ends: list[int]
) -> None:
    """The ids that end a text are those of llama.cpp's rules: by keys, and by names in the
    vocabulary, but "</s>", which is ordinary text for some.
    """
    settings = {f"tokenizer.ggml.{name}_token_id": index for name, index in keys.items()}
    assert find_ends({"tokenizer.ggml.tokens": tokens, **settings}) == ends


def test_settings_without_a_gguf_key_are_listed() -> None:
    """Ends of text beyond GGUF's three keys, and sampling settings, are named when they are lost;
    readers know some ends by name.
    """
    keys = {"tokenizer.ggml.tokens": ["a", "b", "<|im_end|>"], "tokenizer.ggml.eos_token_id": 0}
    generation = {"eos_token_id": [0, 1, 2], "top_k": 5, "do_sample": False, "_x": 1, "top_p": None}
    assert dropped_settings(generation, keys) == ["eos_token_id 1", "top_k"]


def test_chat_template_uses_special_tokens(tmp_path: Path) -> None:
    """The stored chat templates, "tool_use" too, have the file's special tokens; without one, a
    TemplateError is returned, which does not hold what was read.
    """

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_eos_token_id(0)
        writer.add_chat_template(
            [
                {"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"},
                {"name": "tool_use", "template": "{{ tools[0] }}{{ eos_token }}"},
            ]
        )

    texts = assets_from_gguf(byte_level_file(tmp_path / "a.gguf", add))
    assert not isinstance(texts.chat_template, Exception)
    assert texts.chat_template.render([{"role": "user", "content": "Hi"}]) == "Hi<|end|>"
    assert texts.chat_template.render([], tools=["f"]) == "f<|end|>"
    none = assets_from_gguf(byte_level_file(tmp_path / "b.gguf", lambda w: None))
    assert isinstance(none.chat_template, TemplateError)
    assert none.chat_template.__traceback__ is None


def test_file_without_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "a.gguf", "llama", lambda w: w.add_tokenizer_model("none"))
    assert assets_from_gguf(file).tokenizer is None


BAD: dict[str, tuple[Callable[[gguf.GGUFWriter], object], str]] = {
    "another kind": (lambda w: w.add_tokenizer_model("bert"), "'bert' is not supported"),
    "an unknown pre-tokenizer": (lambda w: w.add_tokenizer_pre("new-bpe"), "'new-bpe' is not"),
    "an invalid id": (lambda w: w.add_eos_token_id(9999), "eos_token_id 9999 is none of"),
    "too few types": (lambda w: w.add_token_types([1, 2]), "one per token"),
    "a token twice": (lambda w: w.add_token_list(["a", "a"]), "is not 2 numbers|'a' twice"),
    "a merge of three": (lambda w: w.add_token_merges(["a b c"]), "'a b c', not a pair"),
    "tokens that are not strings": (
        lambda w: w.add_array("tokenizer.ggml.tokens", [1, 2]),
        "list of strings",
    ),
    "pieces without scores": (lambda w: w.add_tokenizer_model("llama"), "scores are missing"),
    "a score that is NaN": (
        lambda w: (
            w.add_tokenizer_model("llama"), w.add_token_list(["<unk>", "a"]),
            w.add_token_types([2, 1]), w.add_token_scores([0.0, float("nan")]),
        ),
        "not finite numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_vocabulary_is_refused(case: str, tmp_path: Path) -> None:
    change, message = BAD[case]
    with pytest.raises(CheckpointError, match=message):
        assets_from_gguf(byte_level_file(tmp_path / "a.gguf", change))


def test_missing_pre_tokenizer_is_refused_outside_gpt2(tmp_path: Path) -> None:
    tree = json.loads(trained("gpt-2").to_str())
    file = write_vocabulary(tmp_path / "a.gguf", "llama", lambda w: add_byte_level(w, tree, None))
    with pytest.raises(CheckpointError, match="gguf-new-metadata --pre-tokenizer"):
        assets_from_gguf(file)


def test_pre_tokenizer_regexes_are_supported() -> None:
    from jaxllm.text.tokenizer_limits import check_regex

    for name, pre in PRE_TOKENIZERS.items():
        for expression in pre.regexes:
            check_regex(expression, name)
    assert all(pre.regexes for pre in PRE_TOKENIZERS.values())
