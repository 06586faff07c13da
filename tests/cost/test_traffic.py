"""Bytes moved and launches: against the derived floor of depth reads, and what must hold of any counts."""

import pytest

import twoaxis
from twoaxis.cost import fused, traced

B, T, D = 2, 16, 192
u = 4 * B * T * D  # one array of the stream


def model(depth, n_blocks=8, sequence=("mlp(hidden=8)",)):
    return twoaxis.ModelConfig(
        vocab_size=11, d_model=D, n_blocks=n_blocks, n_heads=2, depth=depth, sequence=list(sequence)
    )


def routing(depth, n_blocks, sequence=("mlp(hidden=8)",)):
    """(forward, backward) of the depth kernels before blocks 1, 2, .. and after the last, in arrays."""
    tape = traced(model(depth, n_blocks, sequence), B, T)
    found = [one for one in fused(tape) if one.part == "depth" and not one.product]
    assert len(found) == n_blocks * len(sequence) + 1
    return [(one.bytes_forward / u, one.bytes_backward / u) for one in found[1:-1]]


def near(counted):
    """Without norm gains, scores and factors: a few numbers per token."""
    return [tuple(round(x) for x in pair) for pair in counted]


def test_standard_stream_moves_four_arrays_each_way():
    # read x and y, write x' and norm(x'); backward: both gradients, x', and one gradient that x and y share
    assert near(routing("additive", 6)) == [(4, 4)] * 5


def test_full_attention_residuals_read_every_source_once():
    # methods: (M + 1) / 2 + 1 on average: the s-th read has s sources and writes its input
    forward = [f for f, _ in near(routing("attnres", 9))]
    assert forward == [s + 1 for s in range(2, 10)]
    backward = [b for _, b in near(routing("attnres", 9))]
    # sources once, the read's gradient, and for every source its sum read and written: 3 s + 1, but that the
    # newest source's sum starts at the read-out, whose gradients are written only
    assert backward == [3 * s + 1 for s in range(2, 10)]


def test_gradients_are_added_to_where_a_summand_is_read_elsewhere():
    """Block n of ELC-BERT: A = f(norm(x_n)), F = f(norm(x_n + A)), h_n = A + F, x_{n+1} of h_0 .. h_n."""
    counted = near(routing("elc_bert", 6, ("mlp(hidden=8)",) * 2))
    # inside: x_n and A read, the input written; backward: its gradient, x_n and A, from which the sum is made
    # again, that of x_n written, that of A, which h_n has begun, read and written
    assert counted[0::2] == [(3, 7)] + [(3, 6)] * 5  # x_1 is h_0, whose sum has begun too
    # between: A, F and n sources read, h_n, x_{n+1} and its norm written; backward: the gradients of these
    # three, n + 1 sources and x_{n+1}, one gradient that A and F share, and those of n sources. The last h_n
    # is read here alone, so it is not written but made again, of A and F; the other sources' sums begin here
    assert [f for f, _ in counted[1::2]] == [n + 5 for n in range(1, 5)] + [5 + 4]
    assert [b for _, b in counted[1::2]] == [3 * n + 6 for n in range(1, 5)] + [2 * 5 + 6]


def test_denseformer_reads_every_block_output_once():
    counted = near(routing("denseformer", 7))
    # y, Y_{n-1} and X_0 .. X_{n-1} read, X_n, Y_n and its norm written; Y_0 is X_0
    assert [f for f, _ in counted] == [5] + [n + 5 for n in range(2, 7)]
    # three gradients, X_0 .. X_n and Y_n read, one gradient written for y and Y_{n-1}, n sums read and written
    assert [b for _, b in counted] == [9] + [3 * n + 6 for n in range(2, 7)]


def test_block_attention_residuals_read_sums_of_blocks_and_the_open_one():
    # methods: n + 3 + (G - 1) / G on average, but that the first output of a block is its open sum already
    counted = near(routing("attnres(block_sublayers=4)", 13))
    assert [f for f, _ in counted] == [n + extra for n in (1, 2, 3) for extra in (2, 4, 4, 4)]
    # the input's gradient, sources read, their sums read and written; the open sum's is begun one sublayer later
    assert [b for _, b in counted] == [3 * n + 4 for n in (1, 2, 3) for _ in range(4)]


@pytest.mark.parametrize("K", [2, 3, 4])
def test_a_window_reads_its_states_and_no_others(K):
    # K - 1 older states and the branch read, the new state and the input written, K + 2; and the mixed x,
    # which the block's skip reads again, read and written
    counted = near(routing(f"depth_conv(kernel={K})", 9))
    assert [f for f, _ in counted[K:-1]] == [K + 4] * (7 - K)


def test_moving_less_is_not_possible_kernel_by_kernel():
    for depth in ("additive", "attnres", "denseformer", "ddl", "mhc"):
        cost = twoaxis.cost(model(depth, sequence=("attention", "mlp")), B, T)
        assert cost.bytes_forward < cost.bytes_eager_forward
        assert cost.bytes_moved == cost.bytes_forward + cost.bytes_backward
        assert cost.launches_fused_forward < cost.launches_forward
        assert cost.launches == cost.launches_forward + cost.launches_backward


def test_counts_of_parts_add_up():
    cost = twoaxis.cost(model("mhc", sequence=("attention", "mlp")), B, T)
    for name in ("flops_forward", "bytes_forward", "bytes_eager_backward", "launches_forward", "saved_bytes"):
        assert getattr(cost, name) == sum(getattr(part, name) for part in cost.by_part.values()) > 0


def test_a_decoding_step_reads_weights_and_state_once():
    cfg = model("additive", sequence=("attention", "mlp"))
    short, long = (twoaxis.cost(cfg, B, seq_len, phase="decoding") for seq_len in (64, 128))
    assert long.bytes_forward - short.bytes_forward == long.decode_state_bytes - short.decode_state_bytes
    assert short.bytes_forward > 4 * short.parameters + short.decode_state_bytes
    scores = 4 * D * B * 8  # per pair, of 8 blocks
    assert long.flops_forward - short.flops_forward == 64 * scores
    per_token = twoaxis.cost(cfg, B, 1).flops_forward - scores
    assert short.flops_forward == per_token + 64 * scores
    assert (short.flops_backward, short.saved_bytes, short.bytes_moved) == (0, None, short.bytes_forward)


def test_a_decoding_step_within_a_window_costs_the_same_at_any_length():
    cfg = model("attnres", sequence=("short_swa(window=8)", "mlp"))
    one, other = (twoaxis.cost(cfg, B, seq_len, phase="decoding") for seq_len in (64, 4096))
    assert (one.flops_forward, one.bytes_forward) == (other.flops_forward, other.bytes_forward)


def test_an_unknown_phase_is_refused():
    with pytest.raises(twoaxis.InputError, match="phase='serving': allowed is 'training' or 'decoding'"):
        twoaxis.cost(model("additive"), B, T, phase="serving")
