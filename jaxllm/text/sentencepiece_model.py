"""SentencePiece models as `tokenizer.json` trees.

A SentencePiece BPE model has no list of merges: each step merges the adjacent pieces whose
concatenation is the piece with the highest score (Kudo and Richardson, 2018, arXiv:1808.06226).
One merge for every split of a piece, ordered by the piece's score, is equivalent. Control, unknown
and byte pieces have no merges, so text never becomes one of them.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, requires_extra
from jaxllm.files import read_bytes

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BPE = 2
# Every split of every piece is tried: published models have 2**21 of them.
_MAX_PIECE, _MAX_TOTAL = 1 << 10, 1 << 23
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6  # kinds of pieces


def read_sentencepiece(path: Path) -> tuple[dict[str, Any], dict[str, str], list[float]]:
    """Read a SentencePiece BPE model: tree without merges, role -> token table, scores by id.

    Pieces that no merge makes have the score NaN.

    Raises:
        CheckpointError: not a SentencePiece model, or one that a `tokenizers` BPE cannot reproduce.
    """
    with requires_extra("sentencepiece", path.name):
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
        from sentencepiece import sentencepiece_model_pb2

    schema: Any = sentencepiece_model_pb2
    model = schema.ModelProto()
    try:
        model.ParseFromString(read_bytes(path))
    except DecodeError as error:
        raise CheckpointError(f"{path} is not a SentencePiece model") from error
    pieces = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
    check_lengths([piece for piece, _, _ in pieces], str(path))
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    _check_supported(path, pieces, trainer, normalizer)

    unknown = trainer.unk_id
    tree = build_tree(
        {piece: index for index, (piece, _, _) in enumerate(pieces)},
        [
            make_added_token(index, piece, special=kind != USER_DEFINED)
            for index, (piece, _, kind) in enumerate(pieces)
            if kind in (CONTROL, USER_DEFINED) or index == unknown
        ],
        unknown=pieces[unknown][0],
        byte_fallback=trainer.byte_fallback,
        dummy_prefix=normalizer.add_dummy_prefix,
        strip_spaces=normalizer.remove_extra_whitespaces,
    )
    ids = {"bos": trainer.bos_id, "eos": trainer.eos_id, "pad": trainer.pad_id}
    roles = {role: pieces[index][0] for role, index in ids.items() if 0 <= index < len(pieces)}
    scores = [score if kind == NORMAL else math.nan for _, score, kind in pieces]
    return tree, {**roles, "unk": pieces[unknown][0]}, scores


def build_tree(
    vocab: Mapping[str, int],
    added_tokens: list[dict[str, Any]],
    *,
    unknown: str,
    byte_fallback: bool,
    dummy_prefix: bool,
    strip_spaces: bool,
) -> dict[str, Any]:
    """Return the `tokenizer.json` tree of pieces, without merges (`derive_merges`).

    Args:
        added_tokens: those of control and user-defined pieces and of the unknown piece.
        unknown: the unknown piece.
        dummy_prefix: whether a space is prepended to a text.
        strip_spaces: whether leading, trailing and repeated spaces are removed.
    """
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "added_tokens": added_tokens,
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(dummy_prefix, strip_spaces)},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "vocab": vocab,
        },
    }


def check_lengths(pieces: Sequence[str], where: str) -> None:
    """Raise CheckpointError for pieces that are longer than in any published model."""
    longest, total = max(map(len, pieces), default=0), sum(map(len, pieces))
    if longest > _MAX_PIECE or total > _MAX_TOTAL:
        raise CheckpointError(
            f"{where}: the pieces are too long: got {total:,} characters in total and {longest:,}"
            f" in one, expected at most {_MAX_TOTAL:,} and {_MAX_PIECE:,}"
        )


def derive_merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return the merges that build these pieces, highest score first; those with NaN are left out.

    Among the merges for one piece, the one with the longest left half comes first: in a run of one
    character that is also the leftmost.
    """
    scores = {piece: score for piece, score in scores.items() if not math.isnan(score)}
    merges = [
        (-score, -cut, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(left, right) for _, _, left, right in sorted(merges)]


def make_added_token(index: int, content: str, *, special: bool) -> dict[str, Any]:
    """Return an entry of `added_tokens`; a special one is matched before normalization.

    A user-defined piece is matched after normalization, since it may contain the escaped space.
    """
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {"id": index, "content": content, **flags, "normalized": not special, "special": special}


def _normalizers(dummy_prefix: bool, strip_spaces: bool) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if strip_spaces:
        edges = {"Regex": rf"\A +|[ {SPACE}]+\z"}
        steps.append({"type": "Replace", "pattern": edges, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    return [*steps, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]


def _check_supported(
    path: Path, pieces: list[tuple[str, float, int]], trainer: Any, normalizer: Any
) -> None:
    names, kinds = {piece for piece, _, _ in pieces}, {kind for _, _, kind in pieces}
    byte_names = {piece for piece, _, kind in pieces if kind == BYTE}
    complaints = [
        complaint
        for complaint, is_wrong in (
            ("it is not a BPE model but unigram, word or char", trainer.model_type != _BPE),
            ("it has no pieces", not pieces),
            ("two of its pieces are equal", len(names) != len(pieces)),
            ("its unknown piece is out of range", not 0 <= trainer.unk_id < len(pieces)),
            ("it has UNUSED pieces", UNUSED in kinds),
            # The charsmap of `tokenizers` differs from SentencePiece's for decomposed characters.
            ("it normalizes characters", bool(normalizer.precompiled_charsmap)),
            ("it writes spaces as suffixes", trainer.treat_whitespace_as_suffix),
            ("it does not escape spaces", not normalizer.escape_whitespaces),
            (
                "it has user-defined pieces and a dummy prefix",
                USER_DEFINED in kinds and normalizer.add_dummy_prefix,
            ),
            (
                "it falls back to bytes but lacks some of the 256 byte pieces",
                trainer.byte_fallback and byte_names != {f"<0x{b:02X}>" for b in range(256)},
            ),
        )
        if is_wrong
    ]
    if complaints:
        raise CheckpointError(
            f"{path} is not supported: {'; '.join(complaints)}. Add a tokenizer.json next to it, "
            "for example with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
