"""Embeddings equal hidden states of transformers, pooled with torch."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import jaxllm
from jaxllm.errors import CapacityError, ConfigError, NonFiniteError, TokenError
from jaxllm.evaluate.verify import transformers_directory
from jaxllm.generation.embeddings import embeddings
from jaxllm.ops import native
from jaxllm.ops.pooling import l2_normalize, pool
from jaxllm.weights.precision import Precision
from tests.conftest import Run, assert_refused, succeed
from tests.tiny_models import Twin, assert_close, load_twin, random_model, save_random, tokens

TEXTS = [tokens(1, n, seed=n)[0].tolist() for n in (5, 1, 13, 8, 3)]
POOL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x.mean(dim=0),
    "last": lambda x: x[-1],
    "cls": lambda x: x[0],
}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    directory = tmp_path_factory.mktemp(request.param)
    save_random(directory, request.param)
    return load_twin(directory)


def theirs(twin: Twin, layer: int, pooling: str, normalize: bool) -> np.ndarray:
    """Run each text separately through transformers, without padding, and pool with torch."""
    rows = []
    for text in TEXTS:
        with torch.no_grad():
            out = twin.torch_model(torch.tensor([text]), output_hidden_states=True)
        row = POOL[pooling](out.hidden_states[layer][0])
        rows.append(torch.nn.functional.normalize(row, dim=0) if normalize else row)
    return torch.stack(rows).numpy()


@pytest.mark.parametrize(
    ("layer", "pooling", "normalize"),
    [
        (-1, "mean", False),
        (-1, "last", True),
        (-1, "cls", False),
        (0, "mean", False),
        (2, "last", False),
        (-3, "mean", True),
    ],
)
def test_embeddings_equal_transformers_pooled_with_torch(
    twin: Twin, layer: int, pooling: Any, normalize: bool
) -> None:
    ours = embeddings(
        twin.model, twin.params, TEXTS, layer=layer, pooling=pooling, normalize=normalize
    )
    assert_close(ours, theirs(twin, layer, pooling, normalize))


def test_lm_embeds_token_id_lists(twin: Twin) -> None:
    """LM.embed equals transformers for lists of ids; a bare text or list of ids is refused."""
    lm = jaxllm.load(twin.directory)
    found = lm.embed(TEXTS, layer=1, pooling="last", normalize=True)
    assert_close(found, theirs(twin, 1, "last", True))
    for wrong in ("One day", [1, 2]):  # a text, and token ids, in place of a list of them
        with pytest.raises(TokenError, match=r"embed takes a list|a prompt is text or token ids"):
            lm.embed(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_pooling_with_padding_anywhere(array: Callable[..., Any]) -> None:
    """Pooling ignores padding, even NaN; rows without tokens and zero vectors give zeros."""
    x = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    x[0, 0] = np.nan  # padding may hold anything
    mask = array([[False, True, False, True], [False, False, False, False]])
    expected = {"mean": (x[0, 1] + x[0, 3]) / 2, "last": x[0, 3], "cls": x[0, 1]}
    for pooling, row in expected.items():
        found = pool(array(x), mask, pooling)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(found), [row, np.zeros(3)])
    found = l2_normalize(array([[3.0, 4.0], [0.0, 0.0]], dtype=np.float32))
    np.testing.assert_allclose(np.asarray(found), [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)


@pytest.mark.skipif(not native.is_enabled(), reason="needs the kernels")
def test_embedding_has_bits_of_its_text() -> None:
    """A text's vector has the same bits alone and beside longer texts, which widen its padding."""
    precision = dataclasses.replace(Precision.uniform("float32"), invariant=True)
    model, params = random_model("llama", precision=precision)
    texts = [tokens(1, n, seed=n)[0].tolist() for n in (5, 13, 61)]
    together = embeddings(model, params, texts, normalize=True)
    for text, found in zip(texts, together, strict=True):
        alone = embeddings(model, params, [text], normalize=True)
        np.testing.assert_array_equal(alone[0], found)


def test_embeddings_refuse_invalid_arguments() -> None:
    """Invalid options, texts, ids and lengths are refused; NaN raises with the text's index."""
    model, params = random_model("llama", num_hidden_layers=3)

    def run(texts: Any = ((1, 2),), **options: Any) -> None:
        embeddings(model, params, texts, **options)

    for options, message in (
        ({"layer": 4}, "layer must be from -4 to 3, got 4"),
        ({"layer": -5}, "layer must be"),
        ({"normalize": "yes"}, "normalize must be True or False, got 'yes'"),
        ({"layer": 1.0}, "layer must be"),
        ({"pooling": "max"}, "pooling must be one of mean, last, cls, got 'max'"),
        ({"pooling": "none"}, "pooling must be one of"),
        ({"batch": 0}, "batch must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(**options)
    for texts, message in (
        ([[1], []], "text 1 must be a non-empty list"),
        ([[1.5]], "text 0 must be an array of integers"),
        (["abc"], "text 0 must be an array of integers"),
        ([[1], [1, 131]], "text 1: token id 131 is outside"),
        ([[-1]], "token id -1"),
    ):
        with pytest.raises(TokenError, match=message):
            run(texts)
    with pytest.raises(CapacityError, match="text 1 has 98 tokens, the model's context is 97"):
        run([[1], [1] * 98])
    assert embeddings(model, params, []).shape == (0, 40)
    table = params["embed_tokens"]["weight"].at[7].set(jnp.nan)
    broken = {**params, "embed_tokens": {"weight": table}}
    with pytest.raises(NonFiniteError, match="text 1 are NaN"):
        embeddings(model, broken, [*TEXTS[:1], [7, 1], *TEXTS[1:4]], layer=0)


@pytest.fixture
def run(run: Run) -> Run:
    """Run `jaxllm embed ARGS`."""
    return partial(run, "embed")


def test_embed_writes_one_row_per_line(run: Run, tmp_path: Path) -> None:
    """Lines, also empty ones and U+2028, give normalized means: JSON, text, npy, safetensors."""
    lines = ["One day", "", "Once upon a time\u2028there was", "One day"]
    file = tmp_path / "texts"
    file.write_bytes("\n".join(lines).encode() + b"\n")
    lm = jaxllm.load("demo:llama", dtype="float32")
    rows = [lm.encode(line) for line in lines]
    width = max(map(len, rows))
    ids = np.array([row + [0] * (width - len(row)) for row in rows])
    positions = np.array([[*range(len(row)), *([-1] * (width - len(row)))] for row in rows])
    whole = jaxllm.forward(
        lm.model, lm.params, None, ids, positions_BT=positions, hidden_states=True
    )
    assert whole.hidden_states is not None
    means = [
        np.asarray(whole.hidden_states[-1][r, : len(row)]).mean(0) for r, row in enumerate(rows)
    ]
    expected = [mean / np.linalg.norm(mean) for mean in means]
    base = ("demo:llama", "--dtype", "float32", "--normalize")
    out, _ = succeed(run, *base, "--file", file, "--json")
    found = np.array([json.loads(line) for line in out.splitlines()])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    _, plain, _ = run(*base, "--file", "-", stdin=file.read_text(encoding="utf-8"))
    np.testing.assert_allclose(np.loadtxt(plain.splitlines()), expected, atol=1e-5)
    for name in ("e.npy", "e.safetensors"):
        status, out, err = run(*base, "--file", file, "--out", tmp_path / name)
        assert (status, out) == (0, "")
        assert f"4 rows of {found.shape[1]}" in err
    np.testing.assert_array_equal(
        np.load(tmp_path / "e.npy", allow_pickle=False),
        load_file(tmp_path / "e.safetensors")["embeddings"],
    )
    np.testing.assert_allclose(np.load(tmp_path / "e.npy"), expected, atol=1e-5)


def test_embed_accepts_quantized_weights(run: Run, tmp_path: Path) -> None:
    """The embedding equals transformers on the dequantized weights, averaged with torch."""
    table, text = tmp_path / "formats.json", "One day a cat"
    table.write_text('{"quantize": "int8"}')
    lm = jaxllm.load("demo:llama", dtype="float32", quantize="int8")
    with transformers_directory("demo:llama", lm, "float32") as directory:
        twin = load_twin(directory)
    with torch.no_grad():
        ids = torch.tensor([lm.encode(text)])
        out = twin.torch_model(ids, output_hidden_states=True)
    expected = out.hidden_states[-1][0].mean(dim=0).numpy()
    for options in (("--quantize", "int8"), ("--precision", table)):
        found, _ = succeed(
            run, "demo:llama", "--dtype", "float32", "--text", text, "--json", *options
        )
        assert_close(json.loads(found), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give either --text"),
        (("--text", "a", "--file", "b"), "give either --text"),
        (("--file", "nowhere"), "cannot read nowhere: No such file"),
        (("--file", "-"), "- has no lines"),
        (("--text", "a", "--pooling", "max"), "pooling must be one of"),
        (("--text", "a", "--layer", "99"), "layer must be"),
        (("--text", "a", "--out", "x.bin"), "must end in .npy or .safetensors"),
        (("--text", "a", "--out", "."), "a directory has this name"),
        (("--text", "a", "--quantize", "int5"), "weight format must be one of"),
        (("--text", "a", "--precision", "nowhere"), "--precision: cannot read nowhere"),
    ],
)
def test_embed_refuses_in_one_line(run: Run, options: Any, message: str) -> None:
    assert_refused(run, message, *options)


def test_embed_refuses_to_overwrite(run: Run, tmp_path: Path) -> None:
    (tmp_path / "e.npy").write_bytes(b"mine")
    assert_refused(run, "exists; name another file", "--text", "a", "--out", tmp_path / "e.npy")
    assert (tmp_path / "e.npy").read_bytes() == b"mine"
