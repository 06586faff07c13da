"""What `operators.py` compares: our operators, their plain paths, public packages where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from packages import attn_res, hyper_connections, installed, local
from torch import Tensor, nn

from twoaxis import Context
from twoaxis.depth import build
from twoaxis.ops import choice, depth_read, depthwise_causal_conv, known_sums, local_attention, mix, pulled
from twoaxis.ops.native import depth_pull, known_read
from twoaxis.ops.owed import Sums
from twoaxis.ops.token_read import Options

Run = Callable[[], object]
Case = tuple[
    str, dict[str, Run | None]
]  # what is computed, and by whom; the first one is ours, None is not installed


def both(f: Callable[..., Tensor] | None, inputs: tuple[Tensor, ...]) -> Run | None:
    """Forward and backward, all gradients, both by the backend that `f` names."""
    if f is None:
        return None
    cotangent = torch.randn_like(f(*inputs))

    def run() -> None:
        with choice.requesting(f.backend if isinstance(f, By) else choice.requested()):
            torch.autograd.grad(f(*inputs), inputs, cotangent)

    return run


def forward(f: Callable[..., Tensor] | None, inputs: tuple[Tensor, ...]) -> Run | None:
    if f is None:
        return None

    def run() -> None:
        with torch.no_grad():
            f(*inputs)

    return run


@dataclass(frozen=True)
class By:
    """A function under a backend."""

    backend: str
    f: Callable[..., Tensor]

    def __call__(self, *inputs: Tensor) -> Tensor:
        with choice.requesting(self.backend):
            return self.f(*inputs)


def two(f: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor] | None]:
    return {"native": By("native", f), "plain": By("plain", f)}


def copying(tensors: float, like: Tensor) -> dict[str, Run]:
    """A copy that moves as many bytes as so many tensors have: the machine's limit."""
    copied = torch.randn(int(tensors * like.numel() / 2)).to(like.dtype)
    into = torch.empty_like(copied)
    return {"copy limit": lambda: into.copy_(copied)}


def stacked(query: Tensor, *sources: Tensor) -> Tensor:
    """The read as public code writes it."""
    v = torch.stack(sources)
    key = v * v.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt().to(v.dtype)
    a = torch.einsum("d,nbtd->nbt", query, key).softmax(0)
    return torch.einsum("nbt,nbtd->btd", a, v)


def depth(dtype: torch.dtype) -> Iterator[Case]:
    for n in (13, 25):
        sources = tuple(torch.randn(4, 512, 512).to(dtype).requires_grad_() for _ in range(n))
        inputs = (torch.randn(512).to(dtype).requires_grad_(), *sources)
        compiled = torch.compile(stacked, dynamic=False)
        fs = {
            **two(lambda q, *xs: depth_read(q, xs)),
            "stacked einsum": stacked,
            "stacked einsum, torch.compile": compiled,
        }
        fs["attn-res"] = attn_res(dtype) if installed("attn_res") else None
        name = f"depth_read, {n} sources of (4, 512, 512)"
        yield f"{name}, forward", {w: forward(f, inputs) for w, f in fs.items()} | copying(n + 1, sources[0])
        yield f"{name}, forward + backward", {who: both(f, inputs) for who, f in fs.items()}
        yield from pull(n, sources[0].detach().flatten(0, 1))


def pull(n: int, x: Tensor) -> Iterator[Case]:
    """One source's gradient from n reads."""
    maps = [(torch.randn(n, len(x), 1), torch.randn(n, len(x), 1), torch.randn(n, len(x))) for _ in range(n)]
    left = [
        (pulled.Left(torch.randn(x.shape), *m, torch.randn(1, x.shape[1])), i) for i, m in enumerate(maps)
    ]
    runs: dict[str, Run] = {"plain": lambda: pulled.gathered(x, left)}
    library = choice.library("depth_pull")
    if library is not None:
        runs = {"native": lambda: depth_pull.gathered(library, x, left), **runs}
    limit = copying(n + 2 * x.element_size() / 4, torch.empty(x.shape))
    yield f"a source's gradient from {n} reads, (4, 512, 512)", runs | limit


def known(dtype: torch.dtype) -> Iterator[Case]:
    """Reads by known queries, and the gradient of one source with those of logits, as in the decoder's loop."""
    o, d = Options(1e-6, 1.0, "softmax", 1, 1e-6, False), 512
    library, puller = choice.library("known_read"), choice.library("known_pull")
    for n in (13, 25):
        w, gain, xs = torch.randn(d), torch.rand(d) + 0.5, [torch.randn(2048, d).to(dtype) for _ in range(n)]
        seen = [known_sums.Seen.of(x, 1e-6) for x in xs]
        _, dots, lse, _ = known_sums.read(o, w, gain, seen)
        mean = torch.randn(2048)
        left = [(known_sums.Later(Sums(1), 0, o, w, x, dots, lse, mean), i) for i, x in enumerate(xs)]
        reads: dict[str, Run] = {"plain": partial(known_sums.read, o, w, gain, seen)}
        pulls: dict[str, Run] = {"plain": partial(known_sums.gathered, xs[0], left)}
        if library is not None and puller is not None:
            reads = {"native": partial(known_read.read, library, o, w, gain, seen), **reads}
            pulls = {"native": partial(known_read.gathered, puller, xs[0], left), **pulls}
        yield f"a read by a known query, {n} sources of (4, 512, 512), forward", reads | copying(n + 1, xs[0])
        yield f"a source's gradient from {n} such reads", pulls | copying(n + 2, xs[0])


def streams(dtype: torch.dtype) -> Iterator[Case]:
    """One sublayer of Hyper-Connections around nothing: scores, read, norm, write."""
    _, ((ours,),) = build("hyper_connections(streams=4)", 512, [["mlp"]])
    H = torch.randn(4, 512, 4, 512).to(dtype).requires_grad_()
    inputs = (H, *ours.parameters())
    runs = {
        who: both(f, inputs)
        for who, f in two(lambda H, *rest: ours(H, lambda reads, ctx: reads.x, Context())).items()
    }
    peer = hyper_connections(dtype) if installed("hyper_connections") else None
    runs["hyper-connections"] = None if peer is None else both(*peer)
    yield "a sublayer of hyper_connections, n=4 streams of (4, 512, 512), forward + backward", runs


def sums(dtype: torch.dtype) -> Iterator[Case]:
    sources = tuple(torch.randn(4, 512, 512).to(dtype).requires_grad_() for _ in range(13))
    inputs = (torch.randn(13).requires_grad_(), *sources)
    name, fs = "mix, 13 sources of (4, 512, 512)", two(lambda w, *xs: mix(xs, w))
    yield f"{name}, forward", {w: forward(f, inputs) for w, f in fs.items()} | copying(14, sources[0])
    yield (
        f"{name}, forward + backward",
        {who: both(f, inputs) for who, f in fs.items()} | copying(41, sources[0]),
    )
    x, w = sources[0], torch.randn(512, 4).to(dtype).requires_grad_()
    weight = w.detach().flip(1).unsqueeze(1).requires_grad_()
    name, fs = "causal convolution, kernel 4, (4, 512, 512), forward + backward", two(depthwise_causal_conv)
    runs = {who: both(f, (x, w)) for who, f in fs.items()}
    conv = both(lambda x, w: nn.functional.conv1d(x.mT, w, padding=3, groups=512)[..., :-3].mT, (x, weight))
    yield name, {**runs, "conv1d": conv}


def band(T: int, window: int) -> Tensor:
    """(T, T), true where a query may see a key."""
    i = torch.arange(T)
    return (i[:, None] >= i) & (i[:, None] - i < window)


def flex(T: int, window: int, size: int) -> Callable[..., Tensor]:
    """FlexAttention, compiled, with the block mask in blocks of `size`."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(
        lambda b, h, i, s: (s <= i) & (i - s < window), None, None, T, T, device="cpu", BLOCK_SIZE=size
    )
    attend = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: attend(
        q.detach(), k.detach(), v.detach(), block_mask=mask
    )  # refuses what has gradients


def attention(B: int, T: int, window: int | None, dtype: torch.dtype, peers: bool = True) -> Iterator[Case]:
    inputs = tuple(torch.randn(B, T, 8, 64).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    fs = two(lambda q, k, v: local_attention(q, k, v, window))
    only_forward: dict[str, Callable[..., Tensor]] = {}
    if peers:
        fs["SDPA causal"] = lambda q, k, v: local_attention(q, k, v, None, backend="sdpa")
    if peers and window is not None:
        mask = band(T, window)
        fs["SDPA, band mask"] = lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, mask)
        for size in (16, 32, 64, 128):  # it has no backward on a CPU
            only_forward[f"FlexAttention, compiled, blocks of {size}"] = flex(T, window, size)
        there = installed("local_attention")
        for size in (16, 32, 64):
            fs[f"local-attention, blocks of {size}"] = local(window, size) if there else None
    name = f"{'full causal' if window is None else f'window {window}'}, B={B}, H=8, D=64, T={T}"
    yield f"{name}, forward", {who: forward(f, inputs) for who, f in (fs | only_forward).items()}
    yield f"{name}, forward + backward", {who: both(f, inputs) for who, f in fs.items()}


def limits(dtype: torch.dtype) -> Iterator[Case]:
    """What the machine does: a product of 1024 x 1024 matrices (2.1 GFLOP), a copy of 64 MiB (128 MiB moved)."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    yield "product of 1024 x 1024 matrices, 2.1 GFLOP", {"float32": lambda: a @ b}
    yield "copy of 64 MiB", copying(2, torch.empty(64 * 2**20 // dtype.itemsize, dtype=dtype))


def cases(only: list[str], tokens: list[int], dtype: torch.dtype) -> Iterator[Case]:
    """The cases of the kinds in `only`."""
    if "depth" in only:
        yield from depth(dtype)
        yield from known(dtype)
    elif "known" in only:
        yield from known(dtype)
    if "streams" in only:
        yield from streams(dtype)
    if "sums" in only:
        yield from sums(dtype)
    if "window" in only:
        for T in tokens:
            yield from attention(1, T, 64, dtype)
    if "full" in only:
        yield from attention(4, 512, None, dtype)
    if "linear" in only:
        for power in range(10, 17):
            yield from attention(1, 2**power, 64, dtype, peers=False)
    if "limits" in only:
        yield from limits(dtype)
