"""One-line specs: text -> options -> text, and what is refused."""

import dataclasses
import pickle
import types
import typing

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import twoaxis
from twoaxis import InputError, spec

METHODS = [(axis, name) for axis in ("depth", "sequence") for name in twoaxis.methods(axis)]
CORES = ["attention", "mlp(act='gelu')", "short_swa(window=3, sink=True)", "parallel(mlp, attention)"]


def values(hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values that an option of this type may take."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(a) for a in args])
    if origin is tuple:
        items = st.sampled_from(CORES) if args[0] is str else values(args[0])
        return st.lists(items, min_size=2, max_size=3)
    words = st.sampled_from(["S", "SSSL", "LS"])
    numbers = st.floats(1e-9, 3.0, allow_nan=False)
    return {int: st.integers(1, 9), float: numbers, bool: st.booleans(), str: words}.get(hint, st.none())


@st.composite
def configs(draw: st.DrawFn, axis: str, name: str) -> spec.Config:
    """A method's options, each at its default or not; those that the method refuses are not drawn."""
    cls = twoaxis.methods(axis)[name].Config
    options = {
        field: draw(values(hint))
        for field, hint in typing.get_type_hints(cls).items()
        if field in {f.name for f in dataclasses.fields(cls)} and draw(st.booleans())
    }
    try:
        return cls(**options)
    except InputError:
        assume(False)
        raise AssertionError from None


@pytest.mark.parametrize(("axis", "name"), METHODS)
def test_round_trip(axis, name):
    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.filter_too_much],
    )
    @given(configs(axis, name))
    def check(config):
        text = config.spec()
        again = twoaxis.parse_spec(axis, text)
        assert again == config
        assert again.spec() == text
        assert twoaxis.parse_spec(axis, config) is config

    check()


@pytest.mark.parametrize(("axis", "name"), METHODS)
def test_defaults_are_the_bare_name(axis, name):
    config = twoaxis.parse_spec(axis, name)
    assert (config.axis, config.name, config.spec()) == (axis, name, name)
    assert config == twoaxis.parse_spec(axis, f" {name}() ")


@pytest.mark.parametrize(("axis", "name"), METHODS)
def test_other_processes_may_be_handed_a_config(axis, name):
    config = twoaxis.parse_spec(axis, name)
    assert pickle.loads(pickle.dumps(config)) == config  # as multiprocessing does it, and torch.save(model)


@pytest.mark.parametrize(("axis", "name"), METHODS)
def test_every_method_says_what_it_is(axis, name):
    method = twoaxis.methods(axis)[name]
    assert method.equation
    assert "\n" not in method.equation
    assert method.source
    assert method.__doc__
    assert set(spec.options(method.Config)) == {f.name for f in dataclasses.fields(method.Config)}
    place = method.Config().coordinates()
    assert place.short_swa.split(":")[0] in ("yes", "no", "extended", "as its cores")


@pytest.mark.parametrize(
    ("axis", "text", "message"),
    [
        ("depth", "addtive", "depth method 'addtive' is unknown; did you mean 'additive'? known: additive,"),
        ("sequence", "atention", "sequence method 'atention' is unknown; did you mean 'attention'?"),
        ("sequence", "xyz", "sequence method 'xyz' is unknown; known: "),
        (
            "sequence",
            "attention,mlp",
            "cannot read 'attention,mlp' as one method; give several apart: 'attention' 'mlp'",
        ),
        (
            "sequence",
            "short_swa(windw=8)",
            "short_swa has no option 'windw'; did you mean 'window'? known: n_",
        ),
        ("depth", "additive(x=1)", "additive has no option 'x'; known: none"),
        ("depth", "additive(1)", "options of additive need a name"),
        ("sequence", "mlp(hidden=2.5)", "mlp(hidden=2.5): allowed is int or None"),
        ("sequence", "mlp(hidden=True)", "mlp(hidden=True): allowed is int or None"),
        ("sequence", "mlp(act='relu')", "mlp(act='relu'): allowed is 'swiglu' or 'gelu'"),
        ("sequence", "attention(pattern='SX', window=3)", "allowed is a word of S (short) and"),
        ("sequence", "parallel(attention)", "allowed is two or more cores"),
        ("sequence", "parallel(attention, mpl)", "sequence method 'mpl' is unknown; did you mean 'mlp'?"),
        ("sequence", "parallel(mlp, mlp, cores=['mlp', 'mlp'])", "gives 'cores' twice"),
        ("sequence", "mlp(hidden=8, hidden=16)", "gives 'hidden' twice"),
    ],
)
def test_the_nearest_match_is_named(axis, text, message):
    with pytest.raises(InputError) as caught:
        twoaxis.parse_spec(axis, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("window", ["0", "-1", "2.5", "True", "'4'", "None"])
def test_windows_that_are_no_windows(window):
    # pitfall (Windows and causal masks): w=0, -1, 2.5, True, '4' name the argument before any tensor work
    with pytest.raises(InputError, match="window"):
        twoaxis.parse_spec("sequence", f"short_swa(window={window})")


@pytest.mark.parametrize("window", ["0", "-1", "2.5", "True", "'4'"])
def test_depth_windows_that_are_no_windows(window):
    # pitfall (Windows and causal masks): K=0 likewise
    with pytest.raises(InputError, match="window_blocks"):
        twoaxis.parse_spec("depth", f"depth_window(window_blocks={window})")


@pytest.mark.parametrize(
    "text",
    [
        "mlp(hidden=__import__('os').getpid())",
        "mlp(hidden=open)",
        "mlp(hidden=8*8)",
        "mlp(hidden=f'{1}')",
        "mlp(hidden=(lambda: 8)())",
        "mlp(hidden=[x for x in (8,)][0])",
        "mlp(hidden={**{}})",
        "mlp(hidden=int('8'))",
        "mlp(**{'hidden': 8})",
        "mlp(*[8])",
        "mlp.Config(hidden=8)",
        "mlp(hidden=8)(1)",
        "mlp if True else attention",
        "(mlp, attention)",
        "mlp; attention",
        "mlp\nattention",
        "mlp(hidden:=8)",
        "'mlp'",
        "8",
        "",
        " ",
        "mlp(",
        "mlp)",
        "mlp(hidden=)",
        "mlp(hidden=8",
        "m\0lp",
        "\ud800",
        "attention(qk_norm={[]: 1})",
        "mlp(hidden=0or 1)",
        "mlp(act='\\d')",
    ],
)
def test_values_are_literals_and_never_evaluated(text):
    with pytest.raises(InputError) as caught:
        twoaxis.parse_spec("sequence", text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "mlp(hidden=" + "[" * 900 + "]" * 900 + ")",
        "mlp(hidden=" + "-" * 1900 + "1)",
        "parallel(mlp, " + "-" * 1900 + "mlp)",
        "parallel(mlp, " * 100_000,
    ],
    ids=["brackets", "signs", "signs of a name", "long"],
)
def test_deep_nesting_is_refused(text):
    with pytest.raises(InputError, match=r"(a sequence spec must be|cannot read|not a literal)"):
        twoaxis.parse_spec("sequence", text)


@pytest.mark.parametrize("value", ["1e999", "-1e999", "1" + "0" * 400])
def test_numbers_are_finite(value):
    @twoaxis.register("depth", "probe")
    class Probe(twoaxis.depth.Additive):
        class Config(twoaxis.depth.Additive.Config):
            rate: float = 1.0

    try:
        with pytest.raises(InputError, match=r"probe\(rate=.*\): allowed is a finite number"):
            twoaxis.parse_spec("depth", f"probe(rate={value})")
        assert twoaxis.parse_spec("depth", "probe(rate=2)").rate == 2.0
        assert isinstance(twoaxis.parse_spec("depth", "probe(rate=2)").rate, float)
    finally:
        twoaxis.unregister("depth", "probe")
    with pytest.raises(InputError, match="'probe' is unknown"):
        twoaxis.parse_spec("depth", "probe")


pieces = st.sampled_from(
    [*"()[]{}=,.:'\"\\ -+*@0189eE_xj\n\t#;", "mlp", "act", "hidden", "parallel", "swiglu"]
)
grammar = st.lists(pieces).map("".join)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.one_of(st.text(), grammar, grammar.map(lambda s: f"mlp(hidden={s})")))
def test_no_text_does_more_than_be_refused(text):
    try:
        config = twoaxis.parse_spec("sequence", text)
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert twoaxis.parse_spec("sequence", config.spec()) == config


@pytest.mark.parametrize("thing", [None, 3, b"mlp", ["mlp"], {"mlp": {}}])
def test_only_text_is_a_spec(thing):
    with pytest.raises(InputError, match="must be a line of text"):
        twoaxis.parse_spec("sequence", thing)


def test_a_config_of_the_other_axis_is_refused():
    with pytest.raises(InputError, match="'mlp' is a sequence method, not one of the depth axis"):
        twoaxis.parse_spec("depth", twoaxis.parse_spec("sequence", "mlp"))
    with pytest.raises(InputError, match="axis 'width' is unknown"):
        twoaxis.methods("width")


def test_configs_are_frozen_and_keyword_only():
    config = twoaxis.parse_spec("sequence", "mlp(hidden=8)")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden = 9
    with pytest.raises(TypeError):
        type(config)(8)
    assert {config: 1}[twoaxis.parse_spec("sequence", "mlp(hidden=8)")] == 1
