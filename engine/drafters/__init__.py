"""Drafters by the architecture their checkpoint names.

The Drafter protocol, which any object may follow:
`cache_rows` (cache.Rows or None) rows it keeps in the shared cache, under the kind "draft";
`extend(batch, features, cache) -> hidden` see rows of committed text: tokens [B, T], the target's features under the
token before each [B*T, F]; nothing reads the hidden of rows of a prompt (batch.wanted is then one of them);
`propose(state, tree, cache)` write tree.tokens and tree.parents [B, T] (node 0 is state.root, -1: no proposal; parents
precede children, no node deeper than tree.shape.steps) after extending over the backlog; depths and ancestor bits
follow from the parents;
`foresee(batch, features, cache) -> ids`, where there is one: `extend`, and the token proposed after each row [B, T]; a
shape that chooses itself then sees from plain decoding alone when drafting would pay.

`propose` finds in State (engine.buffers) the committed rows n = seq_lens [B], the token at n in root [B], and the
backlog of committed text it has not seen: tokens n - backlog + 1 .. n in backlog_tokens, the target's features under
the token before each in backlog_features. It runs inside a captured graph: static shapes, nothing that waits for the
device, no memory of its own that is not there before the first cycle. A drafter without cache rows that needs the text
itself keeps a `history.History`. Prompts of which a beginning is cached are extended over from there on: what a drafter
keeps for a position must live in its cache rows, or by cache slot as History does.
"""

from weights.eagle3 import FAMILIES, LATENT

from . import eagle3, eagle3_mla

DRAFTERS = dict.fromkeys(FAMILIES, eagle3.Eagle3) | dict.fromkeys(LATENT, eagle3_mla.LatentEagle3)
