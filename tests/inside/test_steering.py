"""Steering vectors: how they are found, their files, and steered texts everywhere alike."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import jaxllm
from jaxllm.errors import CheckpointError, ConfigError, SamplingError, TokenError
from jaxllm.inside import (
    Add,
    combine_directions,
    find_directions,
    read_directions,
    steering_edits,
    write_directions,
)
from jaxllm.models.site_inputs import check_edits
from jaxllm.server.errors import ApiError
from jaxllm.server.model_process import ModelProcess, ModelSettings
from jaxllm.server.openai_requests import read_completion
from tests.conftest import Run, assert_refused, succeed
from tests.server.test_model_process import _Frames
from tests.tiny_models import assert_close, make_twin, random_model, tokens

PAIRS = [(tokens(1, 5, seed=i)[0], tokens(1, 7, seed=i + 9)[0]) for i in range(3)]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def tiny() -> Any:
    return random_model("llama")


@pytest.fixture(scope="module")
def lm(shallow_demos: Path) -> jaxllm.LM:
    return jaxllm.load(shallow_demos / "llama", dtype="float32")


def random_directions(layers: Any, width: int, seed: int = 0) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {layer: rng.standard_normal(width, np.float32) for layer in layers}


def assert_equal(one: dict[int, np.ndarray], other: dict[int, np.ndarray]) -> None:
    assert list(one) == list(other)
    for layer, x in one.items():
        np.testing.assert_array_equal(x, other[layer])


def steps_of_pairs(lm: Any, tokens: str) -> np.ndarray:
    """The differences of the pairs' states `[P, L, D]`, from one run per text."""
    rows = []
    for pair in PAIRS:
        states = []
        for text in pair:
            sites = jaxllm.forward(*lm, None, text[None], read=["blocks.*.resid_post"]).sites
            x_LTD = np.stack([np.asarray(x[0]) for x in sites.values()])
            states.append(x_LTD[:, -1] if tokens == "last" else x_LTD.mean(axis=1))
        rows.append(states[0] - states[1])
    return np.stack(rows)


@pytest.mark.parametrize("pooled", ["last", "mean"])
def test_mean_direction_equals_numpy(tiny: Any, pooled: Any) -> None:
    found = find_directions(*tiny, PAIRS, tokens=pooled, batch=4)
    want_LD = steps_of_pairs(tiny, pooled).mean(axis=0)
    assert list(found) == [*range(len(want_LD))]
    np.testing.assert_allclose(np.stack([*found.values()]), want_LD, atol=1e-5)


def test_pca_direction_equals_eigenvector(tiny: Any) -> None:
    """It is the mean difference projected onto the top eigenvector of the second moments."""
    found = find_directions(*tiny, PAIRS, method="pca")
    step_PLD = steps_of_pairs(tiny, "last")
    for layer, direction_D in found.items():
        step_PD = step_PLD[:, layer]
        _, vectors_DD = np.linalg.eigh(step_PD.T @ step_PD)
        axis_D = vectors_DD[:, -1]
        np.testing.assert_allclose(direction_D, axis_D * (axis_D @ step_PD.mean(axis=0)), atol=1e-4)
        assert direction_D @ step_PD.mean(axis=0) > 0


def test_invalid_pairs_are_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="at least one pair"):
        find_directions(*tiny, [])
    with pytest.raises(TokenError, match="list of pairs"):
        find_directions(*tiny, [([1], [2], [3])])  # type: ignore[list-item]
    with pytest.raises(TokenError, match="text 1 must be a non-empty list"):
        find_directions(*tiny, [([1], [])])
    with pytest.raises(ConfigError, match="method must be one of mean, pca, got 'median'"):
        find_directions(*tiny, PAIRS, method="median")  # type: ignore[arg-type]


def test_vector_files_round_trip(tmp_path: Path) -> None:
    """GGUF as the `gguf` package reads it, without layer 0; safetensors with it."""
    vector = random_directions(range(3), 8)
    write_directions(tmp_path / "a.gguf", vector, model_hint="llama")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "controlvector"
    assert fields["controlvector.model_hint"] == "llama"
    assert fields["controlvector.layer_count"] == 2
    kinds = reader.fields["controlvector.layer_count"].types
    assert kinds == [gguf.GGUFValueType.INT32]
    theirs = {int(t.name.removeprefix("direction.")): np.asarray(t.data) for t in reader.tensors}
    assert_equal(theirs, {layer: vector[layer] for layer in (1, 2)})
    assert_equal(read_directions(tmp_path / "a.gguf"), theirs)
    write_directions(tmp_path / "a.safetensors", vector)
    assert_equal(read_directions(tmp_path / "a.safetensors"), vector)
    with pytest.raises(CheckpointError, match="already exists"):
        write_directions(tmp_path / "a.gguf", vector)
    with pytest.raises(ConfigError, match="layer 1 or later"):
        write_directions(tmp_path / "b.gguf", {0: vector[0]})


def write_with_gguf(path: Path, tensors: dict[str, np.ndarray], arch: str) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_int32("controlvector.layer_count", len(tensors))
    for name, x in tensors.items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_files_of_other_writers_are_read(tmp_path: Path) -> None:
    vector = random_directions((1, 3, 12), 8)
    tensors = {f"direction.{layer}": x for layer, x in reversed(vector.items())}
    path = write_with_gguf(tmp_path / "v.gguf", tensors, "controlvector")
    assert_equal(read_directions(path), vector)


ROW = np.ones(8, np.float32)
BAD_FILES = [
    ({"direction.1": ROW}, "llama", "not a control vector: general.architecture is 'llama'"),
    ({"direction.0": ROW, "direction.1": ROW}, "controlvector", "direction.0 is not allowed"),
    ({"direction.x": ROW}, "controlvector", "'direction.x' is not named direction.LAYER"),
    ({"direction.1": np.ones((2, 8), np.float32)}, "controlvector", "must be a float32 vector"),
    ({"direction.1": ROW.astype(np.float16)}, "controlvector", "must be a float32 vector"),
    ({"direction.1": ROW, "direction.2": ROW[:5]}, "controlvector", r"widths \[5, 8\]"),
    ({"direction.2": ROW * np.nan}, "controlvector", "direction.2 holds NaN or infinity"),
    ({}, "controlvector", "has no directions"),
]


@pytest.mark.parametrize(("tensors", "arch", "message"), BAD_FILES)
def test_bad_vector_files_are_refused(
    tensors: dict[str, np.ndarray], arch: str, message: str, tmp_path: Path
) -> None:
    path = write_with_gguf(tmp_path / "v.gguf", tensors, arch)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_directions(path)
    assert "\n" not in str(caught.value)


def test_vectors_of_other_models_are_refused(tiny: Any, tmp_path: Path) -> None:
    path, config = tmp_path / "v.safetensors", tiny[0].config
    for directions, message in (
        (random_directions([1], 39), "width 39, the model's stream has 40"),
        (random_directions([1, 2], 40), "direction of layer 2, the model's last is 1"),
    ):
        save_file({f"direction.{n}": x for n, x in directions.items()}, path)
        with pytest.raises(CheckpointError, match=message):
            read_directions(path, config)
    cut = write_with_gguf(tmp_path / "v.gguf", {"direction.1": ROW}, "controlvector")
    cut.write_bytes(cut.read_bytes()[:-16])
    with pytest.raises(CheckpointError, match="cut off"):
        read_directions(cut)
    with pytest.raises(CheckpointError, match="No such file"):
        read_directions(tmp_path / "none.gguf")


def test_vectors_add_with_their_strengths() -> None:
    one, two = random_directions((1, 2), 8), random_directions((2, 4), 8, seed=1)
    total = combine_directions([(one, 2.5), (two, -1)])
    assert_equal(
        total, {1: np.float32(2.5) * one[1], 2: np.float32(2.5) * one[2] - two[2], 4: -two[4]}
    )
    with pytest.raises(ConfigError, match="strength must be a finite number, got nan"):
        combine_directions([(one, float("nan"))])
    with pytest.raises(ConfigError, match="differ in width"):
        combine_directions([(one, 1.0), (random_directions((1,), 7), 1.0)])
    with pytest.raises(ConfigError, match="no direction of layer 3, only 1 to 2"):
        steering_edits(one, layers=[1, 3])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_direction_is_added_after_its_layer(family: str, tmp_path: Path) -> None:
    """direction.L changes the output of transformers' block L, as llama.cpp's `l_out-L`."""
    twin = make_twin(tmp_path, family, layers=3)
    lm, ids = (twin.model, twin.params), tokens(2, 6)
    vector = random_directions((1,), 40)
    body = twin.torch_model.get_submodule(twin.torch_model.base_model_prefix)
    block = body.get_submodule(jaxllm.models.get_family(family).layers)[1]
    step_D = torch.from_numpy(vector[1] * 1.5)

    def add(_: Any, __: Any, x: Any) -> Any:
        return (x[0] + step_D, *x[1:]) if isinstance(x, tuple) else x + step_D

    hook = block.register_forward_hook(add)
    with torch.no_grad():
        theirs = twin.torch_model(torch.from_numpy(ids).long()).logits.numpy()
    hook.remove()
    ours = jaxllm.forward(*lm, None, ids, edits=steering_edits(vector, 1.5)).logits
    assert_close(ours, theirs)


def steered(lm: jaxllm.LM, scale: float, seed: int = 0) -> dict[str, Add]:
    return steering_edits(random_directions((0, 1), lm.config.hidden_size, seed), scale)


def test_generate_stream_and_serve_take_edits(lm: jaxllm.LM, compiled: list[str]) -> None:
    """They give the same tokens, other strengths other ones, without another program."""
    options: dict[str, Any] = {"max_new_tokens": 10}
    scales = [0.0, 0.2, -0.3]
    alone = [lm.generate(PROMPT, edits=steered(lm, scale), **options) for scale in scales]
    assert len({tuple(x.tokens) for x in alone}) == 3
    count = len(compiled)
    again = lm.generate(PROMPT, edits=steered(lm, 0.4, seed=1), **options)
    assert len(compiled) == count
    batch = lm.generate([PROMPT] * 3, edits=steered(lm, np.array(scales)), **options)  # type: ignore[arg-type]
    assert [x.tokens for x in batch] == [x.tokens for x in alone]
    pieces = lm.stream(PROMPT, edits=steered(lm, -0.3), **options)
    assert [piece.token for piece in pieces] == alone[2].tokens
    requests = [
        {"id": n, "prompt": PROMPT, "edits": steered(lm, scale), **options}
        for n, scale in enumerate(scales)
    ]
    requests.append({"id": 3, "prompt": PROMPT, "edits": steered(lm, 0.4, seed=1), **options})
    served: Any = dict(lm.serve(requests, rows=3, capacity=64))
    assert [served[n].tokens for n in range(4)] == [x.tokens for x in (*alone, again)]


def test_edits_of_other_decoders_are_refused(lm: jaxllm.LM) -> None:
    edits = steered(lm, 1.0)
    for options in ({"num_beams": 2}, {"penalty_alpha": 0.5}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(SamplingError, match="does not take edits"):
            lm.generate(PROMPT, edits=edits, **options)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="must be one number or one for each of 1 rows"):
        lm.generate(PROMPT, edits=steered(lm, np.ones(2)))  # type: ignore[arg-type]


def test_commands_make_and_use_a_vector(
    run: Run, demo_names: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`steer` writes what `find_directions` finds; `generate` and `chat` steer by it."""
    monkeypatch.chdir(tmp_path)
    pairs = [["She was happy", "She was sad"], ["a good day", "a bad day"]]
    Path("pairs.json").write_text(json.dumps(pairs))
    Path("pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    succeed(run, "steer", "demo:llama", "pairs.json", "a.gguf", "--dtype", "float32")
    succeed(run, "steer", "demo:llama", "pairs.tsv", "b.safetensors", "--dtype", "float32")
    lm = jaxllm.load("demo:llama", dtype="float32")
    texts: Any = [tuple(map(lm.encode, pair)) for pair in pairs]
    want = find_directions(lm.model, lm.params, texts)
    assert_equal(read_directions("b.safetensors"), want)
    assert_equal(read_directions("a.gguf"), {1: want[1]})
    vector = combine_directions([(want, 0.5), ({1: want[1]}, -2)])
    edits = steering_edits(vector)
    text = lm.generate(PROMPT, max_new_tokens=8, edits=edits).text
    command = ("generate", "-p", PROMPT, "-n", 8, "--temperature", 0, "--dtype", "float32")
    both = ("--steer", "b.safetensors:0.5", "--steer", "a.gguf:-2")
    assert succeed(run, *command, *both)[0] == text
    assert succeed(run, *command)[0] != text
    template = Path("t.jinja")
    template.write_text("{{ messages[-1].content }}")
    chat = ("chat", "-n", 8, "--temperature", 0, "--dtype", "float32", "--chat-template", template)
    said, log = succeed(run, *chat, *both, stdin=f"{PROMPT}\n/set\n")
    ids = lm.tokenizer.encode(PROMPT)  # without a begin-of-text token
    assert said.rstrip("\n") == lm.generate(ids, max_new_tokens=8, edits=edits).text
    assert "edits = blocks.0.resid_post, blocks.1.resid_post" in log
    for arguments, message in (
        (("generate", "--steer", "none.gguf:2"), "none.gguf"),
        (("steer", "demo:llama", "pairs.tsv", "a.gguf"), "already exists"),
        (("serve", "--steer", "a.gguf"), "--steer must be NAME=FILE"),
    ):
        assert_refused(run, message, *arguments)
    succeed(run, "steer", "demo:llama", "pairs.tsv", "c.gguf", "--layers", "1", "--method", "pca")
    for layers in ("2", "x", ","):
        assert_refused(
            run, "--layers", "steer", "demo:llama", "pairs.tsv", "d.gguf", "--layers", layers
        )
    Path("bad.tsv").write_text("one\ttwo\nthree\n")
    assert_refused(run, "pair 2 must be two texts", "steer", "demo:llama", "bad.tsv", "d.gguf")


def test_server_steers_each_request(lm: jaxllm.LM, tmp_path: Path) -> None:
    """The body's vectors, strengths and layers make the edits that `generate` takes, all of one
    structure, hence of one program. Clients cannot send edits, and mistakes are answered in one
    line.
    """
    D = lm.config.hidden_size
    vectors = {"calm": random_directions((1,), D), "odd": random_directions((0, 1), D, seed=1)}
    files = {name: str(tmp_path / f"{name}.safetensors") for name in vectors}
    for name, vector in vectors.items():
        write_directions(files[name], vector)
    frames = _Frames()
    process = ModelProcess(lm, ModelSettings(rows=2, vectors=files), frames)  # type: ignore[arg-type]

    def read(steering: Any) -> Any:
        body = {"prompt": PROMPT, "steering": steering, "edits": {"embed": 1}, "max_tokens": 2}
        return read_completion(body).frames[0]

    def edits(steering: Any) -> Any:
        return process._make_request(read(steering))[0]["edits"]

    calm, odd = vectors.values()
    zero = {layer: np.zeros_like(x) for layer, x in odd.items()}
    found = [
        edits([{"vector": "calm", "scale": -0.5}, {"vector": "odd", "scale": 0.3}]),
        edits([{"vector": "odd", "scale": -0.7, "layers": [0]}]),
        edits([{"vector": "calm"}]),
        edits([]),
    ]
    parts = [[(calm, -0.5), (odd, 0.3)], [({0: odd[0]}, -0.7)], [(calm, 1.0)], []]
    for one, part in zip(found, parts, strict=True):
        want = steering_edits(combine_directions([(zero, 1.0), *part]))
        assert one.keys() == want.keys()
        for site, edit in one.items():
            np.testing.assert_array_equal(edit.vector, want[site].vector)
    checked = [check_edits(lm.model, one, 1, 1, None) for one in found]
    assert len({str(jax.tree.structure(one)) for one in checked}) == 1
    assert "edits" not in process._make_request(read(None))
    for steering, message in (
        ({"vector": "calm"}, "steering must be a list"),
        ([{"vector": "calm", "strength": 2}], "unknown field strength"),
        ([{"vector": "calm", "scale": "2"}], "scale must be a number"),
    ):
        with pytest.raises(ApiError, match=message):
            read(steering)
    for number, (steering, message) in enumerate(
        (
            ([{"vector": "calmm"}], "unknown vector 'calmm'. The server has calm, odd"),
            ([{"vector": "calm", "layers": [0]}], "layers of calm must be a list of 1 to 1"),
        )
    ):
        process.receive({"id": number, "do": "generate", **read(steering)})
        frames.wait_for(lambda frame, number=number: frame["id"] == number)
        error = frames.sent[-1]["error"]
        assert error["kind"] == "invalid"
        assert message in error["message"]
        assert "\n" not in error["message"]
    with pytest.raises(CheckpointError, match="No such file"):
        ModelProcess(lm, ModelSettings(vectors={"x": "none.gguf"}), frames)  # type: ignore[arg-type]


def test_i32_of_gguf_is_signed(tmp_path: Path) -> None:
    """The count of layers is written as GGUF's type 5, which llama.cpp's own writer uses."""
    write_directions(tmp_path / "v.gguf", random_directions((1,), 8))
    raw = (tmp_path / "v.gguf").read_bytes()
    at = raw.index(b"controlvector.layer_count") + len("controlvector.layer_count")
    assert struct.unpack_from("<Ii", raw, at) == (5, 1)
