"""Every layout in which Llama-type EAGLE-3 heads are published: names, nesting and dtypes as on disk, loaded as any
checkpoint, against a plain reference of other code (B01, B06, B07)."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from oracles import Transformers
from reference_head import Head, Reference
from toys import V, pair

from engine import Sampling, Shape
from engine.report import loaded

pytestmark = pytest.mark.usefixtures("nan_memory")
IDS = "eagle_aux_hidden_state_layer_ids"
PROMPT = [9, 8, 7, 40, 2, 61, 5, 33, 20]
LAYERS = 8


def flat(head, **changes):
    """The ordinary Llama keys of a head's config."""
    raw = dict(model_type="llama", hidden_size=head.hidden, intermediate_size=head.intermediate, vocab_size=head.vocab)
    raw |= dict(num_attention_heads=head.heads, num_key_value_heads=head.kv_heads, head_dim=head.head_dim)
    raw |= dict(num_hidden_layers=head.layers, rms_norm_eps=head.eps, rope_theta=head.theta, hidden_act="silu")
    return raw | dict(max_position_embeddings=2048, torch_dtype="float32", tie_word_embeddings=False) | changes


def nested(head, outer, **layer):
    """A config in the speculators layout, its layer as transformers 5 writes it."""
    inner = flat(head, **layer)
    inner["rope_parameters"] = {"rope_type": "default", "rope_theta": inner.pop("rope_theta")}
    inner["dtype"] = inner.pop("torch_dtype")
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    verifier = {"name_or_path": "a/target", "architectures": ["Qwen3MoeForCausalLM"]}
    methods = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal]}
    common = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0"}
    common |= {"draft_vocab_size": head.draft_vocab, "speculators_config": {**methods, "verifier": verifier}}
    return common | {"transformer_layer_config": inner} | outer


@dataclass(frozen=True)
class Layout:
    """One kind of published file: what it computes, its config, and how canonical names look in it."""

    head: Head
    config: dict
    renamed: list = field(default_factory=list)  # pattern, name on disk
    dropped: str = "^$"  # canonical names that it leaves out
    stored: torch.dtype = torch.float32
    pickled: bool = False
    boundaries: tuple = (2, 4, 5)
    guessed: tuple = ()  # words of each guess in the report

    def save(self, toys, change=lambda config, tensors: None):
        """(directory, canonical tensors); `change` edits config and the tensors under their names on disk."""
        canonical = self.head.tensors(7, self.stored)
        disk = {}
        for name, tensor in canonical.items():
            if not re.search(self.dropped, name):
                for pattern, there in self.renamed:
                    name = re.sub(pattern, there, name)
                disk[name] = tensor
        config = json.loads(json.dumps(self.config))
        change(config, disk)
        path = toys.save(config, disk)
        if self.pickled:
            (Path(path) / "model.safetensors").unlink()
            torch.save(disk, Path(path) / "pytorch_model.bin")
        return path, canonical


MID, MODEL = (r"^layers\.0\.", "midlayer."), (r"^(?!lm_head|d2t|t2d)", "model.")
PLAIN, DEEP = Head(), Head(layers=3, head_dim=24, kv_heads=1)
FC_NORM = Head(fusion="fc_norm", post_norm=True)
WHOLE = Head(draft_vocab=V, fusion="input_norm", post_norm=True, head_dim=24)
FINAL = Head(fusion="none", features=1, draft_vocab=V)
BIASED = Head(residual_normed=True, qkv_bias=True, o_bias=True, scale=0.5, partial=0.5, theta=500.0, kv_heads=4)
SCALED = Head(post_norm=True, scale=2.0, qkv_bias=True)
QWEN = Head(qk_norm=True, layers=2, partial=0.25)
NARROW = Head(hidden=32, fusion="input_norm", residual_normed=True)
WINDOWED = Head(qk_norm=True, layers=2, window=4, fusion="fc_norm", post_norm=True, draft_vocab=V)
NEMO = Head(fc_bias=True, mlp_bias=True, features=2, intermediate=80)
MODELOPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}


def specforge(head, name="LlamaForCausalLMEagle3", **changes):
    return flat(head, architectures=[name], draft_vocab_size=head.draft_vocab, **changes)


LAYOUTS = {
    "SafeAILab": Layout(
        PLAIN,
        specforge(PLAIN, "LlamaForCausalLM", torch_dtype="float16"),
        [MID],
        dropped="^embed",
        stored=torch.float16,
        pickled=True,
    ),
    "SpecForge": Layout(
        PLAIN,
        specforge(PLAIN, torch_dtype="bfloat16", eagle_config={IDS: [1, 3, 6], "use_aux_hidden_state": True}),
        [MID],
        stored=torch.bfloat16,
        boundaries=(2, 4, 7),
    ),
    "SpecForge 3.1": Layout(
        FC_NORM,
        specforge(FC_NORM, fc_norm=True, norm_output=True, **{IDS: [3, 5, 8]}),
        [MID],
        boundaries=(3, 5, 8),
        guessed=("norm_output",),
    ),
    "numbered by depth": Layout(
        FC_NORM,
        specforge(FC_NORM, use_aux_norm=True, eagle_config={"return_hidden_post_norm": True}),
        [MID, (r"fc_norm\.0", "aux_norm_low"), (r"fc_norm\.1", "aux_norm_mid"), (r"fc_norm\.2", "aux_norm_high")],
    ),
    "ModelOpt": Layout(
        WHOLE,
        specforge(WHOLE)
        | {
            "draft_vocab_size": None,
            "eagle_config": {**MODELOPT, IDS: [1, 4, 6], "norm_before_fc": True, "return_hidden_post_norm": True},
        },
        [MID],
        dropped="^(lm_head|embed)",
        boundaries=(2, 5, 7),
    ),
    "ModelOpt Deep": Layout(
        DEEP,
        specforge(DEEP, "LlamaForCausalLMEagle3Deep", eagle_config={**MODELOPT, IDS: [1, 3, 6]}),
        [(r"^layers\.([12])\.input_layernorm", r"layers.\1.hidden_norm"), (r"^layers\.", "midlayer.")],
        dropped="^embed",
        boundaries=(2, 4, 7),
    ),
    "one final feature": Layout(
        FINAL,
        specforge(FINAL, "LlamaForCausalLMEagle", eagle_config={**MODELOPT, "use_aux_hidden_state": False, IDS: []}),
        [MID],
        boundaries=("final",),
    ),
    "vLLM": Layout(
        BIASED,
        specforge(
            BIASED,
            "Eagle3LlamaForCausalLM",
            **{IDS: [3, 4, 7], "norm_before_residual": True, "attention_bias": True, "logit_scale": 0.5},
            partial_rotary_factor=0.5,
            num_aux_hidden_states=3,
        ),
        [MODEL],
        boundaries=(3, 4, 7),
    ),
    "vLLM scaled": Layout(
        SCALED,
        specforge(SCALED, "Eagle3LlamaForCausalLM", norm_output=True, attention_bias=True, logit_scale=2.0),
        [MODEL],
    ),
    "vLLM Qwen3": Layout(
        QWEN,
        specforge(QWEN, "Eagle3Qwen3ForCausalLM", partial_rotary_factor=0.25, **{IDS: [0, 4, 6]})
        | {"model_type": "qwen3"},
        boundaries=(0, 4, 6),
    ),
    "speculators": Layout(
        NARROW,
        nested(NARROW, {"norm_before_fc": True, "target_hidden_size": 64, IDS: [2, 3, 6]}),
        boundaries=(2, 3, 6),
        guessed=("norm_before_residual",),
    ),
    "speculators Qwen3": Layout(
        WINDOWED,
        nested(
            WINDOWED,
            {
                "fc_norm": True,
                "norm_output": True,
                "norm_before_residual": False,
                "architectures": ["Eagle3DraftModel"],
            },
            model_type="qwen3",
            sliding_window=4,
            use_sliding_window=True,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "NeMo": Layout(
        NEMO,
        specforge(NEMO, "LlamaEagle3DraftModel", bias=True, mlp_bias=True, **{IDS: [4, 8]})
        | {"model_type": "llama4_text", "intermediate_size_mlp": 80, "intermediate_size": 640},
        [MODEL],
        dropped="^embed",
        boundaries=(4, 8),
    ),
}


@pytest.fixture(scope="module")
def model(toys):
    """Of the HISTORY target."""
    return features_of(Transformers(toys.history(layers=LAYERS)))


def features_of(oracle):
    """A target in transformers, and a function of ids: the features that a head of these boundaries reads."""

    def features(ids, boundaries):
        if boundaries == ("final",):
            with torch.no_grad():
                return oracle.model.model.norm(oracle(ids)[1][-1])
        return oracle.features(ids, boundaries)

    return oracle, features


def proposals(engine, prompt, shape, count):
    """[(ids known to the drafter, logits [steps, Vd])] of every cycle of a run of chains."""
    drafter, rounds = engine.drafter, []
    best, propose = drafter.best, drafter.propose

    def noted_best(hidden, k):
        logits = hidden.new_zeros(hidden.shape[0], drafter.head.vocabulary)
        drafter.head(hidden[:, 0], k, logits)
        rounds[-1][1].append(logits[0])
        return best(hidden, k)

    def noted(state, tree, cache):
        rounds.append((int(state.seq_lens[0]) + 1, []))
        propose(state, tree, cache)

    drafter.best, drafter.propose = noted_best, noted
    ids = prompt + engine.generate(prompt, Sampling(max_new_tokens=count), shape=shape).token_ids
    del drafter.best, drafter.propose
    return [(ids[:known], torch.stack(logits)) for known, logits in rounds if known <= len(ids)]


def follows(toys, model, layout, *, target=None, plain=Reference, **options):
    """Engine.load of a layout, its first, second and third draft logits of several cycles compared; -> the engine.

    target: a directory and `model` its oracle, None: HISTORY; plain: the head's reference.
    """
    oracle, features = model
    path, tensors = layout.save(toys)
    engine = pair(target or toys.history(layers=LAYERS), path, prefill_chunk=4, page_size=4, **options)
    lent = {"embed_tokens.weight": oracle.model.model.embed_tokens, "lm_head.weight": oracle.model.lm_head}
    lent = {name: module.weight.detach() for name, module in lent.items() if re.search(layout.dropped, name)}
    assert [name for name, _ in engine.parts.reports[1].borrowed] == list(lent)
    reference, seen = plain(layout.head, tensors | lent), proposals(engine, PROMPT, Shape(3, 1, 4), 6)
    assert len(seen) >= 2
    for text, logits in seen:
        want = reference.draft(text, features(text, layout.boundaries), 3)
        torch.testing.assert_close(logits.cpu(), want, atol=1e-4, rtol=1e-4)
    return engine


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(toys, model, name):
    """The numbers after a prompt in pieces, and the report. Mutants: a switch ignored or taken for another, features in
    another order, pre- for post-norm recycling, norms and fc swapped, the second layer's rows in the first one's place,
    a bias left out, rope over all lanes, a window over all layers, logits not scaled, a layout's names not read."""
    layout = LAYOUTS[name]
    parts = follows(toys, model, layout).parts
    assert parts.target.boundaries == layout.boundaries
    guessed = parts.reports[1].guessed
    assert len(guessed) == len(layout.guessed)
    for word, guess in zip(layout.guessed, guessed, strict=True):
        assert word in guess and any("GUESSED" in line and word in line for line in loaded(parts))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_on_cuda(toys, model, name):
    """The same numbers from the fused operations. Mutant: one that does without a bias, a window or a head size that
    only some heads have."""
    follows(toys, model, LAYOUTS[name], device="cuda", dtype="float32", graphs="off")
