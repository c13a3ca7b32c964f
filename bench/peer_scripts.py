"""What `bench.peers` runs in processes of their own: text, so that nothing here imports an engine.

Each script reads a job (a JSON file), writes {speeds: [tokens/s], ids, version} or {absent: why}. tokens/s are those
after each first token; where an engine does not say when that came, a run of one token is taken off.
"""

COMMON = '''
import importlib.metadata, importlib.util, json, sys, time

# an environment made inside the repository, as README makes it, has its packages there and stays
sys.path = [p for p in sys.path if p and ("site-packages" in p or not p.startswith(REPOSITORY))]
sys.meta_path = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "") + repr(f)]
job = json.load(open(sys.argv[1]))


def answer(**found):
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)
    sys.exit(0)


def need(package):
    if importlib.util.find_spec(package) is None:
        answer(absent="not installed")
    return importlib.metadata.version(package)


def timed(generate):
    """generate(prompt, tokens) -> ids. Tokens/s after the first: a run of one token is taken off."""
    speeds, ids = [], []
    for prompt in job["prompts"]:
        generate(prompt, 2)
    for _ in range(job["repeats"]):
        ids, seconds = [], 0.0
        for prompt in job["prompts"]:
            began = time.perf_counter()
            generate(prompt, 1)
            middle = time.perf_counter()
            ids.append(generate(prompt, job["new_tokens"]))
            seconds += time.perf_counter() - middle - (middle - began)
        speeds.append(sum(len(i) - 1 for i in ids) / seconds)
    return speeds, ids

'''

SCRIPTS = {
    "transformers": '''
version = need("transformers")
if job["draft"]:
    answer(absent="no EAGLE-3 in transformers")
import torch
from transformers import AutoModelForCausalLM

if job["device"] == "cpu":
    torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=getattr(torch, job["dtype"])).to(job["device"]).eval()
model.generation_config.eos_token_id = None


class Times:
    """A streamer: transformers hands it the prompt, then every token."""

    def __init__(self):
        self.at = []

    def put(self, value):
        self.at.append(time.perf_counter())

    def end(self):
        pass


def once(prompt, tokens):
    times, ids = Times(), torch.tensor([prompt], device=job["device"])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, streamer=times)
    return out[0, len(prompt):].tolist(), times.at


once(job["prompts"][0], 4)
speeds = []
for _ in range(job["repeats"]):
    ids, seconds = [], 0.0
    for prompt in job["prompts"]:
        found, at = once(prompt, job["new_tokens"])
        ids.append(found)
        seconds += at[-1] - at[1]
    speeds.append(sum(len(i) - 1 for i in ids) / seconds)
answer(speeds=speeds, ids=ids, version=version)
''',
    "vllm": """
if __name__ == "__main__":
    version = need("vllm")
    from vllm import LLM, SamplingParams

    words = {"max_model_len": job["max_len"], "max_num_seqs": 1, "enable_prefix_caching": False}
    if job["draft"]:
        if job["topk"] > 1:
            answer(absent="drafts chains only")
        words["speculative_config"] = {
            "method": "eagle3", "model": job["draft"], "num_speculative_tokens": job["draft_tokens"] - 1,
        }
    model = LLM(model=job["target"], dtype=job["dtype"], **words)

    def generate(prompt, tokens):
        how = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False)
        out = model.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)
        return list(out[0].outputs[0].token_ids)

    speeds, ids = timed(generate)
    answer(speeds=speeds, ids=ids, version=version)
""",
    "sglang": """
if __name__ == "__main__":
    version = need("sglang")
    import sglang

    words = {"context_length": job["max_len"], "max_running_requests": 1, "disable_radix_cache": True}
    if job["draft"]:
        words |= {
            "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": job["draft"],
            "speculative_num_steps": job["steps"], "speculative_eagle_topk": job["topk"],
            "speculative_num_draft_tokens": job["draft_tokens"],
        }
    model = sglang.Engine(model_path=job["target"], dtype=job["dtype"], device=job["device"], **words)

    def generate(prompt, tokens):
        how = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return list(model.generate(input_ids=prompt, sampling_params=how)["output_ids"])

    speeds, ids = timed(generate)
    model.shutdown()
    answer(speeds=speeds, ids=ids, version=version)
""",
}
