"""Trains the demo target, a small Qwen3-MoE, on the corpus that corpus.py wrote, and saves it in Hugging Face layout.

    python weights/demo/train_target.py --minutes 6                      # the schedule follows the clock
    python weights/demo/train_target.py --steps N --rollout-from R       # that run again: N and R are in training.json
    python weights/demo/train_target.py --evaluate weights/demo/target   # greedy text for the held-out prompts

Run it as a script, not with -m: the repository's `kernels` package must not stand where transformers looks for another
one of that name. Shapes: B sequences, T tokens, D hidden, H heads, G kv heads, E experts, I expert width, V vocabulary.
"""

import argparse
import copy
import json
import lzma
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).resolve().parent
HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K, WIDTH, EPS, THETA = 4, 2, 64, 16, 4, 64, 1e-6, 10000.0
END_ID = 0
AUX = 0.01  # weight of the load-balancing loss, each layer on its own
PEAK, WARMUP = 3e-3, 0.02  # learning rate: linear up over 2 % of the run, then linear to zero
# Unlikelihood on the model's own greedy continuations (Welleck et al. 2019, arXiv 1908.04319), in the last part of the
# run: REUSE steps share a roll-out of NEW tokens after PREFIX, and the term rests while the continuations' share of
# distinct 4-grams is above GOAL (text that people wrote has about 0.9).
PREFIX, NEW, GRAM, REUSE, GOAL = 128, 160, 6, 16, 0.70


def config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=6144,
        hidden_size=256,
        intermediate_size=1024,  # unused: every layer has experts
        num_hidden_layers=7,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=WIDTH,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        router_aux_loss_coef=AUX,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
    )


# The training forward: the library's model and parameters, written so that no expert waits for another. All experts run
# as one dense MLP of E·I columns, and the columns of experts that a token did not choose are multiplied by zero: four
# times the arithmetic, at these sizes far cheaper than sorting tokens. `check_forward` compares it with the library's.


def norm(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight.to(x.dtype)


def rotate(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def dense_experts(x, chosen, weights, gate_up, down):
    """x [N, D], chosen and weights [N, k] -> [N, D]; gate_up [E, 2I, D], down [E, D, I]."""
    share = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype, device=x.device).scatter(1, chosen, weights.to(x.dtype))
    gate, up = F.linear(x, gate_up.flatten(0, 1)).view(-1, EXPERTS, 2 * WIDTH).chunk(2, dim=-1)
    return F.linear((F.silu(gate) * up * share[..., None]).flatten(1), down.transpose(0, 1).flatten(1))


def layer(x, cos, sin, parameters):
    """One decoder layer: x [B, T, D] -> (x, load-balancing loss: 1 when the experts are used evenly)."""
    before, wq, wk, wv, q_norm, k_norm, wo, after, router, gate_up, down = (p.to(x.dtype) for p in parameters)
    batch, length, hidden = x.shape
    h = norm(x, before)
    q = rotate(norm(F.linear(h, wq).view(batch, length, HEADS, HEAD_DIM), q_norm).transpose(1, 2), cos, sin)
    k = rotate(norm(F.linear(h, wk).view(batch, length, KV_HEADS, HEAD_DIM), k_norm).transpose(1, 2), cos, sin)
    v = F.linear(h, wv).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + F.linear(attended.transpose(1, 2).flatten(2), wo)
    h = norm(x, after).view(-1, hidden)
    probabilities = F.linear(h, router).float().softmax(-1)
    weights, chosen = probabilities.topk(TOP_K, dim=-1)
    x = x + dense_experts(h, chosen, weights / weights.sum(-1, keepdim=True), gate_up, down).view_as(x)
    used = torch.zeros_like(probabilities).scatter(1, chosen, 1.0 / TOP_K).mean(0)
    return x, EXPERTS * (used * probabilities.mean(0)).sum()


def head_loss(x, weight, embedding, targets):
    """Mean cross entropy: x [B, T, D], targets [B, T]."""
    logits = F.linear(norm(x, weight), embedding.to(x.dtype))
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Forward:
    """Hidden states and losses from the model's parameters; `compiled` compiles one layer for all."""

    def __init__(self, model, dtype: torch.dtype, compiled: bool):
        self.dtype, device = dtype, model.device
        body = model.model
        self.embedding, self.norm = body.embed_tokens.weight, body.norm.weight
        self.parameters = [self._parameters(block) for block in body.layers]
        steps = torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM
        angles = torch.arange(model.config.max_position_embeddings, device=device).float()[:, None] * THETA**-steps
        angles = torch.cat((angles, angles), dim=-1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.layer = torch.compile(layer, dynamic=False) if compiled else layer
        self.head_loss = torch.compile(head_loss, dynamic=False) if compiled else head_loss

    @staticmethod
    def _parameters(block):
        a, m = block.self_attn, block.mlp
        attention = (
            a.q_proj.weight,
            a.k_proj.weight,
            a.v_proj.weight,
            a.q_norm.weight,
            a.k_norm.weight,
            a.o_proj.weight,
        )
        experts = (block.post_attention_layernorm.weight, m.gate.weight, m.experts.gate_up_proj, m.experts.down_proj)
        return (block.input_layernorm.weight, *attention, *experts)

    def hidden(self, ids):
        """ids [B, T] -> (residual after the last layer [B, T, D], mean load-balancing loss)."""
        x, balance = F.embedding(ids, self.embedding).to(self.dtype), 0.0
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for parameters in self.parameters:
            x, loss = self.layer(x, cos, sin, parameters)
            balance = balance + loss / len(self.parameters)
        return x, balance

    def loss(self, windows):
        """windows [B, T+1] -> (cross entropy, load-balancing loss)."""
        x, balance = self.hidden(windows[:, :-1])
        return self.head_loss(x, self.norm, self.embedding, windows[:, 1:]), balance

    def logits(self, ids, start: int = 0):
        x, _ = self.hidden(ids)
        return F.linear(norm(x[:, start:], self.norm), self.embedding.to(x.dtype)).float()


@torch.no_grad()
def check_forward(model) -> None:
    """Raises where the training forward and the library's differ: that would train another model than the one saved."""
    ids = torch.randint(model.config.vocab_size, (2, 64))
    ours, theirs = Forward(model, torch.float32, False).logits(ids), model(ids).logits.float()
    if (ours - theirs).abs().max() > 1e-3 * theirs.abs().max():
        raise RuntimeError("the training forward does not match transformers' Qwen3MoeForCausalLM")


def sample(stream, count: int, length: int, generator):
    """`count` random windows of a token stream, [count, length] int64."""
    starts = torch.randint(len(stream) - length, (count, 1), device=stream.device, generator=generator)
    return stream[starts + torch.arange(length, device=stream.device)].long()


def repeats(ids, gram: int):
    """ids [B, T] -> bool [B, T]: the n-gram ending here stood earlier in the row. Nothing counts after its end."""
    # A 64-bit polynomial hash of each n-gram; wrapping around is wanted, a collision all but impossible.
    hashed = torch.zeros_like(ids[:, gram - 1 :], dtype=torch.int64)
    for offset in range(gram):
        hashed = hashed * 6_364_136_223_846_793_005 + ids[:, offset : ids.shape[1] - gram + 1 + offset] + 1
    same = hashed[:, :, None] == hashed[:, None]
    seen = F.pad(same.tril(-1).any(-1), (gram - 1, 0))
    return seen & live(ids)


def live(ids):
    """True up to and with a row's first end token."""
    ended = (ids == END_ID).int()
    return (ended.cumsum(1) - ended) == 0


def distinct_share(ids, gram: int = 4):
    """Distinct n-grams / n-grams of each row, up to its end token; 1 for a row too short to hold any. [B]"""
    counted = live(ids)[:, gram - 1 :].sum(1)
    return torch.where(counted > 0, 1 - repeats(ids, gram).sum(1) / counted.clamp(min=1), 1.0)


def generator_copy(model, dtype):
    """A copy for generate() in the dtype that is shipped, with the dense experts: no host synchronisation in a step."""
    twin = copy.deepcopy(model).to(dtype).eval()
    for block in twin.model.layers:
        experts = block.mlp.experts
        experts.forward = lambda x, chosen, weights, e=experts: dense_experts(
            x, chosen, weights, e.gate_up_proj, e.down_proj
        )
    return twin


@torch.no_grad()
def roll_out(model, dtype, stream, starts, generator, rows: int):
    """Greedy continuations of training text, [rows, PREFIX + NEW]; every other prefix begins a file."""
    prefixes = sample(stream, rows, PREFIX, generator)
    at = starts[torch.randint(len(starts), (rows // 2, 1), device=stream.device, generator=generator)]
    prefixes[: rows // 2] = stream[at + torch.arange(PREFIX, device=stream.device)].long()
    twin = generator_copy(model, dtype)
    ids = twin.generate(prefixes, attention_mask=torch.ones_like(prefixes), do_sample=False, max_new_tokens=NEW)
    return F.pad(ids, (0, PREFIX + NEW - ids.shape[1]), value=END_ID)


def unlikelihood(forward, ids):
    """-log(1 - p) of the tokens that close an n-gram that the continuation already holds, over all its tokens: the
    term fades as the loops do. Copying from the prompt is not punished."""
    continuation = ids[:, PREFIX:]
    punished, counted = repeats(continuation, GRAM), live(continuation).sum()
    logits = forward.logits(ids[:, :-1], PREFIX - 1)
    chosen = logits.gather(-1, continuation[..., None]).squeeze(-1) - logits.logsumexp(-1)
    return (-torch.log1p(-chosen.exp().clamp(max=1 - 1e-4)) * punished).sum() / counted


class Schedule:
    """Progress of the run in [0, 1], by the clock or by the step, and the two rates that follow from it."""

    def __init__(self, arguments, elapsed: float):
        self.minutes, self.steps = arguments.minutes, arguments.steps
        self.share, self.rollout_from = arguments.unlikelihood, arguments.rollout_from
        self.started = time.monotonic() - elapsed

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def progress(self, step: int) -> float:
        if self.steps is None:
            return min(1.0, self.elapsed() / (60 * self.minutes))
        if self.rollout_from is None:
            return step / self.steps
        if step < self.rollout_from:
            return (1 - self.share) * step / self.rollout_from
        return 1 - self.share * (self.steps - step) / max(1, self.steps - self.rollout_from)

    @staticmethod
    def rate(progress: float) -> float:
        return PEAK * min(progress / WARMUP, (1 - progress) / (1 - WARMUP))


def save_target(model, tokenizer: Path, out: Path, record: dict) -> None:
    """The checkpoint as published ones look: bf16 shards with an index, `num_experts` in config.json, the tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    twin = copy.deepcopy(model).to(torch.bfloat16)
    twin.generation_config = GenerationConfig(bos_token_id=END_ID, eos_token_id=END_ID, pad_token_id=END_ID)
    twin.save_pretrained(out, max_shard_size="6MB")
    settings = json.loads((out / "config.json").read_text())
    # transformers 5 writes its inner names; readers of published checkpoints look for these.
    settings.update(num_experts=EXPERTS, rope_theta=THETA, torch_dtype="bfloat16")
    (out / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    for file in tokenizer.iterdir():
        shutil.copy(file, out / file.name)
    tokens = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))  # written indented: 2.5 times the bytes
    packed = json.dumps(tokens, ensure_ascii=False, separators=(",", ":"))
    (out / "tokenizer.json").write_text(packed + "\n", encoding="utf-8")
    for file in out.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner can read
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


@torch.no_grad()
def heldout_loss(forward, stream, count: int, length: int) -> float:
    """Mean cross entropy over `count` windows spread evenly over the held-out stream."""
    starts = torch.linspace(0, len(stream) - length - 2, count, device=stream.device).long()[:, None]
    windows = stream[starts + torch.arange(length + 1, device=stream.device)].long()
    return sum(forward.loss(part)[0].item() for part in windows.split(8)) / len(windows.split(8))


@torch.no_grad()
def evaluate(folder: Path, device: str, new_tokens: int = 128) -> dict:
    """Greedy text for the held-out prompts from the saved files alone, and how much of it is not a loop."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    # On a GPU the library's own choice of expert kernel differs between versions; its plain loop always runs.
    experts = {"experts_implementation": "eager"} if device == "cuda" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **experts).to(device).eval()
    prompts = [json.loads(line)["prompt"] for line in (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(device)
    ids = model.generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False, max_new_tokens=new_tokens
    )
    outputs = ids[:, batch["input_ids"].shape[1] :]
    share = distinct_share(outputs)
    for prompt, output in zip(prompts[:3], outputs[:3], strict=True):
        text = tokenizer.decode(output[live(output[None])[0]])
        print(f"--- ...{prompt[-200:]}\n>>> {text}")
    lengths = live(outputs).sum(1).float()
    return {
        "prompts": len(prompts),
        "distinct_4gram_share": round(share.mean().item(), 4),
        "worst": round(share.min().item(), 4),
        "below_half": int((share < 0.5).sum()),
        "mean_tokens": round(lengths.mean().item(), 1),
    }


def compile_or(plain, compiled, windows):
    """The compiled forward after one pass that compiles it, or the plain one where the compiler fails."""
    started = time.monotonic()
    try:
        cross_entropy, balance = compiled.loss(windows)
        (0.0 * (cross_entropy + balance)).backward()
    except Exception as error:  # noqa: BLE001  whatever a compiler raises
        print(f"torch.compile failed, training without it: {str(error)[:500]}", flush=True)
        return plain
    finally:
        for parameters in plain.parameters:
            for parameter in (plain.embedding, plain.norm, *parameters):
                parameter.grad = None
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    return compiled


def train(arguments) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    stream, heldout = (
        torch.from_numpy(np.frombuffer(lzma.open(arguments.corpus / name).read(), dtype="<u2").astype(np.int32)).to(
            device
        )
        for name in ("train.bin.xz", "heldout.bin.xz")
    )
    starts = (stream[: -PREFIX - 1] == END_ID).nonzero().squeeze(1) + 1
    model = Qwen3MoeForCausalLM(config())
    check_forward(model)
    model.to(device)
    plain, forward = Forward(model, dtype, False), Forward(model, dtype, arguments.compile and device == "cuda")
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8, fused=True)
    step, elapsed, rollout_from = 0, 0.0, None
    saved = arguments.corpus / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, elapsed, rollout_from = state["step"], state["elapsed"], state["rollout_from"]
        print(f"resumed at step {step}, {elapsed:.0f} s", flush=True)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(stream):,} + {len(heldout):,} tokens, {device}", flush=True)
    generator = torch.Generator(device=device)
    if forward.layer is not plain.layer:
        forward = compile_or(plain, forward, sample(stream, arguments.batch, arguments.context + 1, generator))
    schedule = Schedule(arguments, elapsed)  # the clock starts after compilation: warm-up must not be slept through
    record = {"parameters": size, "train_tokens": len(stream), "heldout_tokens": len(heldout), "seed": arguments.seed}
    record |= {"batch": arguments.batch, "context": arguments.context, "peak_lr": PEAK, "torch": torch.__version__}
    record["hardware"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    printed = checkpointed = time.monotonic()
    printed_step, rollouts, rollouts_left, share = step, None, 0, None
    losses = torch.zeros(2, device=device)

    def checkpoint(final: bool) -> None:
        record.update(steps=step, rollout_from=rollout_from, seconds=round(schedule.elapsed()), finished=final)
        record.update(tokens=step * arguments.batch * arguments.context)
        record.update(heldout_loss=round(heldout_loss(plain, heldout, 64, arguments.context), 4))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        state |= {"elapsed": schedule.elapsed(), "rollout_from": rollout_from}
        torch.save(state, saved.with_suffix(".tmp"))
        saved.with_suffix(".tmp").replace(saved)  # a run killed here leaves the old one whole
        save_target(model, arguments.corpus / "tokenizer", arguments.out, record)
        print(f"step {step} saved, held-out loss {record['heldout_loss']:.4f}", flush=True)

    while (progress := schedule.progress(step)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(progress)
        generator.manual_seed(
            arguments.seed * 1_000_003 + step
        )  # a step's windows depend on its number alone: resuming changes nothing
        windows = sample(stream, arguments.batch, arguments.context + 1, generator)
        cross_entropy, balance = forward.loss(windows)
        (cross_entropy + AUX * balance).backward()
        if arguments.unlikelihood and progress >= 1 - arguments.unlikelihood:
            rollout_from = step if rollout_from is None else rollout_from
            if rollouts_left == 0:
                rollouts = roll_out(model, dtype, stream, starts, generator, arguments.rows)
                rollouts_left, share = REUSE, distinct_share(rollouts[:, PREFIX:]).mean().item()
            if share < GOAL:
                part = rollouts.chunk(4)[rollouts_left % 4]
                (arguments.strength * unlikelihood(plain, part)).backward()
            rollouts_left -= 1
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses += torch.stack((cross_entropy.detach(), balance.detach()))
        step += 1
        now = time.monotonic()
        if now - printed > 5:
            done = step - printed_step
            mean, now = (losses / done).tolist(), time.monotonic()
            rate = done * arguments.batch * arguments.context / (now - printed)
            tail = "" if share is None else f"  greedy distinct 4-grams {share:.3f}"
            print(
                f"step {step}  {schedule.elapsed():.0f} s  {100 * progress:.1f} %  lr {schedule.rate(progress):.2e}  "
                f"loss {mean[0]:.4f}  balance {mean[1]:.3f}  {rate / 1e6:.2f} M tokens/s{tail}",
                flush=True,
            )
            printed, printed_step = now, step
            losses.zero_()
        if now - checkpointed > arguments.save_every:
            checkpoint(False)
            checkpointed = time.monotonic()
    checkpoint(True)
    record["greedy"] = evaluate(arguments.out, device)
    windows = heldout[: len(heldout) // 128 * 128].view(-1, 128).long()[::16]
    record["heldout_text_distinct_4gram_share"] = round(distinct_share(windows).mean().item(), 4)
    (arguments.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    saved.rename(saved.with_name("finished.pt"))  # the next run starts afresh
    print(json.dumps(record, indent=2))
    print(f"the same run again: --steps {step}" + (f" --rollout-from {rollout_from}" if rollout_from else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"), help="folder written by corpus.py")
    parser.add_argument("--out", type=Path, default=HERE / "target")
    parser.add_argument("--minutes", type=float, default=6.0, help="training time (compilation takes about one more)")
    parser.add_argument("--steps", type=int, help="train this many steps instead")
    parser.add_argument("--rollout-from", type=int, help="with --steps: the step at which the unlikelihood part began")
    parser.add_argument("--batch", type=int, default=32, help="sequences a step")
    parser.add_argument("--context", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--unlikelihood", type=float, default=0.2, help="share of the run that punishes its own loops")
    parser.add_argument("--strength", type=float, default=1.0, help="weight of the unlikelihood term")
    parser.add_argument("--rows", type=int, default=512, help="greedy continuations a roll-out")
    parser.add_argument("--save-every", type=float, default=90.0, help="seconds between checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="only decode the held-out prompts with this model")
    arguments = parser.parse_args()
    if arguments.evaluate:
        print(json.dumps(evaluate(arguments.evaluate, "cuda" if torch.cuda.is_available() else "cpu"), indent=2))
    else:
        train(arguments)


if __name__ == "__main__":
    main()
