"""`python -m engine.generate`: a frozen list of options, each of which works or is refused in one line, exit code 2."""

import json
from types import SimpleNamespace

import pytest
import toys
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine import options, prompts
from engine.decoding import InOrder
from engine.generate import main
from engine.shape import PLAIN, Shape
from weights.config import Refused

OPTIONS = """
--prompt-file --chat --target --draft --random --layers --capture-layers --steps --topk --draft-tokens --shape
--max-new-tokens --stop --stop-id --ignore-eos --temperature --top-k --top-p --min-p --seed --logprobs --batch
--max-context --pages --page-size --prefill-chunk --no-prefix-cache --device --dtype --graphs --tp --expert-parallel
--draft-tp --tp-slice --no-check --compare --profile --stats
""".split()
SMALL = "--device cpu --max-context 128 --page-size 16".split()
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}!"


def test_the_list_of_options_is_frozen():
    listed = vars(options.parser().parse_args([]))
    assert sorted("--" + name.replace("_", "-") for name in listed if name != "prompt") == sorted(OPTIONS)
    shown = options.parser().format_help()
    assert all(f" {option} " in shown or f" {option}\n" in shown for option in OPTIONS)


def spell(folder, **extra):
    """A tokenizer of 64 characters: token i is chr(32 + i)."""
    tokenizer = Tokenizer(models.BPE({chr(32 + i): i for i in range(toys.V)}, []))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **extra).save_pretrained(folder)


def spelled(ids):
    return "".join(chr(32 + i) for i in ids)


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    return toys.Toys(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="module")
def pair(kit):
    """MAP target with a tokenizer, and its always-right draft."""
    target = kit.map()
    spell(target)
    return ["--target", target, "--draft", kit.map_draft(), *SMALL]


@pytest.fixture
def cli(capsys, tmp_path):
    """Runs the command; gives exit code, stdout, stderr and the statistics (None where none were written)."""

    def run(*argv):
        stats = tmp_path / "stats.json"
        code = main([*map(str, argv), *([] if "--stats" in argv else ["--stats", str(stats)])])
        out, err = capsys.readouterr()
        return code, out, err, json.loads(stats.read_text()) if stats.exists() else None

    return run


def expected(text, count):
    return toys.follow(ord(text[-1]) - 32, count, toys.NEXT)


# What works


def test_text_goes_to_stdout_and_a_report_to_stderr(cli, pair):
    code, out, err, stats = cli("HELLO", *pair, "--max-new-tokens", 21)
    (request,) = stats["requests"]
    assert (code, out) == (0, spelled(expected("HELLO", 21)) + "\n")
    assert request["token_ids"] == expected("HELLO", 21) and request["text"] + "\n" == out
    assert (request["prompt_tokens"], request["output_tokens"], request["finish_reason"]) == (5, 21, "length")
    assert request["emitted_per_cycle"] == [4] * 5 and request["cycles"] == 5
    assert (request["accept_length"], request["accept_length_drafts"], request["accept_rate"]) == (4.0, 3.0, 1.0)
    assert request["shape"] == {"steps": 3, "topk": 1, "draft_tokens": 4}
    assert stats["graphs"] == [
        {
            "batch": 1,
            "shape": "3-1-4",
            "captured": False,
            "reason": stats["graphs"][0]["reason"],
            "replays": 0,
            "eager": 5,
        }
    ]
    assert stats["capture_layers"] == {"boundaries": [0, 1, 2], "source": "config"}
    assert "accept length 4.00 (3.00 without the bonus token)" in err and "raw, no chat template" in err
    assert stats["tokens_per_second"] > 0 and stats["ms"]["load"] > 0 and stats["ms"]["draft"] is None


def test_plain_decoding_has_no_accept_rate(cli, pair):
    code, out, err, stats = cli("HELLO", *pair, "--draft", "none", "--max-new-tokens", 6)
    (request,) = stats["requests"]
    assert request["token_ids"] == expected("HELLO", 6) and request["emitted_per_cycle"] == [1] * 5
    assert (request["accept_rate"], request["accept_length_drafts"], request["accept_length"]) == (None, None, 1.0)
    assert stats["capture_layers"] is None and stats["compare"] is None and "accept" not in err


@pytest.mark.parametrize("cap", [0, 1, 2])
def test_few_tokens(cli, pair, cap):
    code, out, _, stats = cli("HELLO", *pair, "--max-new-tokens", cap)
    (request,) = stats["requests"]
    assert (code, request["output_tokens"], request["finish_reason"]) == (0, cap, "length")
    assert request["cycles"] == max(0, cap - 1) and out == spelled(expected("HELLO", cap)) + "\n"
    assert stats["tokens_per_second"] is None or cap > 1


def test_tree_shapes(cli, pair):
    _, _, _, stats = cli("HELLO", *pair, "--steps", 2, "--topk", 2, "--draft-tokens", 6, "--max-new-tokens", 9)
    assert stats["requests"][0]["token_ids"] == expected("HELLO", 9)
    assert stats["graphs"][0]["shape"] == "2-2-6"


def test_stops(cli, pair):
    ids = expected("HELLO", 12)
    text = spelled(ids)
    _, out, err, stats = cli("HELLO", *pair, "--stop", text[5:7], "--stop", "never", "--max-new-tokens", 12)
    (request,) = stats["requests"]
    assert (out, request["token_ids"]) == (text[:5] + "\n", ids[:7])
    assert (request["finish_reason"], request["stop"]) == ("stop", text[5:7]) and repr(text[5:7]) in err
    assert sum(request["emitted_per_cycle"]) == request["output_tokens"] - 1
    _, _, _, stats = cli("HELLO", *pair, "--stop-id", ids[3], "--max-new-tokens", 12)
    assert (stats["requests"][0]["token_ids"], stats["requests"][0]["stop"]) == (ids[:4], ids[3])


def test_end_tokens_of_the_checkpoint(cli, kit, pair):
    ids = expected("HELLO", 12)
    target = kit.altered(pair[1], lambda config, tensors: config.update(eos_token_id=ids[4]))
    spell(target)
    given = ["HELLO", "--target", target, *pair[2:], "--max-new-tokens", 12]
    assert cli(*given)[3]["requests"][0]["token_ids"] == ids[:5]
    assert cli(*given, "--ignore-eos")[3]["requests"][0]["token_ids"] == ids


def test_a_file_of_prompts(cli, pair, tmp_path):
    file = tmp_path / "some.jsonl"
    entries = [{"prompt": "AB"}, {"token_ids": [1, 2]}, {"prompt": "ABC", "seed": 3, "note": "not read"}]
    file.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    want = [expected("AB", 5), toys.follow(2, 5, toys.NEXT), expected("ABC", 5)]
    for batch in (1, 2, 4):
        _, out, _, stats = cli("--prompt-file", file, *pair, "--max-new-tokens", 5, "--batch", batch)
        assert [request["token_ids"] for request in stats["requests"]] == want
        assert out == "".join(spelled(ids) + "\n" for ids in want)
    (tmp_path / "one.txt").write_text("AB\nC")
    assert prompts.read(str(tmp_path / "one.txt"))[0].content == "AB\nC"


def test_texts_keep_the_order_of_the_prompts(capsys):
    """Whatever order requests end in."""
    writer = InOrder()
    for index, text, finished in [(1, "b", False), (2, "c", True), (1, "B", True), (0, "a", True)]:
        request = SimpleNamespace(index=index, finished=finished)
        writer.show(SimpleNamespace(request=request, text=text, tokens=[]))
    assert capsys.readouterr().out == "a\nbB\nc\n"


def test_chat(cli, kit, pair, tmp_path):
    target = kit.altered(pair[1], lambda config, tensors: None)
    spell(target, chat_template=TEMPLATE)
    given = ["--target", target, *pair[2:], "--max-new-tokens", 4]
    _, _, err, stats = cli("AB", "--chat", *given)
    assert stats["requests"][0]["prompt_tokens"] == 3 and "chat template applied to 1" in err
    assert stats["requests"][0]["token_ids"] == expected("!", 4)
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "AB"}]}))
    assert cli("--prompt-file", file, *given)[3]["requests"][0]["token_ids"] == expected("!", 4)


def test_sampling_options(cli, kit, pair, tmp_path):
    """Each setting changes what is drawn, and the seed of a line counts before --seed. Mutants: an option that reaches
    nobody; one seed for all lines; the line's index left out."""
    given = ["--target", kit.history(), "--draft", kit.random_draft(), *SMALL, "--max-new-tokens", 40]
    entries = [{"token_ids": [1, 2]}, {"token_ids": [1, 2]}, {"token_ids": [1, 2], "seed": 7}]
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, entries)))

    def ids(*options):
        code, _, err, stats = cli("--prompt-file", tmp_path / "ids.jsonl", *given, *options)
        assert code == 0, err
        return [request["token_ids"] for request in stats["requests"]]

    greedy, warm = ids(), ids("--temperature", 1)
    assert greedy == ids("--temperature", 0) == ids("--temperature", "1e-9", "--seed", 4)
    assert len({tuple(x) for x in [*greedy, *warm]}) == 4
    assert warm == ids("--temperature", 1, "--seed", 0) == ids("--temperature", 1, "--batch", 3)
    other = ids("--temperature", 1, "--seed", 1)
    assert other[2] == warm[2] and other[0] != warm[0] and other[1] != warm[1]
    assert ids("--temperature", 1, "--top-k", 1) == greedy == ids("--temperature", 1, "--top-p", "1e-6")
    for option in (("--top-k", 3), ("--top-p", 0.5), ("--min-p", 0.5)):
        assert warm != ids("--temperature", 1, *option) != greedy
    assert ids("--temperature", 3) not in (warm, greedy)


def test_logprobs(cli, pair):
    _, _, _, stats = cli("HELLO", *pair, "--max-new-tokens", 6, "--logprobs", 2)
    (request,) = stats["requests"]
    assert [entry["token_id"] for entry in request["logprobs"]] == request["token_ids"]
    assert all(len(e["top"]) == 2 and e["top"][0] == [e["token_id"], e["logprob"]] for e in request["logprobs"])
    assert cli("HELLO", *pair, "--max-new-tokens", 6)[3]["requests"][0]["logprobs"] is None
    assert "--logprobs 2: they go to --stats FILE.json" in str(
        pytest.raises(Refused, options.parse, ["x", "--logprobs", "2"]).value
    )


def test_compare_of_draws(cli, kit):
    """Plain decoding and a sampled chain draw other ids by right: no alarm. A tree draws the same."""
    given = ["--target", kit.history(), "--draft", kit.random_draft(), *SMALL, "--temperature", 1, "--compare"]
    file = ["--prompt-file", kit.folder / "ids.jsonl", "--max-new-tokens", 30]
    file[1].write_text('{"token_ids": [5]}')
    _, _, err, stats = cli(*file, *given)
    assert stats["compare"]["identical"] is None and "x, other draws" in err
    assert cli(*file, *given, "--topk", 2)[3]["compare"]["identical"] is True


def test_compare(cli, pair):
    _, _, err, stats = cli("HELLO", *pair, "--compare", "--max-new-tokens", 21)
    compare = stats["compare"]
    assert compare["identical"] and compare["speedup"] == pytest.approx(
        compare["speculative_tokens_per_second"] / compare["plain_tokens_per_second"]
    )
    assert {entry["shape"]: entry["eager"] for entry in stats["graphs"]} == {"0-1-1": 60, "3-1-4": 20}
    assert len(compare["speedup_by_round"]) == 3 and "x, the same ids (" in err and "by round" in err


def test_without_a_tokenizer_ids_are_served(cli, kit, tmp_path):
    (tmp_path / "ids.jsonl").write_text('{"token_ids": [3]}')
    target = kit.altered(kit.map(), lambda config, tensors: None)
    code, out, _, stats = cli(
        "--prompt-file", tmp_path / "ids.jsonl", "--target", target, *SMALL, "--max-new-tokens", 3
    )
    ids = toys.follow(3, 3, toys.NEXT)
    assert (code, out.split()) == (0, list(map(str, ids))) and stats["requests"][0]["text"] is None


def test_random_weights(cli, tmp_path):
    (tmp_path / "target.json").write_text(json.dumps({"target": toys.target_config(layers=4)}))
    (tmp_path / "ids.jsonl").write_text('{"token_ids": [3]}')
    given = [
        "--random",
        tmp_path / "target.json",
        "--prompt-file",
        tmp_path / "ids.jsonl",
        *SMALL,
        "--max-new-tokens",
        3,
    ]
    assert cli(*given)[0] == 0
    code, _, err, _ = cli(*given, "--layers", 2)
    assert code == 0 and "random weights" in err


@pytest.mark.parametrize(
    "given, shape",
    [
        ("", Shape(3, 1, 4)),
        ("--steps 5", Shape(5, 1, 6)),
        ("--steps 0", PLAIN),
        ("--topk 4", Shape(3, 4, 13)),
        ("--steps 5 --topk 8 --draft-tokens 64", Shape(5, 8, 64)),
        ("--steps 8 --topk 8", Shape(8, 8, 64)),
        ("--steps 1 --topk 2", Shape(1, 2, 3)),
    ],
)
def test_shapes_by_default(given, shape):
    assert options.shape(options.parse(["x", *given.split()]), "some") == shape


def test_defaults_are_the_demo_pair():
    target, draft = options.pair(options.parse(["x"]))
    assert (target, draft) == (str(options.DEMO / "target"), str(options.DEMO / "draft"))
    assert options.pair(options.parse(["x", "--target", "there"])) == ("there", "none")


# What is refused

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
