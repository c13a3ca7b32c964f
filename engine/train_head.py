"""An EAGLE-3 head in training form: the arithmetic of engine.drafters.eagle3 as a torch module, unrolled over the
drafter's own steps, with the names and the config.json of a SpecForge checkpoint.

Shapes: B sequences, L tokens of a window, N rows trained of it, H heads, G kv heads, R = H / G, Vd draft vocabulary.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from kernels import norm, rope
from weights.capture import boundaries
from weights.config import Eagle3Config, Refused

from .layers import rope as rotary


def linear(out_features, in_features):
    """A projection without bias, normal with variance 1 / in_features."""
    layer = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(layer.weight, std=in_features**-0.5)
    return layer


class Norm(nn.Module):
    """RMS norm of the engine (kernels.norm)."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return norm.reference(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention of step j over the keys of step 0 and of the row's own later steps."""

    def __init__(self, config):
        super().__init__()
        h, dh = config.hidden, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, dh
        self.q_proj = linear(config.heads * dh, 2 * h)
        self.k_proj, self.v_proj = (linear(config.kv_heads * dh, 2 * h) for _ in "kv")
        self.o_proj = linear(h, config.heads * dh)

    def forward(self, x, positions, cos_sin, keys, values):
        """x [B, N, 2h], positions [B*N]; keys, values: lists of [B, N, G, Dh], one a step, this one's appended."""
        b, n, _ = x.shape
        q, k, v = (p(x).view(b * n, -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        q = rope.reference(q, cos_sin, positions).view(b, n, self.kv_heads, -1, self.head_dim)
        keys.append(rope.reference(k, cos_sin, positions).view(b, n, self.kv_heads, self.head_dim))
        values.append(v.view(b, n, self.kv_heads, self.head_dim))
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        scores = torch.einsum("bngrd,bmgd->bgrnm", q, keys[0]).float().masked_fill(later, float("-inf"))
        own = [(q.float() * key[:, :, :, None].float()).sum(-1).permute(0, 2, 3, 1)[..., None] for key in keys[1:]]
        weights = (torch.cat([scores, *own], -1) * self.head_dim**-0.5).softmax(-1).to(v.dtype)
        y = torch.einsum("bgrnm,bmgd->bngrd", weights[..., :n], values[0])
        for i, value in enumerate(values[1:]):
            y = y + weights[..., n + i].permute(0, 3, 1, 2)[..., None] * value[:, :, :, None]
        return self.o_proj(y.flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj, self.up_proj = (linear(config.intermediate, config.hidden) for _ in "gu")
        self.down_proj = linear(config.hidden, config.intermediate)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The head's one layer."""

    def __init__(self, config):
        super().__init__()
        h, eps = config.hidden, config.eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (Norm(h, eps) for _ in range(3))
        self.self_attn, self.mlp = Attention(config), MLP(config)

    def forward(self, embedded, hidden, *where):
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        hidden = (normed if self.norm_before_residual else hidden) + self.self_attn(x, *where)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Head(nn.Module):
    """The head. `state_dict` is the checkpoint; what it borrows from the target is not in it.

    Args:
        config: weights.config.Eagle3Config; draft_ids: [Vd] target ids of the draft vocabulary, ascending.
        target: the loaded target: its embedding is borrowed, its head and final norm are where training starts.
        length: positions the rotary table covers.
    """

    def __init__(self, config, draft_ids, target, length):
        super().__init__()
        self.config = config
        self.fc = linear(config.hidden, config.aux_count * config.target_hidden)
        self.midlayer = Layer(config)
        self.norm = Norm(config.hidden, config.eps)
        self.lm_head = linear(config.draft_vocab, config.hidden)
        known = torch.zeros(config.vocab, dtype=torch.bool)
        known[draft_ids.cpu()] = True
        self.register_buffer("d2t", draft_ids.cpu() - torch.arange(len(draft_ids)))
        self.register_buffer("t2d", known)
        cos_sin = rotary.table(config.rope, config.head_dim, config.max_positions, length, "cpu")
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self.register_buffer("embedding", target.embedding.weight.float(), persistent=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.head.weight[draft_ids.to(target.head.weight.device)])
            self.norm.weight.copy_(target.head.norm.weight)

    @property
    def draft_ids(self):
        """[Vd] target ids of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def unroll(self, features, tokens, steps):
        """Training-time test (EAGLE-3, arXiv 2503.01840): each step on the hidden that the step before it made.

        Step j's row b stands where the drafter's j-th drafted row stands when row b is its last row with true features:
        at position b + j, with token b + j + 1 and the hidden of step j - 1's row b. It sees step 0's rows 0..b and its
        own rows of steps 1..j.

        Args:
            features: [B, L, F] of the target; tokens: [B, L].

        Returns:
            for each step the hidden [B, N, h], N = L - steps; row b of step j predicts token b + j + 2.
        """
        b, rows = tokens.shape[0], tokens.shape[1] - steps
        at = torch.arange(rows, device=tokens.device).repeat(b)
        hidden = self.fc(features[:, :rows]).float()
        keys, values, out = [], [], []
        for j in range(steps):
            embedded = F.embedding(tokens[:, j + 1 : j + 1 + rows], self.embedding)
            out.append(self.midlayer(embedded, hidden, at + j, self.cos_sin, keys, values))
            hidden = self.norm(out[-1]) if self.config.recycle == "post-norm" else out[-1]
        return out

    def logits(self, hidden):
        """[B, N, h] -> [B, N, Vd], fp32 under autocast too: bfloat16 logits tie where these do not."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.lm_head(self.norm(hidden))

    def rounded(self):
        """Round every weight to bfloat16, as `save` stores it."""
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(weight.bfloat16())

    def save(self, raw, folder):
        """Write config.json (raw) and model.safetensors, bfloat16."""
        folder = Path(folder)
        tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in self.state_dict().items()}
        tensors = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
        path, part = folder / "model.safetensors", folder / "model.safetensors.part"
        save_file(tensors, part, metadata={"format": "pt"})
        part.chmod(0o644)  # safetensors writes files that only their owner can read
        part.replace(path)  # a run killed here leaves the old file whole
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def describe(target, raw_target, draft_vocab, intermediate, override):
    """The head's config.json for a target, and the boundaries it reads.

    Args:
        target: weights.config of the target; raw_target: its config.json.
        override: "boundary:A,B,C" | "output:A,B,C" or None for the usual three.

    Returns:
        raw dict, weights.capture.Capture. Raises Refused where readers of the file would take other boundaries.
    """
    if draft_vocab > target.vocab:
        raise Refused(f"--draft-vocab {draft_vocab}: the target has {target.vocab} ids; supported: at most that")
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden,
        "target_hidden_size": target.hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": target.heads,
        "num_key_value_heads": getattr(target, "kv_heads", target.heads),  # latent attention has none
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.eps,
        "attention_bias": False,
        "max_position_embeddings": target.max_positions,
        "vocab_size": target.vocab,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    raw |= {key: raw_target[key] for key in keys if raw_target.get(key) is not None}
    count = 3 if override is None else override.count(",") + 1
    wanted = boundaries(Eagle3Config.read(raw | {"num_aux_hidden_states": count}, "the head"), target.layers, override)
    ids = [boundary - 1 for boundary in wanted.boundaries]  # written as layer outputs, as every trainer does
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    read = boundaries(Eagle3Config.read(raw, "the head"), target.layers) if min(ids) >= 0 else wanted
    if read.boundaries != wanted.boundaries or min(ids) < 0:
        raise Refused(
            f"--capture-layers: boundaries {list(wanted.boundaries)} cannot be written as layer outputs that every "
            "reader understands; supported: layers that start with output 1 (boundary 2)"
        )
    return raw, read


def draft_vocabulary(counts, size):
    """The `size` most frequent ids (equal counts: lowest id) of counts [V], ascending: [size] int64."""
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def losses(head, lesson, steps):
    """Cross entropy of each step against the target's distribution over the draft vocabulary [steps], and its top-1
    agreement with the target [steps]. Rows whose target token the draft vocabulary lacks carry no loss."""
    rows, out, agree = lesson.tokens.shape[1] - steps, [], []
    for j, hidden in enumerate(head.unroll(lesson.features, lesson.tokens, steps)):
        logits = head.logits(hidden)
        here = slice(j + 1, j + 1 + rows)
        best, wanted = lesson.best[:, here], lesson.wanted[:, here]
        known = head.t2d[best]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1), reduction="none")
        out.append((loss * known.flatten()).sum() / known.sum().clamp(min=1))
        agree.append((head.draft_ids[logits.detach().argmax(-1)] == best).float().mean())
    return torch.stack(out), torch.stack(agree)


@torch.no_grad()
def hits(head, lesson, steps):
    """[B, N, steps] bool: whether each step's best token is the target's own."""
    rows, out = lesson.tokens.shape[1] - steps, []
    for j, hidden in enumerate(head.unroll(lesson.features, lesson.tokens, steps)):
        ids = head.draft_ids[head.logits(hidden).argmax(-1)]
        out.append(ids == lesson.best[:, j + 1 : j + 1 + rows])
    return torch.stack(out, -1)


def chain_length(agree, steps):
    """Mean tokens a cycle of a chain of `steps` would emit along greedy text; agree [B, N, >= steps] of `hits`."""
    run = agree[..., :steps].long().cumprod(-1).sum(-1) + 1
    emitted = cycles = 0
    for row in run.tolist():
        at = 0
        while at < len(row):
            emitted, cycles, at = emitted + row[at], cycles + 1, at + row[at]
    return emitted / cycles
