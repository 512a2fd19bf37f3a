"""`jaxllm train` end to end; the README test also runs each kind of training once."""

import json
import re
from pathlib import Path

import peft
import pytest
import safetensors.numpy
import transformers
from peft import LoraConfig

import jaxllm
from jaxllm.checkpoints import native, resolve
from jaxllm.cli.train import parse_layers, parse_modules
from tests.conftest import ROOT, Run, assert_refused, succeed

STORY = "Once upon a time there was a little girl who had a red ball and a big dog.\n"
pytestmark = pytest.mark.usefixtures("demo_names")
SMALL = ("--length", 32, "--batch-size", 2, "--steps", 2)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "story.txt"
    file.write_text("".join(f"{number}. {STORY}" for number in range(12)), encoding="utf-8")
    return file


def test_train_full_writes_model_report_and_plot(run: Run, text: Path, tmp_path: Path) -> None:
    """The run writes the model, a JSON report and a plot, removes its resume state, trains only the
    chosen parameters, and refuses to overwrite.
    """
    out, report, plot = (tmp_path / name for name in ("out", "report.json", "losses.png"))
    arguments = ("train", "full", "demo:llama", out, "--data", text, *SMALL, "--only", "norm")
    message, err = succeed(run, *arguments, "--report", report, "--plot", plot, "--sample", "One")
    assert message.startswith(f"{out}: loss ")
    assert "held-out" in err
    assert "  One" in err
    found = json.loads(report.read_text())
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert found["data"]["width"] == 32
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out.parts").exists()
    before, after = jaxllm.load("demo:llama", dtype="float32"), jaxllm.load(out)
    assert (before.params["norm"]["weight"] != after.params["norm"]["weight"]).any()
    table = "embed_tokens"
    assert (before.params[table]["weight"] == after.params[table]["weight"]).all()
    assert_refused(run, f"{out} already holds", *arguments)


def test_train_lora_accepts_prefix_and_existing_adapter(
    run: Run, text: Path, tmp_path: Path
) -> None:
    """An adapter trains after a prefix on a quantized base, and a second run continues from it with
    its rank and DoRA; long prefixes and missing adapters are refused.
    """
    prefix = tmp_path / "prefix.txt"
    prefix.write_text("Once upon a time")
    arguments = ("train", "lora", "demo:llama", tmp_path / "a", "--data", text, *SMALL)
    options = ("--target-modules", "q_proj", "--rank", 2, "--quantize", "int8", "--dora")
    succeed(run, *arguments, *options, "--prefix", prefix)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["use_dora"]) == (2, True)
    again = ("train", "lora", "demo:llama", tmp_path / "b", "--data", text, *SMALL)
    succeed(run, *again, "--adapter", tmp_path / "a")
    config = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert (config["r"], config["use_dora"]) == (2, True)
    arguments = ("train", "lora", "demo:llama", tmp_path / "c", "--data", text, *SMALL)
    assert_refused(
        run, "exceed the model's context of 512", *arguments, "--prefix", prefix, "--length", 510
    )
    assert_refused(run, "has no adapter_config.json", *arguments, "--adapter", tmp_path)
    assert not (tmp_path / "c").exists()


def test_train_prompt_writes_reusable_cache_file(run: Run, text: Path, tmp_path: Path) -> None:
    file, begin = tmp_path / "prompt.cache", "Once upon a time"
    arguments = ("train", "prompt", "demo:llama", file, "--data", text, *SMALL, "--begin", begin)
    succeed(run, *arguments, "--dtype", "float32")
    more = ("-p", f"{begin} there", "-n", 2, "--dtype", "float32")
    _, err = succeed(run, "generate", "demo:llama", *more, "--prompt-cache", file)
    assert "of the prompt's" in err
    assert_refused(run, f"{file} exists", *arguments)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("", (), "there is no data to train on"),
        ('{"text": "a b c"}\n{"words": "d"}\n', (), "line 2"),
        ('{"prompt": "a b c", "completion": ""}\n', (), "line 1: the completion is empty"),
        ('{"tokens": [5, 6, 7], "labels": [-100, -100, -100]}\n', (), "no token is marked"),
        ("x", ("--keep-zeros",), "no zeros to keep"),
    ],
)
def test_train_bad_data_gives_one_line_error(
    content: str, arguments: tuple[object, ...], message: str, run: Run, text: Path, tmp_path: Path
) -> None:
    file = text
    if content != "x":
        file = tmp_path / ("data.jsonl" if content else "data.txt")
        file.write_text(content)
        arguments = ("--eval-split", 0)
    status, _, err = run(
        "train", "full", "demo:llama", tmp_path / "out", "--data", file, *SMALL, *arguments
    )
    assert status == 1
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


INVALID = (
    ("full", ("--epochs", "nan"), "--epochs must be a finite number above 0: got nan"),
    ("full", ("--epochs", "inf"), "--epochs must be a finite number above 0: got inf"),
    ("full", ("--lr", 0), "--lr must be above 0"),
    ("full", ("--epochs", 0), "--epochs must be a finite number above 0: got 0.0"),
    ("full", ("--lr", -1), "lr must be a number >= 0.0, got -1"),
    ("full", ("--lr", "nan"), "lr must be a number >= 0.0, got nan"),
    ("full", ("--schedule", "cosin"), "'cosin' is not one of 'cosine', 'linear', 'constant'"),
    ("full", ("--max-grad-norm", -1), "max_grad_norm must be a number > 0.0"),
    ("full", ("--warmup", 2), "--warmup must be 1 or less, got '2'"),
    ("full", ("--weight-decay", "nan"), "--weight-decay must be 0 or more, got 'nan'"),
    ("full", ("--eval-split", 1), "--eval-split must be at least 0 and below 1: got 1.0"),
    ("full", ("--eval-split", 0, "--patience", 1), "--patience requires an evaluation loss"),
    ("full", ("--length", 5000), "--length must be at most 512"),
    ("full", ("--only", "layer.0"), "matches no trainable parameter"),
    ("full", ("--only", "("), "the rules"),
    ("full", ("--router-loss", 0.1), "need a mixture of experts"),
    ("full", ("--lr-pattern", "norm"), "--lr-pattern must be REGEX=NUMBER"),
    ("full", ("--objective", "1fb:2"), "--objective '1fb' is unknown"),
    ("full", ("--mesh", "tensr=2"), "tensr"),
    ("full", ("--eval-data", "missing.txt"), "cannot read missing.txt"),
    ("full", ("--resume",), "--resume requires the state of a run"),
    ("lora", ("--target-modules", "q_prj"), "'q_prj' matches no module of this model"),
    ("lora", ("--target-modules", ".*[", "-r", 2), "target_modules"),
    ("lora", ("--target-modules", "a.*", "--target-modules", "b"), "must be names or one regex"),
    ("lora", ("--rank-pattern", "down_proj"), "--rank-pattern must be REGEX=NUMBER"),
    ("lora", ("--layers-to-transform", "3-1"), "must be numbers or ranges"),
    ("lora", ("--lora-dropout", 1.5), "lora_dropout"),
    ("full", ("--rate", 1), "No such option: --rate: use --lr"),
    ("full", ("--held-out=0.1",), "No such option: --held-out: use --eval-split"),
    ("lora", ("--target", "q_proj"), "No such option: --target: use --target-modules"),
    ("lora", ("--dropout", 0.1), "No such option: --dropout: use --lora-dropout"),
    ("full", ("--dropout", 0.1), "No such option: --dropout"),
)


def test_train_validates_options_before_loading_weights(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every invalid option gives one line on stderr before weights are read; renamed options name
    their new spelling.
    """

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(native, "load_params", load)
    out = tmp_path / "out"
    for kind, arguments, message in INVALID:
        status, _, err = run("train", kind, "demo:llama", out, "--data", text, *arguments)
        assert status != 0, arguments
        assert message in err, err
        assert len(err.strip().splitlines()) == 1, err
    assert not list(tmp_path.glob("out*"))


def test_train_lora_targets_match_peft(run: Run, text: Path, tmp_path: Path) -> None:
    """A regex with exclusions, rank and alpha patterns adapts the modules, with the ranks and
    scales, that PEFT does.
    """
    out, regex, skip = tmp_path / "out", r".*\.(q|v|down)_proj", r".*\.0\..*v_proj"
    status, _, err = run(
        "train", "lora", "demo:llama", out, "--data", text, "--length", 16, "--batch-size", 1,
        "--steps", 1, "--eval-split", 0, "-r", 2, "--lora-alpha", 7, "--target-modules", regex,
        "--exclude-modules", skip, "--rank-pattern", "v_proj=5", "--alpha-pattern", "v_proj=2.5",
    )  # fmt: skip
    assert status == 0, err
    expected = LoraConfig(
        r=2, lora_alpha=7, target_modules=regex, exclude_modules=skip, rank_pattern={"v_proj": 5},
        alpha_pattern={"v_proj": 2.5},
    )  # fmt: skip
    saved = json.loads((out / "adapter_config.json").read_text())
    assert scales(LoraConfig(**saved)) == scales(expected)
    ours = safetensors.numpy.load_file(out / "adapter_model.safetensors")
    names = {key.split(".lora_")[0].removeprefix("base_model.model.") for key in ours}
    assert names == {*scales(expected)}


def test_parse_modules_and_layers_reads_lists() -> None:
    names = ["q_proj", "v_proj", "mlp.up_proj"]
    assert parse_modules("", ["q_proj,v_proj", "mlp.up_proj"]) == names
    assert parse_modules("", ["All-Linear"]) == "all-linear"
    assert parse_modules("", [r"(?:.*)_proj"]) == r"(?:.*)_proj"
    assert parse_layers("0, 4-7,9") == [0, 4, 5, 6, 7, 9]


def scales(config: LoraConfig) -> dict[str, tuple[int, float]]:
    """Return rank and scale of each module that PEFT adapts."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(resolve.DEMO_DIR / "llama")
    )
    found = peft.inject_adapter_in_model(config, model).named_modules()
    return {
        name: (module.r["default"], module.scaling["default"])
        for name, module in found
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


def test_train_resume_extends_finished_run(run: Run, text: Path, tmp_path: Path) -> None:
    """--keep-state and --resume extend a run; an lr of 0 changes nothing; --save-steps writes a
    usable result; changed options are refused.
    """
    out, report = tmp_path / "out", tmp_path / "report.json"
    common = ("train", "lora", "demo:llama", out, "--data", text, "-r", 2, "--report", report)
    common = (*common, "--target-modules", "q_proj", "--length", 16, "--batch-size", 1)
    common = (*common, "--lr", 1e-50)  # 0 in float32
    _, err = succeed(run, *common, "--steps", 2, "--save-steps", 1, "--keep-state")
    assert "its last 5% is held out" in err
    assert (tmp_path / "out.parts").is_dir()
    first = (out / "adapter_model.safetensors").read_bytes()
    early = tmp_path / "out.step-1" / "adapter_model.safetensors"
    assert early.read_bytes() == first
    assert not any(safetensors.numpy.load(first)[k].any() for k in _names(first, "lora_B"))
    assert_refused(run, "give --resume to continue the run", *common, "--steps", 3)
    status, _, err = run(*common, "--steps", 3, "--resume", "--seed", 1)
    assert (status, "seed was 0, is 1" in err) == (1, True), err
    _, err = succeed(run, *common, "--steps", 3, "--resume", "--warmup", 0.05)
    assert "resuming after step 2 of 3; steps was 2, is 3" in err
    found = json.loads(report.read_text())
    assert [step["step"] for step in found["steps"]] == [1, 2, 3]
    assert found["total_steps"] == 3
    assert not (tmp_path / "out.parts").exists()
    assert not (tmp_path / ".out.replaced").exists()


def _names(content: bytes, part: str) -> list[str]:
    return [name for name in safetensors.numpy.load(content) if part in name]


def test_training_page_example_runs_and_lowers_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """The example of docs/training.md runs."""
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "training.md", "exec"), {"__name__": "__main__"})
    losses = [float(x) for x in re.findall(r"[\d.]+", capsys.readouterr().out)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
