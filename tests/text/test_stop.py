"""Stop strings, compared with a plain search in the whole text."""

import pytest
import torch
import transformers
from hypothesis import given, strategies as st

from jaxllm.checkpoints.resolve import DEMO_DIR
from jaxllm.errors import SamplingError
from jaxllm.text.detokenizer import StopStrings, StreamDecoder
from jaxllm.text.tokenizer import Tokenizer

letters = st.text("ab", min_size=1, max_size=4)


@given(st.lists(st.text("abc", max_size=3), max_size=12), st.lists(letters, max_size=3))
def test_stop_strings_equal_plain_search(pieces: list[str], strings: list[str]) -> None:
    """For any split into pieces, the text ends at the piece that completes the first match, just
    before the earliest match.
    """
    whole = "".join(pieces)
    stop = StopStrings(strings)
    shown, ended = "", None
    for i, piece in enumerate(pieces):
        shown += stop.push(piece)
        if stop.has_matched and ended is None:
            ended = i
    shown += stop.flush()
    starts = [i for s in strings if (i := whole.find(s)) >= 0]
    if not starts:
        assert (shown, ended) == (whole, None)
        return
    # The first string that is complete ends the text, at the piece that completes it.
    first = min(whole.find(s) + len(s) for s in strings if s in whole)
    assert ended is not None
    assert len("".join(pieces[:ended])) < first <= len("".join(pieces[: ended + 1]))
    read = "".join(pieces[: ended + 1])
    assert shown == read[: min(read.find(s) for s in strings if s in read)]


def test_stop_strings_hold_back_possible_prefixes() -> None:
    """Text that may begin a stop string is held back until resolved; flush releases it."""
    stop = StopStrings(["END", "\n\n"])
    assert [stop.push(p) for p in ("one", " E", "N", "x\n", "a", "\n", "\nb")] == [
        "one", " ", "", "ENx", "\na", "", "",
    ]  # fmt: skip
    assert stop.has_matched
    assert stop.flush() == stop.push("more") == ""
    open_end = StopStrings(["END"])
    assert open_end.push("the E") + open_end.flush() == "the E"


@pytest.mark.parametrize("strings", [[""], [3], ["a", None]])
def test_stop_strings_refuse_invalid_values(strings: list[str]) -> None:
    with pytest.raises(SamplingError, match="stop_strings"):
        StopStrings(strings)


def test_stop_strings_match_special_tokens() -> None:
    """A stop string with a special token ends where transformers' criterion ends the text, and the
    token is no part of the output.
    """
    ours = Tokenizer.from_directory(DEMO_DIR / "llama")
    theirs = transformers.AutoTokenizer.from_pretrained(DEMO_DIR / "llama")
    [pad] = ours.encode("<|pad|>", parse_special=True)
    one, two, line = (ours.encode(text) for text in (" one", " two", "\n"))
    for string, ids, text in (
        ("<|pad|>", [*one, pad, *two], " one"),
        ("<|pad|>\n", [*one, pad, *two, pad, *line, *one], " one two"),
        (" two<|pad|>", [*one, *two, *one, *two, pad], " one two one"),
    ):
        criterion = transformers.StopStringCriteria(theirs, [string])
        stops = [bool(criterion(torch.tensor([ids[:n]]), None)) for n in range(1, len(ids) + 1)]
        decoder, shown = StreamDecoder(ours, one, [string]), ""
        for token, stop in zip(ids[: stops.index(True) + 1], stops, strict=False):
            shown += decoder.push(token)
            assert decoder.has_stopped == stop
        assert shown == text
