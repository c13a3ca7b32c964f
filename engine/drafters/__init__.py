"""Drafters by the architecture their checkpoint names.

The Drafter protocol, which any object may follow:
`cache_rows` (cache.Rows or None) rows it keeps in the shared cache, under the kind "draft";
`extend(batch, features, cache) -> hidden` see rows of committed text: tokens [B, T], the target's features under the
token before each [B*T, F];
`propose(state, tree, cache)` write tree.tokens and tree.parents (node 0 is state.root) after extending over the
backlog; depths and ancestor bits follow from the parents.
"""

from . import eagle3

DRAFTERS = {"LlamaForCausalLM": eagle3.Eagle3, "LlamaForCausalLMEagle3": eagle3.Eagle3}
