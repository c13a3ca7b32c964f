"""Drafters that know the text, and a head without cache or pages to compare the real one with.

`Replay` follows the Drafter protocol; its tables live on the device and `propose` asks the host nothing, so that it can
be captured. `Forced` lets a real drafter work and puts a Replay's tree in place of its own.
"""

import contextlib
import importlib.metadata
import json
import random
from dataclasses import dataclass, replace

import torch
from safetensors.torch import load_file
from torch.testing import assert_close

LAYOUTS = 8  # trees of one shape that differ in where the right branch lies


def layout(shape, seed):
    """(parents, depths, path) of one tree: `path` are the nodes of the right branch, the root first.

    A chain has one layout. In a tree the branch ends at the last node and its other nodes are drawn from those between,
    decoys hang from earlier nodes, and depths stay within shape.steps.
    """
    nodes, length = shape.draft_tokens, shape.path
    if shape.topk == 1:
        return [0, *range(nodes - 1)], list(range(nodes)), list(range(nodes))
    draw = random.Random(f"{shape} {seed}")
    path = [0, *sorted(draw.sample(range(1, nodes - 1), length - 2)), nodes - 1] if length > 1 else [0]
    parents, depths = [0], [0]
    for node in range(1, nodes):
        if node in path:
            parent = path[path.index(node) - 1]
        else:
            parent = draw.choice([i for i in range(node) if depths[i] < shape.steps])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents, depths, path


class Replay:
    """A drafter that replays known texts and is right at some nodes.

    Depth d of the tree at committed length n is right where right[n, d - 1]; the node then holds the token of the text
    at n + d, else another one. What is accepted is the run of right nodes from the root.

    Args:
        texts: lists of token ids, prompts included, one for each request that may come (any order, any slot).
        vocabulary: V; right: a share of nodes, or a table [L, steps] of bools; seed: of the share's coins.
        batch: slots at most.
    """

    cache_rows = None

    def __init__(self, texts, vocabulary, right=1.0, *, seed=0, batch=8, device="cpu"):
        longest = max(map(len, texts)) + 65
        padded = [text + [0] * (longest - len(text)) for text in texts]
        self.texts, self.vocabulary = torch.tensor(padded, device=device), vocabulary
        self.owner = torch.zeros(batch, dtype=torch.int64, device=device)
        if isinstance(right, float):
            coins = torch.rand(longest, 64, generator=torch.Generator().manual_seed(seed))
            right = (coins < right).tolist()
        self.right = torch.zeros(longest, 64, dtype=torch.bool)
        for at, row in enumerate(right):
            self.right[at, : len(row)] = torch.tensor(row, dtype=torch.bool)
        self.right, self.device, self.layouts = self.right.to(device), device, {}

    def prepare(self, shape):
        """Tables of one shape: parents, depths and whether a node is on the right branch, each [LAYOUTS, T]."""
        if shape not in self.layouts:
            trees = [layout(shape, seed) for seed in range(LAYOUTS)]
            on_path = [[node in path for node in range(shape.draft_tokens)] for _, _, path in trees]
            rows = ([t[0] for t in trees], [t[1] for t in trees], on_path)
            self.layouts[shape] = tuple(torch.tensor(x, device=self.device) for x in rows)
        return self.layouts[shape]

    def extend(self, batch, features, cache):
        """Keeps nothing: the text is known."""

    def _whose(self, state):
        """Which text each slot is in: the one it was in, else the first that has the slot's last tokens there."""
        n, b = state.seq_lens, state.batch
        fits = self.texts[:, n] == state.root  # R B
        back = (n - 1).clamp(min=0)
        twice = fits & ((self.texts[:, back] == state.backlog_tokens[:, 0]) | (state.backlog < 2))
        best = torch.where(twice.any(0), twice.long().argmax(0), fits.long().argmax(0))
        owner = self.owner[:b]
        owner.copy_(torch.where(fits.gather(0, owner[None])[0], owner, best))
        return owner

    def propose(self, state, tree, cache):
        """Writes tree.tokens and tree.parents."""
        parents, depths, on_path = self.prepare(tree.shape)
        n = state.seq_lens
        variant = n % LAYOUTS
        depth = depths[variant]  # B T
        truth = self.texts[self._whose(state)[:, None], n[:, None] + depth]
        hit = on_path[variant] & self.right[n[:, None], (depth - 1).clamp(min=0)]
        node = torch.arange(tree.shape.draft_tokens, device=n.device)
        decoy = (truth + 1 + node % (self.vocabulary - 1)) % self.vocabulary
        tree.tokens.copy_(torch.where(hit | (node == 0), truth, decoy))
        tree.tokens[:, 0] = state.root
        tree.parents.copy_(parents[variant])


@dataclass
class Round:
    """What a real drafter did: committed rows [B], its tree [B, T]; for each step (logits [B, Q, Vd], tokens [B, K],
    source [B, K]): what the head said of each beam, and the next beam with the beam that each entry extends."""

    seq_lens: torch.Tensor
    steps: list
    tokens: torch.Tensor
    parents: torch.Tensor


class Forced:
    """Runs a real drafter, notes its numbers, then lets `replay` decide what is accepted.

    `rounds` holds a Round for each propose.
    """

    def __init__(self, real, replay):
        self.real, self.replay, self.cache_rows, self.rounds = real, replay, real.cache_rows, []
        self.config, self._logits, self._steps = real.config, None, []
        best, grow = real.best, real.ops.grow

        def noted_best(hidden, k):
            b, q, h = hidden.shape
            self._logits = hidden.new_zeros(b * q, real.head.vocabulary, dtype=torch.float32)
            real.head(hidden.reshape(b * q, h), k, self._logits)
            self._logits = self._logits.view(b, q, -1)
            return best(hidden, k)

        def noted_grow(*args):
            out = grow(*args)
            self._steps.append((self._logits, out[0].clone(), out[1].clone()))
            return out

        self._ops = real.ops
        real.best, real.ops = noted_best, replace(real.ops, grow=noted_grow)

    def release(self):
        """Leave the real drafter as it was."""
        del self.real.best
        self.real.ops = self._ops

    def extend(self, batch, features, cache):
        """The real one's."""
        return self.real.extend(batch, features, cache)

    def propose(self, state, tree, cache):
        """The real drafter's work on its cache and numbers; the replay's tree."""
        self._steps = []
        self.real.propose(state, tree, cache)
        self.rounds.append(Round(state.seq_lens.clone(), self._steps, tree.tokens.clone(), tree.parents.clone()))
        self.replay.propose(state, tree, cache)


class FreshHead:
    """An EAGLE-3 head over a whole text at once: plain Llama arithmetic from the checkpoint's own names.

    Row p pairs the target's features at p with the token at p + 1.

    Args:
        path: directory of the head; tokens: list of n + 1 ids; features: [n or more, F].
        embedding, head: [V, D] of the target where the head has none.
    """

    def __init__(self, path, tokens, features, embedding=None, head=None):
        with open(f"{path}/config.json") as file:
            self.config = json.load(file)
        self.w = {n.replace("midlayer.", ""): t for n, t in load_file(f"{path}/model.safetensors").items()}
        self.w.setdefault("embed_tokens.weight", embedding)
        self.w.setdefault("lm_head.weight", head)
        known = self._input(torch.tensor(tokens[1:]), features[: len(tokens) - 1] @ self.w["fc.weight"].T)
        self.known, self.residual = self._project(known, 0), features[: len(tokens) - 1] @ self.w["fc.weight"].T

    def _norm(self, x, name):
        return x * (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * self.w[f"{name}.weight"]

    def _input(self, tokens, hidden):
        embedding = self._norm(self.w["embed_tokens.weight"][tokens], "input_layernorm")
        return torch.cat([embedding, self._norm(hidden, "hidden_norm")], -1)

    def _project(self, x, first):
        """q [H, rows, Dh], k and v [G, rows, Dh] at positions first, first + 1, …"""
        size = self.config["head_dim"]
        q, k, v = (
            (x @ self.w[f"self_attn.{n}_proj.weight"].T).view(len(x), -1, size).transpose(0, 1) for n in ("q", "k", "v")
        )
        angle = self.config["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        angle = torch.outer(torch.arange(first, first + len(x)).double(), angle).repeat(1, 2).float()

        def turn(y):
            a, b = y.chunk(2, -1)
            return y * angle.cos() + torch.cat([-b, a], -1) * angle.sin()

        return turn(q), turn(k), v

    def _row(self, q, keys, values, residual):
        """Hidden [D] of one row that sees all the keys."""
        shared = q.shape[0] // keys.shape[0]
        keys, values = (x.repeat_interleave(shared, 0) for x in (keys, values))
        weights = (torch.einsum("hd,hld->hl", q, keys) * q.shape[-1] ** -0.5).softmax(-1)
        x = residual + torch.einsum("hl,hld->hd", weights, values).flatten() @ self.w["self_attn.o_proj.weight"].T
        y = self._norm(x, "post_attention_layernorm")
        gate, up, down = (self.w[f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T

    def logits(self, n, path):
        """Draft logits [len(path) + 1, Vd] after row n - 1 and after each token of `path` drafted from there."""
        q, keys, values = (x[:, :n] for x in self.known)
        hidden = self._row(q[:, -1], keys, values, self.residual[n - 1])
        out = [hidden]
        for step, token in enumerate(path):
            q, k, v = self._project(self._input(torch.tensor([token]), hidden[None]), n + step)
            keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
            hidden = self._row(q[:, 0], keys, values, hidden)
            out.append(hidden)
        return self._norm(torch.stack(out), "norm") @ self.w["lm_head.weight"].T

    @property
    def ids(self):
        """Target id of each draft id."""
        small = torch.arange(self.config["draft_vocab_size"])
        return (small + self.w["d2t"] if "d2t" in self.w else small).tolist()

    def check(self, round, slot, atol=1e-4):
        """Compare one round of a Forced drafter with this head: the logits of every beam; that each beam keeps the best
        of its candidates, and the tree the best of all, by cumulative log-probability."""
        n, k = int(round.seq_lens[slot]), round.steps[0][1].shape[1]
        column = {token: i for i, token in enumerate(self.ids)}
        beams, scores, pool = [()], [0.0], {}
        for logits, tokens, source in round.steps:
            fresh = torch.stack([self.logits(n, path)[-1] for path in beams])
            assert_close(logits[slot], fresh, atol=atol, rtol=1e-4)
            candidates = []
            for path, score, row in zip(beams, scores, fresh.log_softmax(-1), strict=True):
                found = {path + (token,): score + float(row[i]) for token, i in column.items()}
                candidates += sorted(found, key=found.get)[-k:]
                pool.update((c, found[c]) for c in candidates[-k:])
            beams = [beams[s] + (t,) for s, t in zip(source[slot].tolist(), tokens[slot].tolist(), strict=True)]
            scores = [pool[b] for b in beams]
            assert len(set(beams)) == k
            assert_close(
                torch.tensor(scores), torch.tensor([pool[c] for c in candidates]).topk(k).values, atol=1e-3, rtol=0
            )
        tokens, parents, paths = round.tokens[slot].tolist(), round.parents[slot].tolist(), [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            paths.append(paths[parent] + (token,))
        kept = torch.tensor([pool[path] for path in paths[1:]])
        best = torch.tensor(list(pool.values())).topk(len(kept)).values
        assert_close(kept.sort(descending=True).values, best, atol=1e-3, rtol=0)


class Transformers:
    """A toy target in transformers, without cache: fp32, eager attention and experts.

    Its logits, and every boundary B_k: hidden_states[L] is normed there, so the last one is taken before the norm.
    """

    def __init__(self, path):
        from transformers import AutoModelForCausalLM

        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("kernels")
            raise AssertionError("another package named kernels is installed: transformers would use it")
        eager = dict(attn_implementation="eager", experts_implementation="eager", dtype=torch.float32)
        self.model = AutoModelForCausalLM.from_pretrained(path, **eager).eval()

    @torch.no_grad()
    def __call__(self, ids):
        """ids: list -> logits [n, V], boundaries: L + 1 tensors [n, D]."""
        last = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0][0]))
        out = self.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        hook.remove()
        return out.logits[0], [h[0] for h in out.hidden_states[:-1]] + last

    def features(self, ids, boundaries):
        """[n, len(boundaries) * D]."""
        found = self(ids)[1]
        return torch.cat([found[b] for b in boundaries], -1)
