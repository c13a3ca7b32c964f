"""The same quantised files through transformers' own readers, where the packages that these need are installed
(compressed-tensors for INT4, accelerate for FP8; MXFP4 needs none: tests/test_formats_mxfp4.py)."""

import pytest
import torch
from packers import FP8, INT4, fp8_tensors, int4_tensors, quantised
from toys import Noise, V, pair, target_config, target_tensors

PROMPTS = [[3, 1, 4, 1, 5], [(7 * i + 2) % V for i in range(19)]]


def logprobs(path, prompt, **options):
    """Teacher-forced, of transformers' model of the files."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **options)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0].float()
    return logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]


def experts_only(module):
    return ".experts." in module


def checkpoint(toys, pack, config, chosen):
    plain = target_config(layers=2)
    stored, _ = quantised(target_tensors(plain, Noise(0, gain=1.5)), pack, chosen)
    return toys.save({**plain, "quantization_config": config}, stored)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_int4_as_compressed_tensors_reads_it(toys, prompt):
    """Up to what its product, rounded to bf16, takes away."""
    pytest.importorskip("compressed_tensors")
    path = checkpoint(toys, int4_tensors, {**INT4, "ignore": [*INT4["ignore"], "re:.*mlp\\.gate$"]}, experts_only)
    right = logprobs(path, prompt, dtype=torch.float32)
    torch.testing.assert_close(pair(path).score(prompt).logprobs, right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_fp8_as_transformers_reads_it(toys, prompt):
    """Matrices smaller than a block: one scale each."""
    pytest.importorskip("accelerate")
    config = {**FP8, "modules_to_not_convert": [".*self_attn", "lm_head", "mlp.gate"]}
    path = checkpoint(toys, fp8_tensors, config, experts_only)
    right = logprobs(path, prompt, dtype=torch.float32)
    torch.testing.assert_close(pair(path).score(prompt).logprobs, right, atol=2e-2, rtol=2e-2)
