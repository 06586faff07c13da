"""What operators leave to their sources belongs to one backward pass: others, inside or beside it, have their own."""

import gc
import threading

import pytest
import test_known_gates
import test_pulled
import test_token_mix
import torch
from pull_cases import close

from twoaxis.ops import depth_read, gated_mix, mix, rebuilt, reference, token_mix
from twoaxis.ops.owed import Owed


def mixes(n=4):
    """As the other networks, of mixes by known weights."""
    torch.manual_seed(1)
    leaves = [torch.randn(3, 6).double(), *(torch.randn(i + 1).double() for i in range(n))]

    def run(f=mix):
        given = [x.clone().requires_grad_() for x in leaves]
        with rebuilt.loop(f is mix, weights=lambda: [(w, False) for w in given[1:]]):
            sources = [given[0].tanh()]
            for w in given[1:]:
                sources.append(f(tuple(sources), w).sin())
        return given, sources, []

    return run


NETWORKS = {
    "reads": (test_pulled.network(), depth_read, reference.depth_read),
    "token mixes": (test_token_mix.network(), token_mix, reference.token_mix),
    "known weights": (mixes(), mix, reference.mix),
    "known gates": (test_known_gates.network(), gated_mix, reference.gated_mix),
}
EVERY = pytest.mark.parametrize(("run", "fast", "plain"), NETWORKS.values(), ids=NETWORKS)


def here(work):
    work()


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@EVERY
@pytest.mark.parametrize("start", [here, in_a_thread], ids=["inside", "in a thread"])
def test_a_pass_while_another_is_half_done(run, fast, plain, start):
    found = []
    for f in (fast, plain):
        given, sources, _ = run(f)
        loss, inner = sources[-1].sum(), []

        def again(_, inner=inner, loss=loss, given=given):
            if not inner:
                inner.append(None)
                start(lambda: inner.extend(torch.autograd.grad(loss, given, retain_graph=True)))

        sources[2].register_hook(again)
        outer = torch.autograd.grad(loss, given, retain_graph=True)
        found.append([*outer, *inner[1:]])
    close(*found, 1e-12)
    assert len(found[0]) == 2 * len(outer)


@EVERY
def test_a_pass_takes_what_nobody_asked_for_with_it(run, fast, plain):
    """Passes through a part of the network, finished or not, hold nothing, however many there are."""

    class StoppedError(Exception):
        pass

    def stop(_):
        raise StoppedError

    given, sources, _ = run(fast)
    for _ in range(2):
        torch.autograd.grad(sources[-1].sum(), given[-1], retain_graph=True)
    sources[1].register_hook(stop)
    with pytest.raises(StoppedError):
        torch.autograd.grad(sources[-1].sum(), given[0], retain_graph=True)
    assert not any(issubclass(type(x), Owed) for x in gc.get_objects())
    assert given
