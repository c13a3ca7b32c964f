"""What `python -m engine.generate` refuses, in one line: what, where, which value, what is supported; options
of other engines are answered with ours."""

import pytest
from served import OPTIONS, SMALL, spell

from engine import options
from weights.config import Refused

BAD = {
    "": "no prompt: give PROMPT or --prompt-file FILE",
    "x y": "'y' after the prompt: a prompt is one argument",
    "x --prompt-file z": "both PROMPT and --prompt-file",
    "x --shape 3-1-4": "--shape 3-1-4: supported: auto; a shape is --steps S",
    "x --shape auto --topk 2": "--shape auto and --topk 2: supported: one of them",
    "x --shape auto --draft none": "--shape auto: there is no draft",
    "x --steps two": "--steps: 'two' is not supported; supported: whole numbers from 0",
    "x --steps -1": "--steps: '-1' is not supported",
    "x --topk 0": "--topk: '0' is not supported",
    "x --steps 1 --topk 2 --draft-tokens 8": "draft_tokens is 8; supported: 2 to 3",
    "x --steps 0 --topk 2": "steps 0 is plain decoding",
    "x --draft none --steps 3": "--steps 3: there is no draft",
    "x --target somewhere --topk 4": "--topk 4: there is no draft",
    "x --draft none --compare": "--compare: there is no draft",
    "x --steps 0 --compare": "--compare: --steps 0 is plain decoding",
    "x --max-new-tokens -1": "--max-new-tokens: '-1' is not supported",
    "x --temperature -1": "temperature is -1.0; supported: numbers from 0 (greedy)",
    "x --temperature nan": "temperature is nan; supported: numbers from 0",
    "x --temperature hot": "--temperature: 'hot' is not a number",
    "x --top-k 5": "--top-k 5: decoding is greedy without --temperature",
    "x --top-p 0.9": "--top-p 0.9: decoding is greedy without --temperature",
    "x --min-p 0.1": "--min-p 0.1: decoding is greedy without --temperature",
    "x --temperature 0 --top-k 5": "--top-k 5: decoding is greedy without --temperature; supported: with",
    "x --temperature 0 --seed 1": "--seed 1: decoding is greedy",
    "x --seed 0": "--seed 0: decoding is greedy without --temperature",
    "x --temperature 1 --top-k -1": "--top-k: '-1' is not supported; supported: whole numbers from 0",
    "x --temperature 1 --top-p 0": "top_p is 0.0; supported: numbers above 0 and up to 1",
    "x --temperature 1 --top-p 1.1": "top_p is 1.1; supported: numbers above 0 and up to 1",
    "x --temperature 1 --min-p -0.1": "min_p is -0.1; supported: numbers from 0 (off) to 1",
    "x --temperature 1 --seed -1": "--seed: '-1' is not supported; supported: whole numbers from 0",
    "x --logprobs -1": "--logprobs: '-1' is not supported; supported: whole numbers from 0",
    "X --logprobs 65": "logprobs is 65; supported: 0 to 64, the vocabulary",
    "x --frequency-penalty 1": "--frequency-penalty: there is no such option; --help lists all",
    "x --repetition-penalty 2": "--repetition-penalty: there is no such option; --help lists all",
    "x --batch 0": "--batch: '0' is not supported",
    "x --tp 0": "--tp: '0' is not supported",
    "x --expert-parallel": "--expert-parallel: ",
    "x --draft-tp cut": "--draft-tp cut: needs --tp above 1",
    "x --tp 2 --draft none --draft-tp cut": "--draft-tp cut: there is no draft; supported: with --draft DIR|HUB_ID",
    "x --tp-slice 8": "--tp-slice 8: supported with --random only",
    "x --random qwen3-30b-a3b --tp 2 --tp-slice 8": "--tp-slice 8 and --tp 2",
    "x --tp-slice 1": "--tp-slice: '1' is not supported; supported: whole numbers from 2",
    "x --no-check --draft none": "--no-check: there is no draft to check",
    "x --graphs maybe": "--graphs: invalid choice: 'maybe'",
    "x --graphs required --device cpu": "graphs: required, but ",
    "x --device tpu": "device: 'tpu' is unknown",
    "x --device cuda:99": "device: 'cuda:99', but this machine has ",
    "x --dtype int4": "--dtype: invalid choice: 'int4'",
    "X --stop-id 64": "stop_ids: 64 is outside the vocabulary of 64",
    "x --max-context 4096": "max_context: 4096; supported: 2 to 1024",
    "x --capture-layers 1,2": "--capture-layers '1,2': expected boundary:",
    "x --capture-layers output:0,1,9": "outside the target's 2 layers",
    "x --layers 2": "--layers 2: supported with --random only",
    "x --target a --random b": "--random b and --target a: supported: one of them",
    "x --random nowhere": "nowhere",
    "x --target /nowhere/at/all": "/nowhere/at/all: no such directory",
    "x --stats /nowhere/at/all.json": "--stats /nowhere/at/all.json: supported: a file in an existing directory",
    "x --chat": "no chat template; give a raw prompt instead, without --chat",
    "--prompt-file /nowhere.txt": "--prompt-file /nowhere.txt: cannot be read: No such file",
}


@pytest.mark.parametrize("given, message", BAD.items(), ids=BAD)
def test_refused_in_one_line(cli, pair, given, message):
    words = given.split()
    own = pair if "--target" not in words and "--random" not in words else []
    own = own if "--draft" not in words else ["--target", pair[1]]
    own = own if "--max-context" not in words else own[:4]
    code, out, err, stats = cli(*own, *words)
    refusal = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out, stats, len(refusal)) == (2, "", None, 1), err
    assert message in refusal[0] and err.endswith(refusal[0] + "\n")


@pytest.mark.parametrize("prompt", ["", "  \n "])
def test_empty_prompts(cli, pair, prompt):
    code, out, err, _ = cli(prompt, *pair)
    assert (code, out) == (2, "") and err.endswith("error: prompt: it is empty; supported: at least one token\n")


def test_stop_strings(cli, kit, pair):
    assert "error: stop is ['']" in cli("x", *pair, "--stop", "")[2]
    target = kit.altered(pair[1], lambda config, tensors: None)  # without a tokenizer
    assert "no tokenizer; supported: token ids" in cli("x", "--target", target, *SMALL)[2]


def test_a_failure_is_no_refusal(cli, kit, pair):
    target = kit.altered(pair[1], lambda config, tensors: tensors["lm_head.weight"].fill_(float("nan")))
    spell(target)
    code, _, err, stats = cli("HELLO", "--target", target, *SMALL)
    assert (code, stats) == (1, None) and err.splitlines()[-1].startswith("error: non-finite logits at position 4")


@pytest.mark.parametrize("length, code", [(126, 0), (127, 0), (128, 2), (129, 2)])
def test_prompts_near_the_context(cli, pair, length, code):
    got, _, err, stats = cli("A" * length, *pair)
    assert got == code
    if code:
        assert f"{length} tokens leave no room" in err and "128" in err
    else:
        assert stats["requests"][0]["output_tokens"] == 128 - length
        assert stats["requests"][0]["finish_reason"] == "length"


LINES = {
    '{"prompt": "a"': ":1: not JSON: ",
    '{"prompt": "a"}\n\n[1]': ":3: has no prompt; supported: one of prompt, token_ids, messages",
    '{"prompts": "a"}': ":1: has no prompt",
    '{"prompt": "a", "token_ids": [1]}': ":1: has prompt and token_ids; supported: one of",
    '{"prompt": " "}': ":1: key 'prompt' is not a text with more than spaces in it",
    '{"token_ids": []}': ":1: key 'token_ids' is not a list of at least one whole number",
    '{"token_ids": [1.5]}': ":1: key 'token_ids' is not",
    '{"token_ids": [true]}': ":1: key 'token_ids' is not",
    '{"token_ids": [-1]}': ":1: key 'token_ids' is not",
    '{"token_ids": [1]}\n{"token_ids": [64]}': ":2: prompt: token id 64; supported: whole numbers from 0 to 63",
    '{"messages": [{"role": "user"}]}': ":1: key 'messages' is not a list of at least one {role, content}",
    '{"messages": [{"role": "user", "content": "A"}]}': "no chat template",
    '{"prompt": "A", "seed": -1}': ":1: key 'seed' is -1",
    "": ": it is empty",
    "\n\n": ": it is empty",
}


@pytest.mark.parametrize("text, message", LINES.items(), ids=LINES)
def test_bad_lines_are_named(cli, pair, tmp_path, text, message):
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    code, out, err, _ = cli("--prompt-file", file, *pair)
    assert (code, out) == (2, "") and str(file) in err.splitlines()[-1] and message in err.splitlines()[-1]


def test_unreadable_files(cli, pair, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "cannot be read: it is not UTF-8 text" in cli("--prompt-file", tmp_path / "latin.txt", *pair)[2]
    assert "cannot be read: Is a directory" in cli("--prompt-file", tmp_path, *pair)[2]


def test_chat_takes_no_ids(cli, pair, tmp_path):
    (tmp_path / "ids.jsonl").write_text('{"token_ids": [1]}')
    code, _, err, _ = cli("--prompt-file", tmp_path / "ids.jsonl", "--chat", *pair)
    assert code == 2 and "ids.jsonl:1: --chat: token ids take no template" in err


@pytest.mark.parametrize("foreign", options.FOREIGN)
def test_names_of_other_engines_are_answered_with_ours(foreign):
    for given in (foreign, foreign.replace("-", "_").replace("__", "--", 1), f"{foreign}=3"):
        with pytest.raises(Refused) as refusal:
            options.parse(["x", given, "3"])
        ours = options.FOREIGN[foreign].split()[0]
        assert str(refusal.value) == f"{given.split('=')[0]} is {options.FOREIGN[foreign]} here" and ours in OPTIONS


def test_names_of_other_engines_are_not_ours():
    assert not set(options.FOREIGN) & set(OPTIONS)
    with pytest.raises(Refused, match="--draft_tokens is --draft-tokens here"):
        options.parse(["x", "--draft_tokens", "3"])
    with pytest.raises(Refused, match="--frobnicate: there is no such option; --help lists all"):
        options.parse(["x", "--frobnicate"])
