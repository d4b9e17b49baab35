"""Small GGUF files, written by the `gguf` package: models as llama.cpp's converter writes them, and tokenizers."""

import gguf
import numpy as np

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_LAYER_NAMES = {
    **LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_model(path, hf, tensors, *, extra=lambda writer: None):
    """Convert a Hugging Face configuration and its float32 tensors; `extra` may add keys or tensors to the writer."""
    architecture = ARCHITECTURES[hf["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, hf)
    for name, tensor in tensors.items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = permute(tensor, hf["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        writer.add_tensor(gguf_name(name, architecture), np.ascontiguousarray(tensor))
    extra(writer)
    finish(writer)
    return path


def add_metadata(writer, hf):
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(hf["rope_theta"])
    writer.add_bos_token_id(hf["bos_token_id"])
    writer.add_eos_token_id(hf["eos_token_id"])
    if "head_dim" in hf:
        writer.add_key_length(hf["head_dim"])
        writer.add_value_length(hf["head_dim"])
    if hf["model_type"] in ("mistral", "gemma3_text"):
        writer.add_sliding_window(hf["sliding_window"])
    if "sliding_window_pattern" in hf:
        writer.add_sliding_window_pattern(hf["sliding_window_pattern"])
    if "final_logit_softcapping" in hf:
        writer.add_final_logit_softcapping(hf["final_logit_softcapping"])
    scaling = hf.get("rope_scaling", {})
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def gguf_name(name, architecture):
    stem, ending = name.rsplit(".", 1)
    if stem in MODEL_NAMES:
        return f"{MODEL_NAMES[stem]}.{ending}"
    _, _, layer, part = stem.split(".", 3)
    names = GEMMA_LAYER_NAMES if architecture == "gemma3" else LAYER_NAMES
    return f"blk.{layer}.{names[part]}.{ending}"


def permute(tensor, num_heads):
    """What the converter does to Llama's q and k, so that rotated pairs are neighbours."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def write_tokenizer(path, *, architecture="llama", model="gpt2", tokens, types=None, flags=(), **options):
    """Write a file with a tokenizer only. `options` name GGUFWriter's add methods; `flags` are (name, bool) pairs."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [1] * len(tokens))
    for name, value in (*options.items(), *flags):
        getattr(writer, f"add_{name}")(value)
    finish(writer)
    return path


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
