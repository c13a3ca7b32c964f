"""Target models by the architecture their checkpoint names.

The Target protocol: `config`, `cache_rows` (cache.Rows), `boundaries`, `features` (their joint width),
`forward(batch, cache) -> hidden [B*T, D], aux [B*T, F]` and `head(hidden, k, logits) -> values, ids, lse`.
"""

from . import qwen3_moe

TARGETS = {"Qwen3MoeForCausalLM": qwen3_moe.Qwen3MoE}
