"""EAGLE-3 heads with latent attention on a DeepSeek-V3 target, and heads of the Llama type there: layouts as on disk,
against a plain reference that expands every key and value (B06, B40)."""

from dataclasses import dataclass

import pytest
import torch
from latent_toys import YARN, DeepSeek, deepseek
from reference_head import Head, Reference
from test_heads_layouts import IDS, LAYERS, LAYOUTS, MID, MODEL, Layout, features_of, flat, follows
from toys import V, disturb, one_line, pair

from engine import Sampling, Shape
from weights import Eagle3Config, Refused, named

pytestmark = pytest.mark.usefixtures("nan_memory")


@dataclass(frozen=True)
class LatentHead(Head):
    """A head whose attention has a latent: head_dim are the lanes that rotate."""

    head_dim: int = 8
    q_rank: int | None = 24
    rank: int = 40
    plain: int = 12
    value: int = 10

    def shapes(self):
        out, h, wide = {}, self.heads, self.plain + self.head_dim
        for name, shape in super().shapes().items():
            block, _, part = name.partition("self_attn.")
            if not part:
                out[name] = shape
            elif part == "q_proj.weight":
                width, at = shape[1], f"{block}self_attn."
                out |= {f"{at}kv_a_proj_with_mqa.weight": (self.rank + self.head_dim, width)}
                out |= {f"{at}kv_a_layernorm.weight": (self.rank,)}
                out |= {f"{at}kv_b_proj.weight": (h * (self.plain + self.value), self.rank)}
                out |= {f"{at}o_proj.weight": (self.hidden, h * self.value)}
                if self.q_rank is None:
                    out[f"{at}q_proj.weight"] = (h * wide, width)
                else:
                    out |= {f"{at}q_a_proj.weight": (self.q_rank, width), f"{at}q_a_layernorm.weight": (self.q_rank,)}
                    out[f"{at}q_b_proj.weight"] = (h * wide, self.q_rank)
        return out


class LatentReference(Reference):
    """Every position's keys and values are expanded; lanes (2i, 2i + 1) rotate together."""

    def rope(self, y):
        """y [n, heads, lanes] at positions 0..n-1, without scaling of positions."""
        n, lanes = y.shape[0], y.shape[-1]
        angle = torch.arange(n).double()[:, None] * self.head.theta ** (-torch.arange(0, lanes, 2).double() / lanes)
        pairs = torch.view_as_complex(y.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2).float()

    def attention(self, x, at, layer):
        h, n, at = self.head, len(x), f"{at}self_attn."
        if h.q_rank is None:
            q = self.linear(x, f"{at}q_proj")
        else:
            q = self.linear(self.rms(self.linear(x, f"{at}q_a_proj"), f"{at}q_a_layernorm"), f"{at}q_b_proj")
        q, q_turned = q.view(n, h.heads, -1).split([h.plain, h.head_dim], -1)
        latent, shared = self.linear(x, f"{at}kv_a_proj_with_mqa").split([h.rank, h.head_dim], -1)
        up = self.linear(self.rms(latent, f"{at}kv_a_layernorm"), f"{at}kv_b_proj").view(n, h.heads, -1)
        k, v = up.split([h.plain, h.value], -1)
        k = torch.cat([k, self.rope(shared[:, None]).expand(n, h.heads, h.head_dim)], -1)
        q = torch.cat([q, self.rope(q_turned)], -1)
        score = torch.einsum("ihd,jhd->hij", q, k) / (h.plain + h.head_dim) ** 0.5
        score = score.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        return self.linear(torch.einsum("hij,jhd->ihd", score.softmax(-1), v).flatten(1), f"{at}o_proj")


def latent(head, name="Eagle3DeepseekV2ForCausalLM", **changes):
    """config.json as TorchSpec writes it."""
    raw = flat(head, architectures=[name], model_type="kimi_k2", draft_vocab_size=head.draft_vocab)
    del raw["head_dim"]
    raw |= dict(num_key_value_heads=head.heads, q_lora_rank=head.q_rank, kv_lora_rank=head.rank)
    raw |= dict(qk_nope_head_dim=head.plain, qk_rope_head_dim=head.head_dim, v_head_dim=head.value)
    raw |= dict(n_routed_experts=8, num_experts_per_tok=2)  # copied from the target, and not in use
    return raw | changes


def trained(*ids):
    """eagle_config of that trainer."""
    flags = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    return {"eagle_config": {IDS: list(ids), "use_aux_hidden_state": True, **flags}}


PLAIN, NEW = LatentHead(draft_vocab=V), LatentHead(fusion="fc_norm", post_norm=True)
DEEP = LatentHead(layers=2, q_rank=None, fusion="input_norm", theta=500.0)
HEADS = {
    "TorchSpec": Layout(PLAIN, latent(PLAIN, **trained(1, 3, 6)), [MID], dropped="^embed", boundaries=(2, 4, 7)),
    "for vLLM": Layout(PLAIN, latent(PLAIN, **trained(0, 4, 8)), [MODEL], boundaries=(0, 4, 8)),
    "without lm_head": Layout(
        PLAIN, latent(PLAIN, **trained(1, 4, 6)), [MID], "^(lm_head|embed)", boundaries=(2, 5, 7)
    ),
    "EAGLE-3.1": Layout(NEW, latent(NEW, fc_norm=True, norm_output=True, **trained(1, 3, 6)), boundaries=(2, 4, 7)),
    "two layers": Layout(
        DEEP,
        latent(DEEP, "Eagle3DeepseekV3ForCausalLM", norm_before_fc=True, **trained(2, 5, 8), model_type="deepseek_v3"),
        boundaries=(2, 5, 8),
    ),
}


@pytest.fixture(scope="module")
def target(toys):
    return deepseek(toys, layers=LAYERS)


@pytest.fixture(scope="module")
def model(toys, target):
    return features_of(DeepSeek(toys, target))


@pytest.mark.parametrize("name", HEADS)
def test_latent_head(toys, target, model, name):
    """Draft logits of three steps after a prompt in pieces. Mutants: half-split rope, eps of the latents' norms, the
    normed input normed again, a second layer that reads the first one's rows, pre- for post-norm recycling."""
    engine = follows(toys, model, HEADS[name], target=target, plain=LatentReference)
    assert engine.target.boundaries == HEADS[name].boundaries
    assert engine.parts.cache.storage["draft"].shape[0] == HEADS[name].head.layers
    assert engine.parts.cache.storage["draft"].shape[3:] == (1, 48)


@pytest.mark.parametrize("name", ["SpecForge 3.1", "ModelOpt", "ModelOpt Deep", "one final feature", "vLLM Qwen3"])
def test_llama_heads_on_latent_targets(toys, target, model, name):
    """Layouts of other heads beside a cache of latent rows. Mutant: the draft's rows sized from the target's."""
    assert follows(toys, model, LAYOUTS[name], target=target).target.boundaries == LAYOUTS[name].boundaries


def test_softmax_scale_of_a_head(toys, target):
    """A head with YaRN has the square of its mscale in its softmax scale (formats: m = 1.416 for factor 64)."""
    head = Layout(PLAIN, latent(PLAIN, rope_scaling={**YARN, "factor": 64.0}, **trained(1, 3, 6)))
    engine = pair(target, head.save(toys)[0])
    scale = engine.drafter.layers[0].attention.scale
    assert scale == pytest.approx(20**-0.5 * 1.41589**2, rel=1e-5)


@pytest.mark.parametrize("shape", [Shape(1, 1, 2), Shape(3, 1, 4), Shape(4, 4, 16)], ids=str)
def test_lossless_with_a_latent_head(toys, target, shape):
    """Latent rows on both sides, in a batch. Mutant: the draft's rows committed with the target's."""
    engine = pair(target, HEADS["EAGLE-3.1"].save(toys)[0])
    prompts = [[3], [1, 4, 1, 5, 9, 2, 6], [(7 * i) % V for i in range(40)]]
    sampling = Sampling(max_new_tokens=40, ignore_eos=True)
    texts = [engine.generate(p, sampling, shape=Shape(0, 1, 1)).token_ids for p in prompts]
    disturb(engine, float("nan"))
    assert [r.token_ids for r in engine.generate(prompts, sampling, shape=shape)] == texts


@pytest.mark.parametrize(
    "key, value",
    [
        ("use_moe", True),
        ("mla_use_nope", True),
        ("attention_bias", True),
        ("num_key_value_heads", 2),
        ("kv_lora_rank", None),
        ("model_type", "llama"),
        ("rope_interleave", False),
        ("sliding_window", 16),
    ],
)
def test_refused(key, value):
    """Mutants: each key ignored."""
    with pytest.raises(Refused) as error:
        Eagle3Config.read(latent(PLAIN, **{key: value}), "here")
    one_line(error, "here", key)


@pytest.mark.parametrize("name", ["kimi-k2.5-eagle3", "kimi-k2.5-eagle3-mla", "deepseek-v3-eagle3"])
def test_published_heads(name):
    """The named configs are read. Mutant: a head of this attention taken for the Llama type."""
    config = Eagle3Config.read(named(name)["draft"], name)
    assert (config.latent is not None) == name.endswith("mla") and config.hidden == 7168
