"""The decision: what is taken for a machine, load and layout, and why what comes before it is not."""

import dataclasses
import json

import pytest

from twoaxis.cost.advice import Request
from twoaxis.cost.advise import advise, plain
from twoaxis.cost.fork import candidates
from twoaxis.cost.hardware import hardware
from twoaxis.cost.load import Load
from twoaxis.cost.mesh import Mesh
from twoaxis.cost.rows import Point
from twoaxis.cost.sizes import size
from twoaxis.errors import InputError

SWA = ("short_swa(window=64)",)
SCENES = {
    "decode": ("llama-1b", "rtx4090", "", Load(seq_len=128, decoding=True, execution="eager")),
    "pipeline": ("llama-70b", "h100", "dp=8,tp=8,pp=8", Load(seq_len=8192, micro_batches=16)),
    "long": ("llama-8b", "h100", "tp=8,cp=8", Load(seq_len=131072)),
    "cpu": (
        "tiny",
        "cpu",
        "",
        Load(batch_size=4, seq_len=256, dtype="float32", execution="eager", micro_batches=1),
    ),
}


def request(scene, goal="any", **changes):
    model, machine, mesh, load = SCENES[scene]
    made = Request(size=size(model), machine=hardware(machine), mesh=Mesh.parse(mesh), load=load, goal=goal)
    return dataclasses.replace(made, **changes)


@pytest.fixture(scope="module")
def decided():
    goals = ("any", "local-mixing", "depth-retrieval")
    return {scene: {goal: advise(request(scene, goal), table=False) for goal in goals} for scene in SCENES}


def test_advice_differs_between_machines_loads_and_layouts(decided):
    choices = {s: tuple(a.choice.point for a in of.values()) for s, of in decided.items()}
    assert len(set(choices.values())) == len(SCENES), choices
    reasons = {s: tuple(a.reasons for a in of.values()) for s, of in decided.items()}
    assert len(set(reasons.values())) == len(SCENES)


def test_short_decoding_on_one_small_gpu_has_no_room_for_launches(decided):
    found = decided["decode"]
    assert ("ddl", "price", "launches") in found["any"].reasons
    assert ("short_swa(window=64)", "window", "") in found[
        "local-mixing"
    ].reasons  # sees most of 128 tokens anyway
    assert found["local-mixing"].choice.point == Point()
    assert ("attnres", "price", "launches") in found["depth-retrieval"].reasons
    assert all(a.choice.overhead <= a.request.budget for a in found.values())


def test_eight_pipeline_stages_turn_the_full_read_into_block_sums_for_what_they_send(decided):
    found = decided["pipeline"]["depth-retrieval"]
    assert ("attnres", "price", "sending") in found.reasons
    assert found.choice.point == Point("attnres(block_sublayers=6)")
    full = found.trials[0].row
    assert full.step.sent_bytes > 4 * found.choice.step.sent_bytes
    assert decided["pipeline"]["any"].choice.point == Point("ddl")  # one stream, nothing kept


def test_long_context_takes_the_local_window_and_the_full_read(decided):
    found = decided["long"]
    assert found["any"].choice.point == Point("ddl", SWA)
    assert found["local-mixing"].choice.point == Point("additive", SWA)
    assert not found["local-mixing"].reasons  # the paper's first choice, unopposed
    assert found["depth-retrieval"].choice.point == Point("attnres")


def test_a_cpu_has_no_room_for_more_products_and_launches(decided):
    one = dataclasses.replace(SCENES["cpu"][3], batch_size=1)
    small = advise(request("cpu", "shortcut", load=one), table=False)
    assert ("ddl", "price", "launches") in small.reasons  # they hide behind nothing there
    found = decided["cpu"]["local-mixing"]
    assert (found.trials[0].row.point.name, "price", "arithmetic") in found.reasons
    assert found.choice.point.before in (("short_conv",), ("token_shift",))


def test_the_papers_first_choice_stands_where_the_budget_allows_it():
    advice = advise(request("cpu", budget=50.0), table=False)
    assert advice.choice.point == candidates("any", 64)[0] == Point("ddl", SWA)


def test_what_does_not_fit_is_not_taken():
    tight = dataclasses.replace(hardware("cpu"), memory_gb=1e-6)
    advice = advise(request("cpu", "shortcut", machine=tight, budget=50.0), table=False)
    assert {kind for _, kind, _ in advice.reasons} == {"memory"}
    assert advice.choice.point == Point()
    assert any("does not fit" in note for note in advice.notes)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"window": 512}, "window=512 is larger than the context of 256 tokens"),
        ({"window": 0}, "allowed is an integer of 1 or more"),
        ({"goal": "quality"}, "did you mean 'best-quality'"),
        ({"budget": 0.0}, "allowed is a share above 0"),
        ({"mesh": Mesh(pp=4)}, "pp=4 does not divide n_blocks=6; the nearest is pp=3"),
    ],
    ids=["window", "no-window", "goal", "budget", "mesh"],
)
def test_impossible_requests_get_one_line(changes, line):
    with pytest.raises(InputError, match=line) as caught:
        request("cpu", **changes)
    assert "\n" not in str(caught.value)


def results(call):
    scores = {"better": 1.9, "worse": 2.1}
    rows = [("additive", "additive", 2.0), ("ddl", "ddl(value_dim=1)", scores[call])]
    return {
        "baseline": "additive",
        "rows": [
            {"name": n, "depth": d, "sequence": ["attention", "mlp"], "valid_bits_per_byte": s}
            for n, d, s in rows
        ],
        "verdicts": [{"row": "ddl", "call": call, "words": f"{call} by 0.1"}],
    }


@pytest.mark.parametrize(("call", "taken"), [("better", "ddl"), ("worse", "hyper_connections")])
def test_own_runs_count(tmp_path, call, taken):
    from twoaxis import parse_spec

    data = results(call)
    data["rows"][1]["depth"] = parse_spec("depth", "ddl").spec()
    (tmp_path / "results.json").write_text(json.dumps(data), encoding="utf-8")
    advice = advise(request("cpu", "shortcut", budget=50.0), runs=tmp_path, table=False)
    assert advice.choice.point == Point(taken)
    assert (("ddl", "own", "") in advice.reasons) == (call == "worse")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", '{"rows": [], "baseline": "x", "verdicts": []}'),
        json.dumps(results("better")).replace("1.9", "NaN"),
    ],
    ids=["none", "empty", "x", "nan"],
)
def test_a_folder_without_results_is_refused_in_one_line(tmp_path, text):
    if text:
        (tmp_path / "results.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="holds no results of a comparison"):
        advise(request("cpu"), runs=tmp_path, table=False)


def test_the_table_has_every_method_the_case_against_and_an_experiment():
    from twoaxis import methods

    advice = advise(request("cpu"))
    data = json.loads(json.dumps(plain(advice), allow_nan=False))
    named = {row["name"] for row in data["rows"]} | {note.split(" is left out")[0] for note in data["notes"]}
    assert set(methods("depth")) <= named
    assert {"ddl + short_swa(window=64)", "canon", "ddl(value_dim=4)"} <= named
    assert data["rows"][0]["name"] == "additive"
    assert data["rows"][0]["overhead"] == 0
    assert data["against"][0]
    assert data["experiment"].startswith("twoaxis compare --depth ")
    assert [step["taken"] for step in data["path"]] == [False] * (len(data["path"]) - 1) + [True]
