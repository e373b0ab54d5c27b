"""Collectives in the text of compiled programs."""

import pytest

from jaxrl_post.programs.planning.hlo import Collective, collectives

# An entry with one collective of every kind, on groups of four devices.
KINDS = """HloModule jit_run, is_scheduled=true

ENTRY %main (p: bf16[8,1]) -> bf16[8,4] {
  %ag = bf16[8,4]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=1, replica_groups=[4,4]<=[4,4]T(1,0), dimensions={1}
  %ags = (f32[4,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%p), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}
  %agd = f32[16,4]{1,0} all-gather-done(%ags)
  %ar = (f32[16]{0}, /*index=1*/f32[8]{0}) all-reduce(%a, %b), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add
  %ars = (f32[16]{0}, f32[8]{0}) all-reduce-start(%a, %b), channel_id=4, replica_groups=[2,4]<=[8]
  %cp = (s8[64]{0}, s8[64]{0}, u32[], u32[]) collective-permute-start(%c), channel_id=5, source_target_pairs={{0,1}}
  %again = bf16[8,4]{1,0} all-gather(%p.1), channel_id=6, replica_groups=[4,4]<=[16], dimensions={1}
  %rs = f32[8]{0} reduce-scatter(%e), channel_id=1, replica_groups=mesh['dp'=2,'fsdp'=4,'tp'=1] {'fsdp','tp'}, dimensions={0}
  %f = f32[4096]{0} fusion(%ag, %all-gather.7), kind=kLoop, calls=%fused
  ROOT %a2a = pred[40]{0} all-to-all(%d), replica_groups={{0,1,2,3}}, dimensions={0}
}
"""  # noqa: E501


def test_collectives_of_a_program_largest_first():
    """Bytes that a ring of n devices receives: (n - 1) / n of what all of them hold."""
    assert collectives(KINDS) == (
        Collective("all-gather", "f32[16,4]", 1, 256, 256 * 3 // 4),
        # Received in a reduce-scatter and in an all-gather.
        Collective("all-reduce", "f32[16]", 2, 96, 2 * 96 * 3 // 4),
        Collective("all-gather", "bf16[8,4]", 2, 64, 64 * 3 // 4),
        Collective("collective-permute", "s8[64]", 1, 64, 64),
        Collective("all-to-all", "pred[40]", 1, 40, 40 * 3 // 4),
        Collective("reduce-scatter", "f32[8]", 1, 32, 32 * 3),
    )


def test_a_program_without_communication():
    assert (
        collectives("ENTRY %main () -> f32[4] {\n  %f = f32[4]{0} add(%a, %b)\n}") == ()
    )


# A loop of 3 around a loop of 5, and one whose trips only the data know. The gather of
# channel 7 is started in the outer loop and carried on in the inner one.
LOOPS = """HloModule jit_run

%start (p: bf16[4]) -> bf16[8] {
  ROOT %g.1 = bf16[8]{0} all-gather(%p), channel_id=7, replica_groups=[1,2]<=[2], frontend_attributes={chain_id="0"}
}
%go_on (p: bf16[4]) -> bf16[8] {
  ROOT %g.2 = bf16[8]{0} all-gather(%p), channel_id=7, replica_groups=[1,2]<=[2], frontend_attributes={chain_id="0"}
}
%inner_body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %r = f32[16]{0} all-reduce(%x), channel_id=1, replica_groups=[1,2]<=[2], to_apply=%add
  %q = (bf16[8]{0}) fusion(%y), kind=kOutput, calls=%go_on
}
%inner_condition (p: (s32[], f32[16])) -> pred[] {
  %five = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %five), direction=LT
}
%outer_body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %b = (bf16[8]{0}, u32[]) fusion(%z), kind=kCustom, calls=%start
  %w = (s32[], f32[16]{0}) while(%t), condition=%inner_condition, body=%inner_body
}
%outer_condition (p: (s32[], f32[16])) -> pred[] {
  %three = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[] compare(%i, %three), direction=LT
}
%data_body (p: (s32[], s32[])) -> (s32[], s32[]) {
  %m = f32[2]{0} all-reduce(%x), channel_id=1, replica_groups=[1,2]<=[2], to_apply=%max
  %s = f32[2]{0} all-reduce(%x), channel_id=1, replica_groups=[1,2]<=[2], to_apply=%add
}
%data_condition (p: (s32[], s32[])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
%never (p: f32[4]) -> f32[4] {
  ROOT %r = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups=[1,2]<=[2], to_apply=%add
}
ENTRY %main (p: f32[4]) -> f32[4] {
  %o = (s32[], f32[16]{0}) while(%t), condition=%outer_condition, body=%outer_body
  %d = (s32[], s32[]) while(%t), condition=%data_condition, body=%data_body
}
"""  # noqa: E501


@pytest.mark.parametrize("trips", [1, 2])
def test_a_collective_in_a_loop_counts_its_trips(trips):
    assert collectives(LOOPS, unknown_trips=trips) == (
        Collective("all-reduce", "f32[16]", 3 * 5, 64, 64),
        # Once per trip of the outer loop, wherever its parts are.
        Collective("all-gather", "bf16[8]", 3, 16, 8),
        # Collectives of one channel that are not parts of one another count each.
        Collective("all-reduce", "f32[2]", 2 * trips, 8, 8),
    )


@pytest.mark.parametrize(
    "called",
    [
        "branch_computations={%nothing, %gathers}",
        "true_computation=%gathers, false_computation=%nothing",
    ],
)
def test_every_branch_of_a_conditional_counts(called):
    text = f"""HloModule jit_run

%nothing (p: bf16[4]) -> bf16[8] {{
  ROOT %b = bf16[8]{{0}} broadcast(%p)
}}
%gathers (p: bf16[4]) -> bf16[8] {{
  ROOT %g = bf16[8]{{0}} all-gather(%p), channel_id=1, replica_groups=[1,2]<=[2]
}}
ENTRY %main (p: bf16[4]) -> bf16[8] {{
  ROOT %c = bf16[8]{{0}} conditional(%i, %p, %p), {called}, metadata={{}}
}}
"""
    assert collectives(text) == (Collective("all-gather", "bf16[8]", 1, 16, 8),)
