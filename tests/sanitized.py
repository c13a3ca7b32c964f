"""What compute-sanitizer watches: a toy pair on CUDA, chains and trees, one and several requests, graphs on."""

import sys

from engine import Engine, Sampling, Shape


def main(target, draft):
    """Decode with every kind of shape; the ids of all shapes are the same."""
    engine = Engine.load(target, draft, device="cuda", max_context=160, max_batch=4, page_size=16, prefill_chunk=32)
    prompts, sampling = [[1, 2, 3] * 25, [5], [7, 8] * 9], Sampling(max_new_tokens=10, ignore_eos=True)
    want = None
    for shape in (Shape(0, 1, 1), Shape(3, 1, 4), Shape(4, 4, 16)):
        ids = [r.token_ids for r in engine.generate(prompts, sampling, shape=shape)]
        ids.append(engine.generate(prompts[0], sampling, shape=shape).token_ids)
        want = want or ids
        if ids != want:
            sys.exit(f"{shape}: {ids} where plain decoding gave {want}")


if __name__ == "__main__":
    main(*sys.argv[1:])
