"""Writes a trained model as GGUF (F16), laid out for llama.cpp's ``deepseek`` architecture."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from torch import Tensor

from .model import TinyMoE
from .settings import Shape
from .tokenizer import END


def _keys(writer: gguf.GGUFWriter, shape: Shape, name: str, description: str) -> None:
    writer.add_name(name)
    writer.add_description(description)
    writer.add_license("Apache-2.0")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.dense_ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(shape.expert_ff)
    writer.add_leading_dense_block_count(shape.dense_layers)
    writer.add_expert_weights_scale(shape.expert_scale)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _vocabulary(writer: gguf.GGUFWriter, tokenizer: Path) -> None:
    """Tokens and merges; the end token also begins every text, as it did in training."""
    saved = json.loads(tokenizer.read_text())["model"]
    tokens = [token for token, _ in sorted(saved["vocab"].items(), key=lambda item: item[1])]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in saved["merges"]]
    kinds = [gguf.TokenType.CONTROL if t == END else gguf.TokenType.NORMAL for t in tokens]
    end = tokens.index(END)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(end)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def tensors(model: TinyMoE) -> dict[str, Tensor]:
    """All weights under llama.cpp's names, rows being outputs: (out, in), experts first."""
    ff = model.shape.expert_ff
    found = {"token_embd": model.embedding, "output_norm": model.norm}
    for index, block in enumerate(model.blocks):
        attention, dense, experts = block.attention, block.dense, block.experts
        named = {
            "attn_norm": attention.norm,
            "attn_q": attention.q,
            "attn_k": attention.k,
            "attn_v": attention.v,
            "attn_output": attention.out,
            "ffn_norm": block.norm,
        }
        suffix = "" if experts is None else "_shexp"
        for projection in ("gate", "up", "down"):
            named[f"ffn_{projection}{suffix}"] = getattr(dense, projection)
        if experts is not None:
            named["ffn_gate_inp"] = experts.router
            named["ffn_gate_exps"] = experts.gate_up[:, :, :ff].mT
            named["ffn_up_exps"] = experts.gate_up[:, :, ff:].mT
            named["ffn_down_exps"] = experts.down.mT
        found |= {f"blk.{index}.{name}": weight for name, weight in named.items()}
    return {f"{name}.weight": weight.detach() for name, weight in found.items()}


def write(model: TinyMoE, tokenizer: Path, path: Path, name: str, description: str) -> None:
    """Writes matrices in F16, norms and routers in F32."""
    writer = gguf.GGUFWriter(path, "deepseek")
    _keys(writer, model.shape, name, description)
    _vocabulary(writer, tokenizer)
    for tensor, weight in tensors(model).items():
        keep = weight.ndim == 1 or tensor.endswith("ffn_gate_inp.weight")
        values = weight.float().contiguous().numpy()
        writer.add_tensor(tensor, values if keep else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
