"""Target models by the architecture their checkpoint names.

The Target protocol: `config`, `cache_rows` (cache.Rows), `boundaries`, `features` (their joint width),
`forward(batch, cache) -> hidden [B*T, D], aux [B*T, F]` and `head(hidden, k, logits) -> values, ids, lse`.
`boundaries` holds numbers k of B_k, ascending, and may end with weights.capture.FINAL, the normed last one; it may be
bound to others while nothing is captured, and `features` follows.
"""

from . import llama, qwen3_moe

TARGETS = {
    "LlamaForCausalLM": llama.Llama,
    "Qwen3ForCausalLM": llama.Llama,
    "Qwen3MoeForCausalLM": qwen3_moe.Qwen3MoE,
}
