"""Small random models of transformers, one of each kind of attention, with head dims as they are published where those matter."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__ = ["CAUSAL", "MODELS", "inputs", "make"]

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": True,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "sliding_window": 8}
GEMMA4 = {**GROUPED, **MIXED, "head_dim": 256, "global_head_dim": 512, "num_kv_shared_layers": 2}
GEMMA4 |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
DEEPSEEK = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
INDEXER = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 4}
DEEPSEEK4 = {
    "head_dim": 512, "num_key_value_heads": 1, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "index_n_heads": 2, "index_head_dim": 64, "index_topk": 2,
    "sliding_window": 8, "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
}  # fmt: skip
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
WHISPER = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "num_mel_bins": 8,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_source_positions": 16, "pad_token_id": 0,
    "max_target_positions": 32, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": [],
    "begin_suppress_tokens": [],
}  # fmt: skip

# name: the model's class, the config's class, the config's arguments
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, **MIXED, "head_dim": 256}),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", {**GEMMA4, "num_kv_shared_layers": 0}),
    "gemma4_shared": ("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**GROUPED, "head_dim": 32, "sliding_window": 8, "num_local_experts": 4,
                                                      "num_experts_per_tok": 2, "layer_types": MIXED["layer_types"][:2]}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", {**DEEPSEEK, **INDEXER}),
    "deepseek_v4": ("DeepseekV4ForCausalLM", "DeepseekV4Config", DEEPSEEK4),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "bert": ("BertForMaskedLM", "BertConfig", {}),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 32, "sliding_window": 8}),
}  # fmt: skip
CAUSAL = [name for name in MODELS if name not in ("t5", "whisper", "bert", "modernbert", "gemma2")]


def make(name: str, implementation: str = "eager", **changes: Any) -> nn.Module:
    """The same weights for every implementation, large enough that attention matters."""
    kind, config, arguments = MODELS[name]
    sizes = {} if name in ("t5", "whisper", "gpt2") else SIZES
    made = getattr(transformers, config)(**{**sizes, **arguments, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, kind)._from_config(made, attn_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() != 1 or not bool((parameter == 1).all()):  # not the weights of norms
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.6 / max(1, parameter.shape[-1]) ** 0.5))
    return model


def inputs(name: str, padding: int = 0, length: int = 24) -> dict[str, Tensor]:
    """A batch of two, of which the second has as many padding tokens on its left."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 64, (2, length), generator=generator)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "decoder_input_ids": ids[:, :9]}
    batch = {"input_ids": ids}
    if padding:
        ids[1, :padding] = 0
        batch["attention_mask"] = (torch.arange(length) >= torch.tensor([[0], [padding]])).long()
    if name == "t5":
        batch["decoder_input_ids"] = ids[:, :9].clamp(min=3)
    return batch
