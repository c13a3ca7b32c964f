"""The command line on the toys: its options, a MAP target with a tokenizer and its always-right draft."""

import toys
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

OPTIONS = """
--prompt-file --chat --target --draft --random --layers --capture-layers --steps --topk --draft-tokens --shape
--max-new-tokens --stop --stop-id --ignore-eos --temperature --top-k --top-p --min-p --seed --logprobs --batch
--max-context --pages --page-size --prefill-chunk --no-prefix-cache --device --dtype --graphs --tp --expert-parallel
--draft-tp --tp-slice --no-check --compare --profile --stats
""".split()
SMALL = "--device cpu --max-context 128 --page-size 16".split()


def spell(folder, **extra):
    """A tokenizer of 64 characters: token i is chr(32 + i)."""
    tokenizer = Tokenizer(models.BPE({chr(32 + i): i for i in range(toys.V)}, []))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **extra).save_pretrained(folder)
