"""Write golden/smollm2_gguf.json: names and some hashes of the tensors that transformers loads from SmolLM2's file.

Run by an interpreter with torch, transformers, gguf and accelerate:
`python tests/oracles/make_smollm2_gguf.py MODEL.gguf [output.json]`.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
import transformers

GOLDEN = Path(__file__).parent / "golden" / "smollm2_gguf.json"
HASHED = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.13.self_attn.o_proj.weight",
    "model.layers.13.mlp.gate_proj.weight",
    "model.layers.29.mlp.down_proj.weight",
    "model.layers.29.self_attn.k_proj.weight",
    "model.layers.29.post_attention_layernorm.weight",
)


def main(gguf: Path, output: Path) -> None:
    """Load the model and write one file; the tied head is not a tensor of its own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    state = model.state_dict()
    sha256 = {name: hashlib.sha256(state[name].contiguous().numpy().tobytes()).hexdigest() for name in HASHED}
    golden = {"names": sorted(state.keys() - {"lm_head.weight"}), "sha256": sha256}
    output.write_text(json.dumps(golden) + "\n")
    print(f"{output}: {len(golden['names'])} names, {len(sha256)} hashes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else GOLDEN)
