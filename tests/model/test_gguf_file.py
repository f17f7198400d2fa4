"""A GGUF file that stays in its blocks gives the tokens of the same file dequantised by transformers."""

from __future__ import annotations

import copy
import struct
import sys
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import write_model
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM, GgufConfig

import paged_backend
from paged_backend import Engine, SamplingParams
from paged_backend.errors import ConfigError, ModelNotFound
from paged_backend.model.gguf_file import load_gguf
from paged_backend.model.quantised_tensor import QuantisedTensor, weight_bytes

SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 128}
PROMPTS = [list(range(5, 40)), [9, 20, 33], [7] * 17]
# Types that differ between queries, keys and values, and between a gate and what it gates.
MIXED = {"k_proj": "Q6_K", "v_proj": "Q8_0", "up_proj": "Q4_0", "down_proj": "Q5_K", "q_proj": "Q4_K"}
DENSE = {"quantization_config": GgufConfig(dequantize=True)}
FILE = {"gguf_file": "model.gguf"}


def write(folder: Path, family: str = "llama", types: dict[str, str] | None = None, **overrides) -> Path:
    model = make_tiny(family, **{**SHAPE, "head_dim": 64, **overrides})
    write_model(folder / "model.gguf", model, {"embed": "Q8_0"} if types is None else types)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("gguf")
    for name in ("llama", "mixed", "qwen2"):
        (root / name).mkdir()
    return {
        "llama": write(root / "llama", tie_word_embeddings=True),
        "mixed": write(root / "mixed", types=MIXED),
        "qwen2": write(root / "qwen2", "qwen2", MIXED, tie_word_embeddings=True),
    }


def engine_of(folder: Path, **options) -> Engine:
    options.setdefault("model_kwargs", FILE)
    return Engine.from_pretrained(folder, kv_cache_memory="4MiB", **options)


def tokens(engine: Engine) -> list[list[int]]:
    return [o.token_ids for o in engine.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))]


@pytest.mark.parametrize("name", ["llama", "mixed", "qwen2"])
def test_tokens_and_logits_are_those_of_the_dequantised_model(folders, name):
    stock = AutoModelForCausalLM.from_pretrained(folders[name], **FILE, **DENSE).eval()
    with engine_of(folders[name]) as engine, torch.inference_mode():
        stats = engine.stats()
        assert stats.swaps_made["layer"] == 2
        assert not stats.swaps_refused
        assert stats.packed_bytes < 40_000
        expected = []
        for prompt in PROMPTS:
            row = stock.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
            expected.append(row[0, len(prompt) :].tolist())
        assert tokens(engine) == expected
        ids = torch.tensor(PROMPTS[:1])
        spread = stock(ids).logits.std()
        actual = engine._kept_model(ids).logits
        torch.testing.assert_close(actual / spread, stock(ids).logits / spread, rtol=0, atol=1e-4)


def test_weights_take_the_memory_of_the_file_and_stats_say_in_what(folders):
    with engine_of(folders["mixed"]) as engine:
        sizes = engine.stats().weight_bytes
    assert sizes.keys() == {"Q4_1", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "float32"}
    reader = gguf.GGUFReader(folders["mixed"] / "model.gguf")
    assert sum(sizes.values()) <= 1.05 * sum(tensor.n_bytes for tensor in reader.tensors)


def test_the_modules_are_transformers_own(folders):
    model = load_gguf(str(folders["llama"]), FILE)
    stock = AutoModelForCausalLM.from_pretrained(folders["llama"], **FILE, **DENSE)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    assert isinstance(model.lm_head.weight, QuantisedTensor)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.to_dict() == stock.generation_config.to_dict()


def test_generate_runs_paged_on_a_packed_model(folders):
    model = load_gguf(str(folders["llama"]), FILE)
    prompt = torch.tensor([PROMPTS[0]])
    options = {"max_new_tokens": 6, "do_sample": False}
    paged_backend.install()
    try:
        assert torch.equal(model.generate(prompt, cache_impl="paged", **options), model.generate(prompt, **options))
    finally:
        paged_backend.uninstall()
        paged_backend.release(model)


def test_half_precision_is_no_farther_away_than_that_of_the_dequantised_model(folders):
    ids, half = torch.tensor(PROMPTS[:1]), {**FILE, "dtype": "bfloat16"}
    exact, packed = (load_gguf(str(folders["mixed"]), kwargs) for kwargs in (FILE, half))
    dense = AutoModelForCausalLM.from_pretrained(folders["mixed"], **half, **DENSE)
    assert packed.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    with torch.inference_mode():
        expected, actual, usual = (model(ids).logits for model in (exact, packed, dense))
    assert actual.dtype == torch.bfloat16
    # Some rows of a random model make much of a little.
    errors, usual_errors = ((x - expected).norm(dim=-1).median() for x in (actual, usual))
    assert errors < usual_errors


def test_the_dequantised_model_is_there_for_who_asks(folders):
    with engine_of(folders["llama"], model_kwargs={**FILE, **DENSE}) as engine:
        assert engine.stats().weight_bytes.keys() == {"float32"}
        assert not engine.stats().weights_widened


def test_weights_that_are_to_be_rounded_otherwise_are_widened_first(folders):
    with engine_of(folders["llama"], quantize="int4") as engine:
        assert engine.stats().weight_bytes.keys() == {"float32"}
        assert 0 < engine.stats().packed_bytes < engine.stats().weight_bytes["float32"] / 5


def test_a_file_may_be_named_itself(folders):
    with Engine.from_pretrained(folders["llama"] / "model.gguf", kv_cache_memory="4MiB") as engine:
        assert "Q4_1" in engine.stats().weight_bytes


def test_without_a_compiler_the_model_is_dequantised_and_stats_say_why(folders, monkeypatch):
    monkeypatch.setattr(sys.modules["paged_backend.model.gguf_file"].cpu, "is_available", lambda: False)
    with engine_of(folders["llama"], optimize="none", attention_backend="reference") as engine:
        assert engine.stats().weight_bytes.keys() == {"float32"}
        assert engine.stats().weights_widened == {"the model": "the C++ operations are not in use"}


def test_a_type_that_cpp_cannot_multiply_by_is_widened_alone(tmp_path):
    folder = write(tmp_path, types={"layers.1.mlp.down_proj": "TQ2_0", "lm_head": "F16"})
    with engine_of(folder) as engine:
        stats = engine.stats()
        assert stats.weights_widened == {"model.layers.1.mlp.down_proj.weight": "C++ cannot multiply by TQ2_0"}
        assert stats.swaps_made["layer"] == 1
        packed = tokens(engine)
    with engine_of(folder, model_kwargs={**FILE, **DENSE}) as engine:
        assert tokens(engine) == packed


def test_what_only_transformers_can_do_with_a_file_is_left_to_it(folders):
    with engine_of(folders["llama"], model_kwargs={**FILE, "low_cpu_mem_usage": True}) as engine:
        assert engine.stats().weight_bytes.keys() == {"float32"}
        assert "low_cpu_mem_usage" in engine.stats().weights_widened["the model"]


def test_an_edit_in_place_is_noticed(folders):
    with engine_of(folders["llama"]) as engine:
        before = tokens(engine)
        packed = engine._kept_model.model.layers[0].mlp.down_proj.weight.packed
        packed[:, :512] ^= 0x77
        after = tokens(engine)
    assert before != after


# Files that cannot be used


def test_a_missing_file_is_told_with_those_that_are_there(folders):
    with pytest.raises(ModelNotFound, match=r"has no file 'other.gguf'; the GGUF files there: model.gguf"):
        engine_of(folders["llama"], model_kwargs={"gguf_file": "other.gguf"})


def test_a_file_that_is_cut_short_is_told(folders, tmp_path):
    whole = (folders["llama"] / "model.gguf").read_bytes()
    for name, part in (("half", whole[: len(whole) // 2]), ("no", b"no GGUF at all")):
        (tmp_path / f"{name}.gguf").write_bytes(part)
        with pytest.raises(ConfigError, match=rf"{name}.gguf' is not a whole GGUF file, .*; fetch it again"):
            Engine.from_pretrained(tmp_path / f"{name}.gguf")


def test_an_unknown_type_is_told(folders, tmp_path):
    data = bytearray((folders["llama"] / "model.gguf").read_bytes())
    name = b"blk.0.attn_output.weight"
    # After the name: the number of dimensions, two of them, the type.
    at = data.index(name) + len(name) + 4 + 16
    assert struct.unpack_from("<I", data, at) == (gguf.GGMLQuantizationType.Q4_1,)
    struct.pack_into("<I", data, at, 250)
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=r"of a type that the package gguf does not know \(.*250.* is not"):
        engine_of(tmp_path)


def test_an_unknown_architecture_is_told(folders, tmp_path):
    data = (folders["llama"] / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data.replace(b"llama", b"lxama"))
    with pytest.raises(ConfigError, match="architecture lxama is not supported"):
        engine_of(tmp_path)


def test_a_missing_package_is_told_with_its_remedy(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"cannot be read without the package gguf; install it with `pip install"):
        engine_of(folders["llama"])


# The parameters themselves


def test_a_packed_weight_is_a_weight_for_every_other_operation(folders):
    weight = load_gguf(str(folders["llama"]), FILE).model.layers[0].mlp.up_proj.weight
    wide = weight.quantised.widened()
    assert torch.equal(weight + 0, wide)
    assert torch.equal(weight.T @ weight, wide.T @ wide)
    assert torch.equal(weight.to(torch.float16), wide.half())
    assert torch.equal(weight[3], wide[3])
    copied = copy.deepcopy(weight)
    assert isinstance(copied, QuantisedTensor)
    assert torch.equal(copied.quantised.packed, weight.packed)
    assert copied.packed is not weight.packed
    with pytest.raises(RuntimeError, match="would write a weight that is stored in Q4_1"), torch.no_grad():
        weight.mul_(2)


def test_a_model_that_is_moved_to_another_dtype_says_what_to_do_instead(folders):
    model = load_gguf(str(folders["llama"]), FILE)
    assert weight_bytes(model.to("cpu")).keys() == {"Q8_0", "Q4_1", "float32"}
    with pytest.raises(RuntimeError, match=r"stored in Q8_0 cannot become one of torch.float16 on cpu; load the model"):
        model.to(torch.float16)
