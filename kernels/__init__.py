"""Every operation the engine calls, as one table of functions: a torch reference beside each fused twin."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from . import (
    accept,
    allreduce,
    attend,
    attention,
    commit,
    draft_input,
    experts,
    experts_fp8,
    experts_int4,
    experts_mxfp4,
    head,
    linear,
    mla,
    mla_attention,
    mla_prefill,
    mlp,
    moe,
    norm,
    philox,
    prefill,
    prefill_packed,
    publish,
    qkv,
    routing,
    rows,
    sampling,
    shares,
    stamp,
    tree,
)


@dataclass(frozen=True)
class Ops:
    """One implementation of every operation. Fields are as coarse as a fused kernel; a bench swaps one of them."""

    norm: Callable
    linear: Callable
    qkv: Callable
    attention: Callable
    attend: Callable
    mla_qkv: Callable
    mla_attention: Callable
    route: Callable
    experts: Callable
    experts_int4: Callable
    experts_fp8: Callable
    experts_mxfp4: Callable
    moe: Callable
    moe_int4: Callable
    mlp: Callable
    head: Callable
    embed: Callable
    embed_share: Callable
    pack_bests: Callable
    merge_bests: Callable
    behind: Callable
    last: Callable
    draft_input: Callable
    grow: Callable
    choose: Callable
    plant: Callable
    record: Callable
    walk: Callable
    follow: Callable
    uniform: Callable
    soften: Callable
    draw: Callable
    commit: Callable
    publish: Callable
    stamp: Callable
    total: Callable


REFERENCE = Ops(
    norm=norm.reference,
    linear=linear.reference,
    qkv=qkv.reference,
    attention=attention.reference,
    attend=attend.composed(qkv.reference, attention.reference),
    mla_qkv=mla.reference,
    mla_attention=mla_attention.reference,
    route=routing.reference,
    experts=experts.reference,
    experts_int4=experts_int4.reference,
    experts_fp8=experts_fp8.reference,
    experts_mxfp4=experts_mxfp4.reference,
    moe=moe.composed(routing.reference, experts.reference),
    moe_int4=moe.composed_int4(routing.reference, experts_int4.reference),
    mlp=mlp.reference,
    head=head.reference,
    embed=rows.embed,
    embed_share=shares.embed_share,
    pack_bests=shares.pack_bests,
    merge_bests=shares.merge_bests,
    behind=rows.behind,
    last=rows.last,
    draft_input=draft_input.reference,
    grow=tree.grow,
    choose=tree.choose,
    plant=tree.plant,
    record=rows.record,
    walk=accept.walk,
    follow=accept.follow,
    uniform=philox.uniform,
    soften=sampling.soften,
    draw=sampling.draw,
    commit=commit.reference,
    publish=publish.reference,
    stamp=stamp.reference,
    total=allreduce.reference,
)

FUSED = Ops(
    norm=norm.fused,
    linear=linear.fused,
    qkv=qkv.fused,
    attention=attention.fused,
    attend=attend.composed(qkv.fused, attention.fused),
    mla_qkv=mla.composed(linear.project),
    mla_attention=mla_attention.fused,
    route=routing.fused,
    experts=experts.fused,
    experts_int4=experts_int4.fused,
    experts_fp8=experts_fp8.fused,
    experts_mxfp4=experts_mxfp4.fused,
    moe=moe.composed(routing.fused, experts.fused),
    moe_int4=moe.composed_int4(routing.fused, experts_int4.fused),
    mlp=mlp.fused,
    head=head.fused,
    embed=rows.embed_fused,
    embed_share=shares.embed_share_fused,
    pack_bests=shares.pack_bests_fused,
    merge_bests=shares.merge_bests_fused,
    behind=rows.behind_fused,
    last=rows.last_fused,
    draft_input=draft_input.fused,
    grow=tree.grow_fused,
    choose=tree.choose_fused,
    plant=tree.plant_fused,
    record=rows.record_fused,
    walk=accept.walk_fused,
    follow=accept.follow_fused,
    uniform=philox.uniform_fused,
    soften=sampling.soften_fused,
    draw=sampling.draw_fused,
    commit=commit.fused,
    publish=publish.fused,
    stamp=stamp.fused,
    total=allreduce.fused,
)

# for passes over a prompt: many rows, causal, never part of a cycle
PREFILL = replace(FUSED, **prefill.OPERATIONS, **prefill_packed.OPERATIONS, **mla_prefill.OPERATIONS)
