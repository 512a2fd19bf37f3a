"""The models in jaxllm/demo: small, loadable everywhere, and able to generate a story."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import jaxllm
from scripts.demo_models.story_consistency import draw_openings, generate_stories, rate_stories
from scripts.demo_models.story_grammar import draw_stories

DEMO = Path(jaxllm.__file__).parent / "demo"
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
OPENINGS = (
    "Once upon a time there was a curious fox named Mia who lived in",
    "Long ago, in an old mill beside a stream, there lived a brave boy named Omar.",
    "Once there was",
)

Loaded = tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def directory(request: pytest.FixtureRequest) -> Path:
    return DEMO / str(request.param)


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Loaded:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def continue_story(theirs: Loaded) -> Callable[[str], str]:
    """Return a function that continues an opening with transformers, greedily."""
    model, tokenizer = theirs

    def greedy(opening: str) -> str:
        inputs = tokenizer(opening, return_tensors="pt")
        ids = model.generate(**inputs, max_length=400, do_sample=False)
        return str(tokenizer.decode(ids[0]))

    return greedy


def test_demo_directory_is_complete_and_small(directory: Path) -> None:
    """The directory has exactly the expected files, at most 6 MB."""
    assert {path.name for path in directory.iterdir()} == FILES
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 6_000_000


def test_demo_weights_are_float16_and_small(directory: Path) -> None:
    """One to three million finite float16 parameters."""
    tensors = load_file(directory / "model.safetensors")
    assert {array.dtype for array in tensors.values()} == {np.dtype(np.float16)}
    assert all(np.isfinite(array).all() for array in tensors.values())
    assert 1_000_000 <= sum(array.size for array in tensors.values()) <= 3_000_000
    config = json.loads((directory / "config.json").read_text())
    assert config["torch_dtype"] == "float16"


def test_special_token_ids_agree(directory: Path, theirs: Loaded) -> None:
    """The ids of config, generation config and both tokenizers agree, and so do their encodings."""
    _, tokenizer = theirs
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    for file in ("config.json", "generation_config.json"):
        data = json.loads((directory / file).read_text())
        assert {name: data[name] for name in ids} == ids
    assert {name: getattr(tokenizer, name) for name in ids} == ids
    text = "Once there was a fox."
    ours = jaxllm.load(directory).tokenizer
    assert tokenizer(text).input_ids == ours.encode(text, bos=True)
    assert tokenizer.decode(ours.encode(text)) == text


@pytest.mark.parametrize("opening", OPENINGS)
def test_greedy_story_ends_and_uses_known_words(
    opening: str, continue_story: Callable[[str], str], vocabulary: set[str]
) -> None:
    """A greedy story of transformers ends with eos, closes quotes, has 60 to 220 known words."""
    story = continue_story(opening)
    assert story.startswith("<|bos|>")
    assert story.endswith("<|eos|>")
    assert story.count('"') % 2 == 0
    words = re.findall(r"[A-Za-z]+", story.removeprefix("<|bos|>").removesuffix("<|eos|>"))
    assert set(words) <= vocabulary
    assert 60 <= len(words) <= 220


@pytest.fixture(scope="module")
def vocabulary() -> set[str]:
    """The words of the grammar's stories."""
    return set(re.findall(r"[A-Za-z]+", " ".join(draw_stories(3000, 99))))


def test_stories_keep_names_and_pronouns(directory: Path) -> None:
    """At least 95 % of 32 greedy stories are consistent."""
    stories = generate_stories(jaxllm.load(directory), draw_openings(32), 32)
    share, judgments = rate_stories(stories)
    assert share > 0.95, [judgment.errors for judgment in judgments if judgment.errors]


def test_late_positions_are_trained(theirs: Loaded, directory: Path) -> None:
    """The loss of the last 128 positions is less than 1.25 times that of positions 128 to 255."""
    model, tokenizer = theirs
    ids = [i for story in draw_stories(40, 1234) for i in [*tokenizer(story).input_ids, 2]]
    rows = torch.tensor(ids[: len(ids) // 512 * 512]).reshape(-1, 512)
    with torch.no_grad():
        logits = model(rows).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none"
    ).mean(0)
    assert loss[-128:].mean() < 1.25 * loss[128:256].mean()
