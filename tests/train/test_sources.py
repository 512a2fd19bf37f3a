"""Training data files: every kind, the learned tokens, and errors with line numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import transformers

from jaxllm.checkpoints.resolve import DEMO_DIR
from jaxllm.errors import CheckpointError, ConfigError, JaxllmError, TemplateError, TokenError
from jaxllm.text import ChatTemplate, Tokenizer
from jaxllm.train.data.dataset import Dataset
from jaxllm.train.data.examples import Examples
from jaxllm.train.data.rows import IGNORED
from jaxllm.train.data.sources import (
    TextEncoder,
    assistant_spans,
    encode_conversation,
    from_texts,
    read_examples,
)

TOKENIZER = Tokenizer.from_directory(DEMO_DIR / "llama")
BOS, EOS = TOKENIZER.bos_id, TOKENIZER.eos_id
TURNS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ 'Bot: ' }}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.role + ': ' + m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Bot: ' }}{% endif %}"
)
TEMPLATE = ChatTemplate(TURNS, (("bos_token", "<|bos|>"), ("eos_token", "<|eos|>")))
ENCODER = TextEncoder(TOKENIZER, TEMPLATE)
CONVERSATION = [
    {"role": "system", "content": "Tell stories."},
    {"role": "user", "content": "Of whom?"},
    {"role": "assistant", "content": "One day, Lily"},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "She went home.\nThe end. "},
]


def write_lines(path: Path, *lines: Any, name: str = "data.jsonl") -> Path:
    file = path / name
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return file


def learned_text(examples: Examples, number: int = 0) -> str:
    token_T, counts_T = examples[number]
    return TOKENIZER.decode(token_T[counts_T].tolist(), skip_special=False)


def full_text(examples: Examples, number: int = 0) -> str:
    return TOKENIZER.decode(examples[number].token_T.tolist(), skip_special=False)


def test_text_lines_get_bos_and_eos(tmp_path: Path) -> None:
    file = write_lines(tmp_path, {"text": "One day"}, {"text": "The end.", "id": 3})
    examples = read_examples(file, ENCODER)
    assert [full_text(examples, n) for n in range(2)] == [
        "<|bos|>One day<|eos|>",
        "<|bos|>The end.<|eos|>",
    ]
    plain = read_examples(file, TextEncoder(TOKENIZER, bos=False, eos=False))
    assert plain[0].token_T.tolist() == TOKENIZER.encode("One day")
    assert plain.loss_mask_N is None
    again = from_texts(["One day", "The end."], ENCODER)
    assert (again.token_N == examples.token_N).all()


def test_only_completion_tokens_are_learned(tmp_path: Path) -> None:
    file = write_lines(tmp_path, {"prompt": "One day,", "completion": " Lily went home."})
    examples = read_examples(file, ENCODER)
    assert learned_text(examples) == " Lily went home.<|eos|>"
    assert full_text(examples) == "<|bos|>One day, Lily went home.<|eos|>"
    assert (examples.long, examples.bos, examples.source["joined"]) == ("left", BOS, 0)


def test_token_spanning_prompt_and_completion_is_learned(tmp_path: Path) -> None:
    """As in lm-evaluation-harness, a space at the end of a prompt moves into the completion."""
    file = write_lines(tmp_path, {"prompt": "One day, ", "completion": "Lily went home."})
    examples = read_examples(file, ENCODER)
    assert learned_text(examples) == " Lily went home.<|eos|>"
    assert examples.source["joined"] == 1


def test_assistant_mask_equals_transformers(tmp_path: Path) -> None:
    """transformers reads the mask from `generation` blocks in the template; ours works with any
    template.
    """
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(DEMO_DIR / "llama" / "tokenizer.json"),
        bos_token="<|bos|>",
        eos_token="<|eos|>",
    )
    expected = theirs.apply_chat_template(
        CONVERSATION, chat_template=TURNS, return_dict=True, return_assistant_tokens_mask=True
    )
    examples = read_examples(write_lines(tmp_path, {"messages": CONVERSATION}), ENCODER)
    assert examples[0].token_T.tolist() == expected["input_ids"]
    assert examples[0].loss_mask_T.tolist() == [bool(x) for x in expected["assistant_masks"]]
    assert examples.long == "right"


def test_whitespace_after_assistant_turn_is_not_learned() -> None:
    chatml = ChatTemplate(
        "{% for m in messages %}{{ m.role + '\n' + m.content + '<|eos|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    )
    example = encode_conversation(chatml, TOKENIZER, CONVERSATION)
    said = [CONVERSATION[2]["content"] + "<|eos|>", CONVERSATION[4]["content"] + "<|eos|>"]
    ids = example.token_T[example.loss_mask_T].tolist()
    assert TOKENIZER.decode(ids, skip_special=False) == "".join(said)


def test_template_that_rewrites_earlier_turns_is_refused() -> None:
    forgetful = ChatTemplate(
        "{% for m in messages %}{{ m.content if loop.last else m.content[:4] }}{% endfor %}"
    )
    with pytest.raises(TemplateError, match="message 2: the chat template writes the messages"):
        assistant_spans(forgetful, CONVERSATION)
    last = CONVERSATION[-1:]
    assert assistant_spans(forgetful, last)[1] == [(0, len(last[0]["content"]))]


def test_tools_reach_chat_template(tmp_path: Path) -> None:
    with_tools = ChatTemplate(
        "{{ tools[0].name }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    line = {"messages": CONVERSATION[1:3], "tools": [{"name": "clock"}]}
    examples = read_examples(write_lines(tmp_path, line), TextEncoder(TOKENIZER, with_tools))
    assert full_text(examples).startswith("clock")
    ended = read_examples(write_lines(tmp_path, line), TextEncoder(TOKENIZER, with_tools, eos=True))
    assert learned_text(ended) == learned_text(examples) + "<|eos|>"


def test_token_lines_use_given_labels(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path, {"tokens": [5, 6, 7], "labels": [IGNORED, IGNORED, 7]}, {"tokens": [8, 9]}
    )
    examples = read_examples(file, TextEncoder(None))
    assert examples.token_N.tolist() == [5, 6, 7, 8, 9]
    assert [examples[n].loss_mask_T.tolist() for n in (0, 1)] == [[False, False, True], [True] * 2]


def test_text_and_wikitext_files_are_single_examples(tmp_path: Path) -> None:
    text = "One day, Lily went home.\n\nThe end.\n"
    (tmp_path / "story.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    ids = [BOS, *TOKENIZER.encode(text), EOS]
    assert read_examples(tmp_path / "story.txt", ENCODER).token_N.tolist() == ids
    rows = [" = Lily = \n", "", "One day.\n"]
    table = pyarrow.table({"text": rows})
    pyarrow.parquet.write_table(table, tmp_path / "wiki.parquet")
    (tmp_path / "wiki.raw").write_text("".join(row or " \n" for row in rows))
    ids = [BOS, *TOKENIZER.encode("\n\n".join(rows)), EOS]
    for name in ("wiki.parquet", "wiki.raw"):
        examples = read_examples(tmp_path / name, ENCODER)
        assert examples.token_N.tolist() == ids
        assert (len(examples), examples.source["kind"]) == (1, "wikitext")


def test_long_jsonl_text_is_encoded_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long text, of a file or a line, is encoded in pieces that lose no token, since they end at
    line ends; long completions and conversations are refused.
    """
    text = "".join(f"Line {n} of a story.\n" for n in range(40))
    (tmp_path / "story.txt").write_text(text)
    sizes = list[int]()
    real = Tokenizer.encode

    def encode(self: Tokenizer, text: str, **options: Any) -> list[int]:
        sizes.append(len(text))
        return real(self, text, **options)

    for name in (
        "jaxllm.data.chunking.MAX_PIECE_BYTES",
        "jaxllm.train.data.sources.MAX_PIECE_BYTES",
    ):
        monkeypatch.setattr(name, 64)
    monkeypatch.setattr("jaxllm.data.chunking.MIN_PIECE_BYTES", 64)
    expected = read_examples(tmp_path / "story.txt", ENCODER)
    assert TOKENIZER.decode(expected.token_N.tolist()) == text
    assert Dataset(expected, width=16).tokens == len(expected.token_N) - 1
    monkeypatch.setattr(Tokenizer, "encode", encode)
    found = read_examples(write_lines(tmp_path, {"text": text}), ENCODER)
    np.testing.assert_array_equal(found.token_N, expected.token_N)
    assert max(sizes) <= 2 * 64
    monkeypatch.setattr("jaxllm.train.data.sources.MAX_CHARS", 64)
    turns = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": text}]
    for line in ({"prompt": "Tell", "completion": text}, {"messages": turns}):
        with pytest.raises(TokenError, match=r"line 1: .* must have at most 64 characters: got"):
            read_examples(write_lines(tmp_path, line), ENCODER)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"text": "a"}, {"txt": "b"}], r"line 2 must be an object with .* got none"),
        ([{"text": "a"}, 5], "line 2 must be an object with"),
        ([{"text": "a"}, {"text": ""}], "line 2: the text is empty"),
        ([{"text": "a"}, {"tokens": [1]}], "line 2 has tokens, .*line 1 has text"),
        ([{"text": "a", "prompt": "b"}], "line 1 must be .* got prompt, text"),
        ([{"prompt": "a"}], "line 1 must be .* got prompt"),
        ([{"prompt": "a", "completion": ""}], "line 1: the completion is empty"),
        ([{"text": 5}], "line 1: text must be a string or null, got 5"),
        ([{"tokens": [1], "labels": [2]}], "line 1: each label must equal its token"),
        ([{"tokens": [1, 2], "labels": [1]}], "line 1: each label must equal its token"),
        ([{"tokens": []}], "line 1: the text is empty"),
        ([{"messages": CONVERSATION[:2]}], 'line 1: no message with the role "assistant"'),
        ([{"messages": [{"role": "assistant"}]}], "line 1: message 0 must have"),
        ([], "no data to train on: all lines of .*data.jsonl are blank"),
    ],
)
def test_invalid_lines_are_refused_with_line_number(
    tmp_path: Path, lines: list[Any], said: str
) -> None:
    with pytest.raises(JaxllmError, match=said) as caught:
        read_examples(write_lines(tmp_path, *lines), ENCODER)
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    for content, error, said in (
        (b'{"text": "a"}\n{', TokenError, "line 2 is not valid JSON"),
        (b'{"text": "a"}\n\xff', CheckpointError, "line 2 is not UTF-8"),
    ):
        file.write_bytes(content)
        with pytest.raises(error, match=said):
            read_examples(file, ENCODER)
    (tmp_path / "story.txt").write_bytes(b"a \xff")
    with pytest.raises(TokenError, match=r"story\.txt: the text is not UTF-8"):
        read_examples(tmp_path / "story.txt", ENCODER)
    (tmp_path / "story.txt").write_bytes(b"")
    with pytest.raises(TokenError, match=r"no data to train on: .*story\.txt is empty"):
        read_examples(tmp_path / "story.txt", ENCODER)
    with pytest.raises(ConfigError, match="data must be text, wikitext, lines, got 'csv'"):
        read_examples(file, ENCODER, kind="csv")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_examples(tmp_path / "none.txt", ENCODER)


def test_missing_template_or_tokenizer_is_refused(tmp_path: Path) -> None:
    file = write_lines(tmp_path, {"messages": CONVERSATION})
    with pytest.raises(TokenError, match="messages need a chat template"):
        read_examples(file, TextEncoder(TOKENIZER))
    with pytest.raises(TokenError, match=r"need a chat template \(no chat template here\)"):
        read_examples(file, TextEncoder(TOKENIZER, TemplateError("no chat template here")))
    with pytest.raises(TokenError, match="text needs a tokenizer"):
        read_examples(write_lines(tmp_path, {"text": "a"}), TextEncoder(None))
