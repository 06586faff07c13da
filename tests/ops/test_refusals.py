"""What operators refuse whatever their shapes: results cast back to integers would be rounded without a word."""

import pytest
import torch

from twoaxis import InputError, ops

COUNTS = torch.ones(2, 3, 4, dtype=torch.long)
CHANNELS = torch.ones(2, 3, 4, 2, dtype=torch.long)
CALLS = {
    "depth_read": lambda o: o.depth_read(torch.ones(4), (torch.ones(2, 3, 4), COUNTS)),
    "mix": lambda o: o.mix((COUNTS,), torch.ones(1)),
    "token_mix": lambda o: o.token_mix((COUNTS,), torch.ones(2, 3, 1, 1)),
    "delta_rewrite": lambda o: o.delta_rewrite(COUNTS, torch.ones(2, 3, 4), *torch.ones(2, 2, 3), 1e-5),
    "channel_read": lambda o: o.channel_read(CHANNELS, torch.ones(4, 2)),
    "stream_read": lambda o: o.stream_read(CHANNELS.mT, torch.ones(2, 3, 2)),
    "depthwise_causal_conv": lambda o: o.depthwise_causal_conv(COUNTS, torch.ones(4, 2)),
}


@pytest.mark.parametrize("room", [ops, ops.reference], ids=["fast", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_integers_are_refused(name, room):
    with pytest.raises(InputError, match=r"torch\.int64: give (a )?floating-point dtype"):
        CALLS[name](room)
