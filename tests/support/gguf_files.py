"""Weights in the blocks of GGUF files, and tiny models in such files, as the tests need them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from paged_backend.kernels.cpu import FORMATS

# Where the float16 of a block lie, in pairs of bytes; all other bytes may be any.
_HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2]}
_HALVES["Q6_K"] = [208]
# The tokens of a model's own file: the first three are special.
_SPECIAL = 3


def random_blocks(name: str, num_columns: int, depth: int, seed: int = 0) -> np.ndarray:
    """Blocks of a type as a file holds them, uint8 ``[num_columns, bytes of a row]``, whose weights are about 1."""
    rng, fmt = np.random.default_rng(seed), FORMATS[name]
    blocks = rng.integers(0, 256, (num_columns, depth // fmt.block_inputs, fmt.block_bytes), dtype=np.uint8)
    spread = {4: 0.1, 5: 0.05, 6: 0.02, 8: 0.01}[fmt.bits] / (32 if fmt.shared else 1)
    for at in _HALVES[name]:
        halves = (spread * rng.standard_normal((*blocks.shape[:2], 1))).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(num_columns, -1)


def dequantised(blocks: np.ndarray, name: str) -> torch.Tensor:
    """What the gguf library says that blocks are, float32."""
    return torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]))


def write_model(path: Path, model: PreTrainedModel, types: dict[str, str], *, default: str = "Q4_1") -> Path:
    """Write a tiny llama or qwen2 model, its weights in random blocks of the types named for parts of their names.

    Norms and biases are the model's own. Returns the path.
    """
    config = model.config
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[config.model_type]
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    letters = [chr(ord("a") + i) for i in range(26)]
    tokens = [f"<{i}>" for i in range(_SPECIAL)] + letters + ["ab"]
    tokens += [f"ab{i}" for i in range(config.vocab_size - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * _SPECIAL + [1] * (config.vocab_size - _SPECIAL))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for i, (name, value) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        there = f"{names.get_name(stem)}.{suffix}"
        if value.dim() == 2:
            kind = next((kind for part, kind in types.items() if part in name), default)
            if kind == "F16":
                writer.add_tensor(there, (0.05 * value.numpy()).astype(np.float16))
            elif kind in FORMATS:
                blocks = random_blocks(kind, *value.shape, seed=i)
                writer.add_tensor(there, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
            else:
                kind_type = gguf.GGMLQuantizationType[kind]
                writer.add_tensor(there, gguf.quantize(value.numpy(), kind_type), raw_dtype=kind_type)
        else:
            writer.add_tensor(there, value.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
