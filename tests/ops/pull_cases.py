"""What every kind of work that sources do for operators is held to: `f` in the loop against `exact` outside of it."""

import torch
from agreement import error

from configurations import tokens
from twoaxis import Decoder, ModelConfig

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
USES = {  # losses of sources and outputs, one for each backward pass
    "the end": lambda s, r: [s[-1].sum()],
    "an expanded gradient": lambda s, r: [r[-1].mean() + r[2].sum()],
    "reads alone": lambda s, r: [r[1].square().sum() + r[3].sum()],
    "extra losses on sources": lambda s, r: [s[-1].sum() + s[1].square().sum() + s[3].exp().sum()],
    "part after part": lambda s, r: [s[2].sum(), s[4].square().sum(), r[0].sum(), s[-1].sum()],
    "again and again": lambda s, r: [s[-1].sum()] * 3,
}


def model(depth, dtype, n_blocks=3):
    torch.manual_seed(0)
    cfg = ModelConfig(vocab_size=17, d_model=12, n_blocks=n_blocks, n_heads=2, depth=depth)
    made = Decoder(cfg).to(dtype)
    with torch.no_grad():
        for p in made.parameters():
            p += 0.2 * torch.randn_like(p)
    return made


def close(found, expected, bound):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or error(a, b) <= bound


def both(run, f, exact, use, inputs):
    """The gradients of some of the leaves, by each. run: f -> leaves, sources, outputs."""
    found = []
    for one in (f, exact):
        given, sources, outs = run(one)
        found.append([])
        for loss in use(sources, outs):
            found[-1] += torch.autograd.grad(loss, given[inputs], retain_graph=True, allow_unused=True)
    return found


def agree_with_hooks(run, f, exact, loss=lambda sources, outs: sources[-1].sum()):
    """Hooks on a source and on an output change gradients, others look at them."""
    found = []
    for one in (f, exact):
        given, sources, outs = run(one)
        sources[1].register_hook(lambda g: 3 * g)
        outs[2].register_hook(lambda g: 2 * g)
        sources[2].retain_grad()
        (wanted,) = torch.autograd.grad(loss(sources, outs), sources[3], retain_graph=True)
        loss(sources, outs).backward()
        found.append([wanted, sources[2].grad, *(x.grad for x in given)])
    close(*found, 1e-12)


def agree_after_an_interrupted_pass(run, f, exact, first=lambda given, sources: sources[2]):
    """A first pass asks for `first` alone, so that some nodes do not run; it leaves nothing to the next."""
    found = []
    for one in (f, exact):
        given, sources, _ = run(one)
        torch.autograd.grad(sources[-1].sum(), first(given, sources), retain_graph=True)
        found.append(torch.autograd.grad(sources[-1].sum(), given))
    close(*found, 1e-12)


def agree_in_a_step(depth, dtype, pushed, noted, count):
    """A model's gradients are those of operators that push, and the same to the bit again; `count` are noted."""
    m, x = model(depth, dtype), tokens(2, 7)
    parameters = list(m.parameters())

    def grads():
        return torch.autograd.grad(m.loss(x, x), parameters)

    found = grads()
    assert len(noted) == count
    close(found, pushed(grads), BOUNDS[dtype])
    assert len(noted) == count
    assert all(map(torch.equal, found, grads()))  # the order of sums is fixed
