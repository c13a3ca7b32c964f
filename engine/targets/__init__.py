"""Target models by the architecture their checkpoint names.

The Target protocol: `config`, `cache_rows` (cache.Rows), `boundaries`, `features` (their joint width F),
`forward(batch, cache) -> hidden [B*T, D], aux` (hidden perhaps of batch.wanted alone; aux: of each boundary its
[B*T, D], which engine.batch.side_by_side and ops.record join) and `head(hidden, k, logits) -> values, ids, lse`.
`boundaries` holds numbers k of B_k, ascending, and may end with weights.capture.FINAL, the normed last one; it may be
bound to others while nothing is captured, and `features` follows.
"""

from . import deepseek_v3, glm4_moe, gpt_oss, llama, mixtral, qwen3_moe

TARGETS = {
    "LlamaForCausalLM": llama.Llama,
    "Qwen3ForCausalLM": llama.Llama,
    "Qwen3MoeForCausalLM": qwen3_moe.Qwen3MoE,
    "DeepseekV2ForCausalLM": deepseek_v3.DeepseekV3,
    "DeepseekV3ForCausalLM": deepseek_v3.DeepseekV3,
    "KimiK25ForConditionalGeneration": deepseek_v3.DeepseekV3,
    "MixtralForCausalLM": mixtral.Mixtral,
    "Glm4MoeForCausalLM": glm4_moe.Glm4MoE,
    "GptOssForCausalLM": gpt_oss.GptOss,
}
