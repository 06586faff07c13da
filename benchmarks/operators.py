"""Operators against their plain forms, torch's own kernels and the machine's copy limit.

    python benchmarks/operators.py [--rounds 5] [--only depth window full] [--tokens 2048 8192]
        [--dtype float32] [--json FILE]

One thread. In every round each contender runs once, in turning order, the first one twice (the A/A row); a warm-up
round does not count. Reported: the median over rounds of CPU time, and of its ratio to that of the first contender in
the same round, with the range. glibc is told to keep memory, for all contenders (the script starts itself again with
MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ raised); otherwise page faults of fresh tensors hide the arithmetic.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from twoaxis.ops import choice, depth_read, local_attention

KEEP = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "OMP_NUM_THREADS": "1",
}
Run = Callable[[], object]
Case = tuple[str, dict[str, Run]]  # what is computed, and by whom; the first one is ours


def both(f: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Run:
    """Forward and backward, all gradients."""
    cotangent = torch.randn_like(f(*inputs))
    return lambda: torch.autograd.grad(f(*inputs), inputs, cotangent)


def forward(f: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Run:
    def run() -> None:
        with torch.no_grad():
            f(*inputs)

    return run


def by(backend: str, f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*inputs: Tensor) -> Tensor:
        with choice.requesting(backend):
            return f(*inputs)

    return run


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
        fs = {
            "native": by("native", lambda q, *xs: depth_read(q, xs)),
            "plain": by("plain", lambda q, *xs: depth_read(q, xs)),
            "stacked einsum": stacked,
        }
        copied = torch.randn((n + 1) * 4 * 512 * 512 // 2).to(dtype)  # as many bytes as the read moves
        into = torch.empty_like(copied)
        limit: dict[str, Run] = {"copy limit": lambda into=into, copied=copied: into.copy_(copied)}
        name = f"depth_read, {n} sources of (4, 512, 512)"
        yield f"{name}, forward", {who: forward(f, inputs) for who, f in fs.items()} | limit
        yield f"{name}, forward + backward", {who: both(f, inputs) for who, f in fs.items()}


def attention(B: int, T: int, window: int | None, dtype: torch.dtype) -> Iterator[Case]:
    inputs = tuple(torch.randn(B, T, 8, 64).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3))

    def ours(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v: local_attention(q, k, v, window, backend=backend)

    fs: dict[str, Callable[..., Tensor]] = {name: ours(name) for name in ("native", "blocked")}
    fs["SDPA causal"] = lambda q, k, v: local_attention(q, k, v, None, backend="sdpa")
    if window is not None and importlib.util.find_spec("local_attention"):
        from local_attention import LocalAttention

        for size in (16, 32, 64):  # its windows are whole blocks: as many as reach as far as ours
            peer = LocalAttention(
                window_size=size, look_backward=-(-(window - 1) // size), causal=True, exact_windowsize=True,
                autopad=True, use_rotary_pos_emb=False,
            )  # fmt: skip
            fs[f"local-attention, blocks of {size}"] = lambda q, k, v, peer=peer: peer(q, k, v)
    name = f"{'full causal' if window is None else f'window {window}'}, B={B}, H=8, D=64, T={T}"
    yield f"{name}, forward", {who: forward(f, inputs) for who, f in fs.items()}
    yield f"{name}, forward + backward", {who: both(f, inputs) for who, f in fs.items()}


def cases(only: list[str], tokens: list[int], dtype: torch.dtype) -> Iterator[Case]:
    if "depth" in only:
        yield from depth(dtype)
    if "window" in only:
        for T in tokens:
            yield from attention(1, T, 64, dtype)
    if "full" in only:
        yield from attention(4, 512, None, dtype)


def measure(runs: dict[str, Run], rounds: int) -> dict[str, dict[str, object]]:
    first = next(iter(runs))
    runs = {**runs, f"{first} again": runs[first]}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):  # round 0 warms up
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            start = time.process_time()
            runs[name]()
            if number:
                times[name].append(time.process_time() - start)
    rows = {}
    for name, found in times.items():
        ratios = [a / b for a, b in zip(found, times[first], strict=True)]
        spread = [round(f(ratios), 2) for f in (statistics.median, min, max)]
        rows[name] = {"ms": round(statistics.median(found) * 1e3, 2), f"over {first}": spread}
    return rows


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["depth", "window", "full"])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[2048, 8192], help="lengths of the window's rows"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if any(os.environ.get(k) != v for k, v in KEEP.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = {
        "command": " ".join(["python", "benchmarks/operators.py", *sys.argv[1:]]),
        "processor": processor(), "torch": torch.__version__, "kernels": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg(), "allocator": "keeps memory", "threads": 1, "time": "CPU time of the process",
        "rounds": args.rounds, "dtype": args.dtype, "ratios are": "median, min, max", "cases": {},
    }  # fmt: skip
    for name, runs in cases(args.only, args.tokens, getattr(torch, args.dtype)):
        report["cases"][name] = measure(runs, args.rounds)  # type: ignore[index]
        print(name, json.dumps(report["cases"][name], indent=1), flush=True)  # type: ignore[index]
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
