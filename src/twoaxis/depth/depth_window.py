"""Depth window: the duality paper's explicit read, attention over the last K block states.

z_l = softmax(q K^T / sqrt(d_k)) V,  q = W_Q h(l),  K = W W_K,  V = W W_V,
W = [h(max(0, l-K+1)) .. h(l)], the current state included                                 (arXiv 2603.16039)

 h(l-K+1) .. h(l-1) ──┐
 h(l) ──┬───── read z_l ── W_O ──┐        one read per block, before its first sublayer;
        └────────────────────────+── block l+1 ── h(l+1)

The paper leaves the injection open: by default z is added to the block's input, skip included. Nothing is
read after the last block, whose state goes to the final norm. The read itself is in `window_read.py`, its
place in the network in `windowed.py`.
"""

from __future__ import annotations

from twoaxis import spec
from twoaxis.depth.depth_window_trace import DepthWindowTrace
from twoaxis.depth.windowed import Windowed, WindowedConfig
from twoaxis.types import Coordinates


@spec.register("depth", "depth_window")
class DepthWindow(Windowed):
    """read: norm(x = h + W_O z(h(l-K+1) .. h(l))) at a block's first sublayer, else norm(x); write: x + y."""

    equation = "x = h(l) + softmax(W_Q h(l) (W W_K)^T / sqrt(d)) W W_V, W the last K block states"
    source = "arXiv 2603.16039"

    class Config(WindowedConfig):
        """The options of `WindowedConfig`."""

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="stream",
                weights="QK",
                normalizer="softmax",
                sharing="network" if self.shared else "per block",
                injection=self.injection,
                reads_per_block=1,
                short_swa=f"yes: window = {self.window_blocks or 'l + 1'} over depth",
            )


DepthWindow.Config.trace = DepthWindowTrace
