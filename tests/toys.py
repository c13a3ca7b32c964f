"""Tiny checkpoints whose right output is known: MAP, COIN and HISTORY targets, MAP, WRONG, FIXED and RANDOM heads.

They are ordinary directories (config.json, model.safetensors) for the ordinary loader, written once a test run.
MAP: attention and experts add nothing, embeddings are one-hot, the head is a permutation: the next token is a known
function of the last, with a logit gap of 8. COIN: every position has one known distribution. HISTORY: random weights;
what is right comes from an uncached pass of other code. Vocabulary and width are both 64.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine import Engine, Sampling

V = D = 64
HEADS, KV_HEADS, HEAD_DIM, EXPERTS, WIDTH = 4, 2, 16, 8, 32


def follow(start, count, after):
    """`count` tokens after `start` under the map `after`."""
    out = []
    for _ in range(count):
        start = after[start]
        out.append(start)
    return out


def cycle_of(ids):
    """A map of all V tokens in which `ids` follow each other in a circle, and so do the others."""
    others = [i for i in range(V) if i not in ids]
    after = [0] * V
    for ring in (list(ids), others):
        for here, there in zip(ring, ring[1:] + ring[:1], strict=True):
            after[here] = there
    return after


NEXT = cycle_of(torch.randperm(V, generator=torch.Generator().manual_seed(5)).tolist())  # one circle through all ids
OTHER = [NEXT[t] for t in NEXT]  # right nowhere
BRANCH = (7, 19, 33, 60)
RING = cycle_of(BRANCH)


def target_config(layers=2, **changes):
    """config.json of a toy target."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": D,
        "vocab_size": V,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": WIDTH,
        "intermediate_size": 96,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        **changes,
    }


def draft_config(layers=2, draft_vocab=V, kv_heads=KV_HEADS, **changes):
    """config.json of a toy head for a target of `layers` layers; its layer ids name boundaries, beyond doubt."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": D,
        "vocab_size": V,
        "draft_vocab_size": draft_vocab,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, layers]},
        **changes,
    }


class Noise:
    """Seeded tensors: matrices of gain / sqrt(fan in), norms near one."""

    def __init__(self, seed, gain=1.0):
        self.generator, self.gain = torch.Generator().manual_seed(seed), gain

    def matrix(self, *shape):
        return torch.randn(shape, generator=self.generator) * self.gain * shape[-1] ** -0.5

    def norm(self, size):
        return 1 + 0.2 * torch.randn(size, generator=self.generator)


def target_tensors(config, noise):
    """Random tensors of a target."""
    size = config["head_dim"]
    rows, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    out = {"model.embed_tokens.weight": noise.matrix(V, D) * 8, "model.norm.weight": noise.norm(D)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}{name}.weight"] = noise.norm(D)
        for name, shape in dict(q=(rows, D), k=(kv, D), v=(kv, D), o=(D, rows)).items():
            out[f"{at}self_attn.{name}_proj.weight"] = noise.matrix(*shape)
        for name in "qk":
            out[f"{at}self_attn.{name}_norm.weight"] = 2 * noise.norm(size)
        if layer in config.get("mlp_only_layers", ()):
            blocks = {f"{at}mlp.": config["intermediate_size"]}
        else:
            blocks = {f"{at}mlp.experts.{e}.": config["moe_intermediate_size"] for e in range(EXPERTS)}
            out[f"{at}mlp.gate.weight"] = noise.matrix(EXPERTS, D)
        for block, width in blocks.items():
            for name, shape in dict(gate=(width, D), up=(width, D), down=(D, width)).items():
                out[f"{block}{name}_proj.weight"] = noise.matrix(*shape)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = noise.matrix(V, D)
    return out


def draft_tensors(config, noise):
    """Random tensors of a head with its own embedding, head and, below the full vocabulary, evenly spread ids."""
    size = config["head_dim"]
    rows, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    width, small = config["intermediate_size"], config["draft_vocab_size"]
    shapes = {
        **dict(q=(rows, 2 * D), k=(kv, 2 * D), v=(kv, 2 * D), o=(D, rows)),
        **dict(gate=(width, D), up=(width, D), down=(D, width)),
    }
    out = {"fc.weight": noise.matrix(D, 3 * D), "norm.weight": noise.norm(D), "lm_head.weight": noise.matrix(small, D)}
    out["embed_tokens.weight"] = noise.matrix(V, D) * 8
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        out[f"midlayer.{name}.weight"] = noise.norm(D)
    for name, shape in shapes.items():
        block = "self_attn" if name in "qkvo" else "mlp"
        out[f"midlayer.{block}.{name}_proj.weight"] = noise.matrix(*shape)
    if small < V:
        out.update(tables([i * V // small for i in range(small)]))
    return out


def tables(ids):
    """d2t (offsets) and t2d of a draft vocabulary that stands for `ids`."""
    ids = torch.tensor(ids)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)}


def permutation(after, ids=range(V)):
    """Head rows for `ids`: row i answers the token whose successor is ids[i]."""
    return torch.eye(V)[[after.index(i) for i in ids]]


def pair(target, draft="none", noise=1e4, **options):
    """Engine.load with small sizes, its cache full of loud noise (a number, NaN too) that no query may see."""
    sizes = dict(device="cpu", max_context=256, page_size=16, max_batch=4, prefill_chunk=32, check=False)
    engine = Engine.load(target=target, draft=draft, **{**sizes, **options})
    disturb(engine, noise)
    return engine


def disturb(engine, noise=1e4):
    """Fill every row of the cache, the scratch page too, with noise; rows kept for later prompts are forgotten."""
    engine.pool.forget()
    for rows in engine.parts.cache.storage.values():
        rows.copy_(noise * torch.randn(rows.shape, generator=torch.Generator().manual_seed(9)))


def one_line(error, *words):
    """What was refused is said in one line that holds `words`; error: pytest's ExceptionInfo."""
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def still_serves(engine, shape=None):
    """A MAP pair goes on after a refusal or an end, all its pages free; shape None: the engine's own, (3, 1, 4)."""
    assert engine.generate([3, 9], Sampling(max_new_tokens=9), shape=shape).token_ids == follow(9, 9, NEXT)
    assert engine.pool.free == engine.pool.size


class Toys:
    """Writes each checkpoint on first use below `folder` and returns its directory (str)."""

    def __init__(self, folder):
        self.folder, self.written = Path(folder), {}

    def save(self, config, tensors, generation=None):
        """A checkpoint of its own."""
        place = self.folder / f"{len(list(self.folder.iterdir()))}"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config))
        if generation:
            (place / "generation_config.json").write_text(json.dumps(generation))
        save_file({name: t.clone().contiguous() for name, t in tensors.items()}, place / "model.safetensors")
        return str(place)

    def altered(self, path, change):
        """A copy of a checkpoint after change(config, tensors), which edits both in place."""
        config, tensors = json.loads((Path(path) / "config.json").read_text()), load_file(f"{path}/model.safetensors")
        change(config, tensors)
        return self.save(config, tensors)

    def _once(self, key, make):
        if key not in self.written:
            self.written[key] = self.save(*make())
        return self.written[key]

    def map(self, after=NEXT, **changes):
        """MAP target."""

        def make():
            config = target_config(**changes)
            tensors = target_tensors(config, Noise(1))
            for name in tensors:
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    tensors[name].zero_()
                elif name.endswith("norm.weight"):
                    tensors[name].fill_(1)
            tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = torch.eye(V), permutation(after)
            return config, tensors

        return self._once(("map", tuple(after), repr(changes)), make)

    def coin(self, probabilities):
        """COIN target: every position has the distribution `probabilities` (V of them)."""

        def make():
            config = target_config()
            tensors = target_tensors(config, Noise(1))
            for name in tensors:
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    tensors[name].zero_()
                elif name.endswith("norm.weight"):
                    tensors[name].fill_(1)
            tensors["model.embed_tokens.weight"] = torch.eye(V)[torch.zeros(V, dtype=torch.int64)]
            head = torch.zeros(V, D)
            head[:, 0] = torch.tensor([math.log(p) if p else -1e4 for p in probabilities]) / 8
            tensors["lm_head.weight"] = head
            return config, tensors

        return self._once(("coin", tuple(probabilities)), make)

    def history(self, seed=0, **changes):
        """HISTORY target."""

        def make():
            config = target_config(**{"layers": 3, **changes})
            return config, target_tensors(config, Noise(seed, gain=1.5))

        return self._once(("history", seed, repr(changes)), make)

    def map_draft(self, after=NEXT, ids=None, **changes):
        """MAP head: always right on a MAP target of the same map. `ids`: its vocabulary, all of it by default."""

        def make():
            known = list(range(V)) if ids is None else list(ids)
            config = draft_config(draft_vocab=len(known), kv_heads=HEADS, **changes)
            tensors = draft_tensors(config, Noise(2))
            for name in tensors:
                if name.endswith("norm.weight"):
                    tensors[name].fill_(1)
            at = "midlayer.self_attn."
            tensors["fc.weight"].zero_()
            tensors["midlayer.mlp.down_proj.weight"].zero_()
            for name in "qk":  # one constant direction for every token: rope locks it on its own position
                tensors[f"{at}{name}_proj.weight"] = torch.cat([torch.ones(D, D), torch.zeros(D, D)], 1)
            tensors[f"{at}v_proj.weight"] = torch.cat([torch.eye(D), -torch.eye(D)], 1)
            tensors[f"{at}o_proj.weight"] = torch.eye(D)
            tensors["embed_tokens.weight"], tensors["lm_head.weight"] = torch.eye(V), permutation(after, known)
            if ids is not None:
                tensors.update(tables(known))
            return config, tensors

        return self._once(("map draft", tuple(after), ids, repr(changes)), make)

    def wrong_draft(self, **changes):
        """WRONG head: a map that is right nowhere on a MAP target, so a chain is rejected whole."""
        return self.map_draft(OTHER, **changes)

    def fixed_draft(self, ids, **changes):
        """FIXED head: a draft vocabulary of exactly `ids`, so that topk = len(ids) proposes all of them."""

        def make():
            config = draft_config(draft_vocab=len(ids), **changes)
            return config, draft_tensors(config, Noise(3)) | tables(ids)

        return self._once(("fixed", tuple(ids), repr(changes)), make)

    def random_draft(self, seed=4, layers=3, **changes):
        """RANDOM head, by default with half the vocabulary, for a HISTORY target of `layers` layers."""

        def make():
            config = draft_config(**{"layers": layers, "draft_vocab": V // 2, **changes})
            return config, draft_tensors(config, Noise(seed, gain=1.5))

        return self._once(("random", seed, layers, repr(changes)), make)
