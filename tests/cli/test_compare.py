"""`longspan compare`: its numbers equal those of the other commands, a second call is free, a failure is a row."""

import json
import random
import re
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.experiments.compare import group
from longspan.experiments.compare.budget import parse_budget
from longspan.experiments.compare.member import Setup, read_recipe
from longspan.experiments.compare.variants import Variant
from longspan.training import run
from longspan.training.loop import Trainer

from .conftest import Cli

pytestmark = pytest.mark.slow

WORDS = ["the", "rain", "fell", "in", "torrents", "and", "a", "dark", "stormy", "night", "was", "over", "London"]
ATTENTION = "heads = 2\ninner = 32\n"
FAMILIES = {"transformer-xl": ATTENTION, "vanilla": ATTENTION, "lstm": "", "universal": ATTENTION}
FAMILIES["bert"] = f"{ATTENTION}positions = 16\nmask = 3\n"
MEMORY = {"transformer-xl": "memory = 16\n"}
FEW = ["--contexts", "2:6:2", "--targets", "8"]


def recipe(path: str, family: str, *, model: str = "", data: str = "", training: str = "", rest: str = "") -> str:
    shape = f'family = "{family}"\nlayers = 1\nwidth = 16\n{FAMILIES[family]}{model}'
    training = f"segment = 16\n{MEMORY.get(family, '')}{training}"
    limits = f"steps = 6\nbatch = 2\n{training}" if "lr" in training else f"steps = 6\nbatch = 2\nlr = 0.01\n{training}"
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(f"[model]\n{shape}\n[data]\n{data}\n[training]\n{limits}\n{rest}")
    return path


@pytest.fixture
def novel(tmp_path: Path) -> Path:
    draw = random.Random(0)
    path = tmp_path / "novel.txt"
    path.write_text("".join(draw.choice(WORDS) + draw.choice([" ", " ", ", ", ".\n"]) for _ in range(4000)))
    return path


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write only the section that the comparison adds: figures take seconds, and one test draws them."""

    def opening_only(*args: Any, opening: Any, **kwargs: Any) -> str:
        return "".join(section.body for section in opening)

    monkeypatch.setattr("longspan.experiments.report.report.build_report", opening_only)


def by_name(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {member["name"]: member for member in facts["members"]}


def write_times(folder: str) -> dict[str, int]:
    """When each file in a folder was written."""
    return {str(path): path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.is_file()}


def test_the_text_of_the_comparison_replaces_that_of_the_recipe(cli: Cli, novel: Path) -> None:
    file = recipe("r.toml", "lstm", data=f'valid = "{novel}"\ntest = "{novel}"')
    setup = Setup(str(novel), parse_budget(""), torch.device("cpu"), torch.float32)
    assert read_recipe(Variant(Path(file), "x", "x"), setup).data.paths == {"corpus": str(novel)}


def test_numbers_equal_those_of_eval_recl_and_the_runs(cli: Cli, novel: Path, no_report: None) -> None:
    group = [
        recipe("xl.toml", "transformer-xl", rest="[evaluation]\nmemory = 64\nsegment = 32\nsame_length = true\n"),
        recipe("van.toml", "vanilla"),
        recipe("lstm.toml", "lstm"),
    ]
    line = ["compare", *group, "--data", novel, "--out", "g", "--budget", "steps=20"]
    line += ["--contexts", "4:24:4", "--targets", 30]
    result = cli(*line, "--json")
    assert result.code == 0, result.err
    members = by_name(result.json)
    flags_of = {"xl": ["--memory", 64, "--segment", 32, "--same-length"], "van": ["--sliding"], "lstm": []}
    for name, flags in flags_of.items():
        scored = cli("eval", f"g/{name}", "--data", novel, "--split", "valid", "--json", *flags).json
        assert members[name]["bits"] == pytest.approx(scored["bits_per_byte"], rel=1e-9)
        assert members[name]["scored"] == scored["scored"]
        lines = [json.loads(row) for row in Path(f"g/{name}/metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in lines] == list(range(1, 21))
        assert members[name]["tokens_per_second"] == statistics.median(row["tokens_per_second"] for row in lines)
        assert members[name]["parameters"] == cli("info", f"g/{name}", "--json").json["parameters"]
        assert members[name]["steps"] == 20
        assert members[name]["peak_memory"] is None or members[name]["peak_memory"] > 50 * 2**20
    wide, far = result.json["contexts"]
    assert (wide["members"], wide["contexts"]) == (["xl", "van", "lstm"], [4, 8, 12, 16])
    assert (far["members"], far["contexts"]) == (["xl", "lstm"], [4, 8, 12, 16, 20, 24])
    assert re.search("window.* 16 ", result.json["notes"][0])
    again = cli("recl", "--losses", f"g/{wide['losses']}", "--json").json
    assert again["recl"]["0.1"] == {name: length["tokens"] for name, length in wide["recl"]["0.1"].items()}
    stored = json.loads(Path("g/compare.json").read_text())["members"]
    for name, member in members.items():
        assert stored[name]["run"] == member["run"]
        assert (member["run"]["seed"], member["run"]["tokens"]) == (1111, 20 * 2 * 16)
    options = ["--data", novel, "--split", "valid", "--targets", 30, "--json", "--contexts"]
    for found, ends in ((wide, 16), (far, 24)):
        lengths = cli("recl", *(f"g/{name}" for name in found["members"]), *options, f"4:{ends}:4").json
        for r in ("0.1", "0.5", "1.0"):
            assert {name: length["tokens"] for name, length in found["recl"][r].items()} == lengths["recl"][r]
    table = cli(*line).out.splitlines()
    assert [text.split()[0] for text in table[:4]] == ["member", "xl", "van", "lstm"]
    assert f"{members['van']['bits']:.4f} per byte" in table[2]
    assert "sliding window of 16" in table[2]
    for member in members.values():
        assert f"<td>{member['bits']:.4f} per byte</td>" in Path("g/report.html").read_text()


def test_facts_of_a_family_are_shown(cli: Cli, novel: Path, no_report: None) -> None:
    line = ["compare", recipe("uni.toml", "universal"), "--data", novel, "--out", "g", *FEW, "--tokens", 0]
    (member,) = cli(*line, "--json").json["members"]
    scored = cli("eval", "g/uni", "--data", novel, "--split", "valid", "--json").json
    assert member["learned"] == {"mean_steps": scored["mean_steps"]}
    remark = f"uni: mean steps {scored['mean_steps']:.2f}"
    assert remark in cli(*line).out.splitlines()
    assert remark in Path("g/report.html").read_text()


def test_a_second_call_trains_scores_and_writes_nothing(
    cli: Cli, novel: Path, no_report: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = [recipe("van.toml", "vanilla"), recipe("lstm.toml", "lstm")]
    line = ["compare", *group, "--data", novel, "--out", "g", *FEW, "--json"]
    first, written = cli(*line), write_times("g")
    for function in ("member.score", "contexts.measure"):
        monkeypatch.setattr(f"longspan.experiments.compare.{function}", None)
    again = cli(*line)
    assert (again.code, again.out) == (0, first.out)
    # Only compare.json may be written again.
    assert {path for path, when in write_times("g").items() if written.get(path) != when} <= {"g/compare.json"}


def test_only_a_new_member_is_trained(cli: Cli, novel: Path, no_report: None) -> None:
    recipe("van.toml", "vanilla")
    recipe("xl.toml", "transformer-xl")
    line = ["--data", novel, "--out", "g", *FEW, "--json", "--budget"]
    alone = by_name(cli("compare", "van.toml", *line, "params=6500").json)["van"]
    written = write_times("g/van")
    none = cli("compare", "xl.toml", *line, "params=6500")
    assert none.code == 2
    failed = by_name(none.json)["xl"]["failed"]
    assert re.search("6,800 parameters, 4.6% more .* 6,500.* 2%", failed)
    assert not Path("g/xl").exists()
    members = by_name(cli("compare", "van.toml", "xl.toml", *line, "params=6.67K").json)
    assert re.search("6,512 parameters, 2.4% fewer", members["van"]["failed"])
    assert members["xl"]["failed"] is None
    assert by_name(cli("compare", "van.toml", *line, "").json)["van"] == alone
    assert write_times("g/van") == written


def test_the_report(cli: Cli, novel: Path) -> None:
    result = cli("compare", recipe("one.toml", "lstm"), "--data", novel, "--out", "g", *FEW)
    assert result.code == 0, result.err
    html = Path("g/report.html").read_text()
    assert html.startswith("<!doctype html>")
    assert "<h2>Comparison</h2>" in html
    assert "<h2>Learning curves</h2>" in html
    assert result.out.endswith("the report is in g/report.html\n")


def test_a_failed_member_is_a_row_and_the_others_are_measured(
    cli: Cli, novel: Path, no_report: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = [
        recipe("typo.toml", "lstm", model="widht = 3\n"),
        recipe("burst.toml", "vanilla", training="lr = 1e38\n"),
        recipe("wide.toml", "lstm"),
        recipe("huge.toml", "lstm"),
        recipe("bug.toml", "lstm"),
        recipe("masked.toml", "bert"),
        recipe("good.toml", "lstm"),
    ]
    Path("wide.toml").write_text(Path("wide.toml").read_text().replace("batch = 2", "batch = 50000"))
    train = run.train

    def failing(chosen: Any, out: Path, **settings: Any) -> Any:
        if out.name == "huge":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 PiB.\nMore lines.")
        if out.name == "bug":
            raise RuntimeError("shapes do not fit\nMore lines.")
        return train(chosen, out, **settings)

    monkeypatch.setattr(run, "train", failing)
    line = ["compare", *group, "--data", novel, "--out", "g", *FEW]
    result = cli(*line, "--json")
    assert result.code == 0, result.err
    members = by_name(result.json)
    reasons = {"typo": "'model.width'", "burst": "not finite", "wide": "batch of 50000", "masked": "next token"}
    reasons |= {
        "huge": "out of memory on cpu in training; lower training.batch",
        "bug": "RuntimeError: shapes do not fit",
    }
    assert "Traceback" in result.err, "a bug needs its traceback"
    for name, reason in reasons.items():
        assert reason in members[name]["failed"]
        assert members[name]["bits"] is None
        assert f"<td>{name}</td><td>failed</td>" in Path("g/report.html").read_text()
    stored = json.loads(Path("g/compare.json").read_text())["members"]
    assert {name: entry["failed"] for name, entry in stored.items() if "failed" in entry} == {
        name: members[name]["failed"] for name in ("burst", "wide", "huge", "bug")
    }
    monkeypatch.setattr(run, "train", train)
    cli("compare", "bug.toml", *line[len(group) + 1 :])
    assert "failed" not in json.loads(Path("g/compare.json").read_text())["members"]["bug"]
    table = cli("compare", "typo.toml", "good.toml", *line[len(group) + 1 :]).out.splitlines()
    assert re.match("typo    failed: typo.toml, line 5: .*'model.widht'", table[1])
    assert table[2].startswith("good ")
    assert members["good"]["failed"] is None
    assert members["good"]["bits"] > 0
    none = cli("compare", "typo.toml", "--data", novel, "--out", "n", "--json")
    assert none.code == 2
    assert none.json["members"][0]["failed"]
    assert none.json["report"] is None
    assert re.match("longspan: 1 recipe failed.* typo.toml, line", none.err.splitlines()[-1])
    assert cli("compare", "good.toml", "--data", "nowhere.txt", "--out", "n").code == 2


def test_a_stopped_comparison_is_resumed(
    cli: Cli, novel: Path, no_report: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = [recipe("one.toml", "lstm"), recipe("two.toml", "vanilla")]
    line = ["compare", *group, "--budget", "steps=8", "--data", novel, "--out", "g", "--targets", 8, "--seed", 3]
    take_step = Trainer.take_step

    def stopped(trainer: Trainer) -> None:
        take_step(trainer)
        if trainer.step == 5 and trainer.recipe.family == "vanilla":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "take_step", stopped)
    result = cli(*line)
    assert result.code == 130
    assert "stopped by SIGINT after step 5 of two" in result.err
    command = f"longspan compare one.toml two.toml --budget steps=8 --data {novel} --out g --targets 8 --seed 3"
    assert f": {command}\n" in result.err
    first = write_times("g/one")
    monkeypatch.setattr(Trainer, "take_step", take_step)
    assert cli(*line).code == 0
    assert write_times("g/one") == first
    rows = [json.loads(row) for row in Path("g/two/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    cli(*line[:4], "steps=9", *line[5:]).refused("g has", "steps=8", "steps=9")
    assert "seed = 3" in Path("g/two/recipe.toml").read_text()


def test_seconds_replace_the_limit_of_the_recipe(cli: Cli, novel: Path, no_report: None) -> None:
    recipe("one.toml", "lstm")
    result = cli("compare", "one.toml", "--budget", "seconds=1", "--data", novel, "--out", "g", *FEW, "--json")
    assert result.json["members"][0]["steps"] > 6
    last = json.loads(Path("g/one/metrics.jsonl").read_text().splitlines()[-1])
    assert 0.9 < last["seconds"] < 3


def test_names_are_unique_and_stay(cli: Cli, novel: Path, no_report: None) -> None:
    recipe("a/small.toml", "lstm")
    recipe("b/small.toml", "vanilla")
    recipe("c/small.toml", "lstm", data='tokenizer = "characters"\n')
    line = ["--data", novel, "--out", "g", "--budget", "steps=2", *FEW, "--json"]
    assert list(by_name(cli("compare", "a/small.toml", *line).json)) == ["small"]
    facts = cli("compare", "a/small.toml", "b/small.toml", "c/small.toml", *line).json
    families = {name: member["family"] for name, member in by_name(facts).items()}
    assert families == {"small": "lstm", "b-small": "vanilla", "c-small": "lstm"}
    # Characters and bytes are different tokens, although every character is one byte here.
    assert by_name(facts)["c-small"]["unit"] == "character"
    assert re.search("small, b-small; c-small", facts["notes"][0])
    # The window covers all contexts, so the LSTM is not measured again on its own.
    assert [group["members"] for group in facts["contexts"]] == [["small", "b-small"], ["c-small"]]
    other = cli("compare", "a/small.toml", "b/small.toml", "--data", novel, "--out", "h", *line[4:]).json
    assert list(by_name(other)) == ["a-small", "b-small"]


def test_wrong_use_is_one_sentence_and_creates_nothing(cli: Cli, novel: Path) -> None:
    one = recipe("one.toml", "lstm")
    good = ["compare", one, "--data", novel, "--out", "g"]
    cli(*good, "--budget", "params=41M,steps=5,seconds=5").refused("seconds=5", "both steps and seconds")
    cli(*good, "--budget", "tokens=5").refused("'tokens'", "params=41M")
    cli(*good, "--budget", "steps=none").refused("'steps=none'")
    cli(*good, "--tokens", 1).refused("--tokens 1")
    cli(*good, "--targets", -1).refused("--targets -1")
    cli(*good, "--parallel", 0).refused("--parallel 0")
    cli(*good, "--each", "model").refused("'model'")
    cli(*good, "--contexts", "5").refused("at least two")
    cli(*good, "--device", "cuda").refused("cuda")
    cli("compare", one, "./one.toml", *good[2:]).refused("./one.toml", "twice")
    cli("compare", "tiny", "tinny", *good[2:]).refused("'tinny'", "'tiny'")
    cli("compare", one, "--data", novel, "--out", one).refused(f"{one} is a file")
    cli("compare", one, "--data", novel).refused("--out")
    cli("compare", one, "--out", "g").refused("--data")
    cli("compare", "--data", novel, "--out", "g").refused("RECIPE")
    assert not Path("g").exists()
    Path("full").mkdir()
    Path("full/letter.txt").write_text("text")
    cli(*good[:-1], "full").refused("full is not empty", "compare.json")
    Path("full/compare.json").write_text("[]")
    cli(*good[:-1], "full").refused("full/compare.json")


def test_seeds_and_a_grid(cli: Cli, novel: Path, no_report: None) -> None:
    file = recipe("r.toml", "lstm")
    grid = ["--seeds", 2, "--grid", "training.lr=0.01,0.03", "--set", "model.width=8", *FEW]
    found = cli("compare", file, "--data", novel, "--out", "g", *grid, "--json")
    assert found.code == 0, found.err
    rates = {"0.01": 0.01, "0.03": 0.03}
    names = {f"r--training.lr={rate}--seed-{seed}": (rates[rate], seed) for rate in rates for seed in (1, 2)}
    members = by_name(found.json)
    assert set(members) == set(names)
    for name, (rate, seed) in names.items():
        trained: Any = run.resolve(Path("g") / name / "recipe.toml")
        assert (trained.training.lr, trained.training.seed, trained.model.width) == (rate, seed, 8)
    for one, rate in zip(found.json["seeds"], rates, strict=True):
        bits = [members[f"r--training.lr={rate}--seed-{seed}"]["bits"] for seed in (1, 2)]
        assert one["group"] == f"r training.lr={rate}"
        assert (one["seeds"], one["bits"], one["deviation"]) == (
            2, pytest.approx(statistics.mean(bits)), pytest.approx(abs(bits[0] - bits[1]) / 2**0.5)
        )  # fmt: skip
    before = write_times("g")
    again = cli("compare", file, "--data", novel, "--out", "g", *grid)
    assert "standard deviation" in again.out
    assert {path for path, time in write_times("g").items() if before[path] != time} <= {"g/compare.json"}
    cli("compare", file, "--data", novel, "--out", "h", "--seeds", 0).refused("--seeds 0")
    cli("compare", file, "--data", novel, "--out", "h", "--grid", "lr").refused("'lr'")


def test_side_by_side_gives_the_same_numbers(cli: Cli, novel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the processes are run here: starting a process takes seconds."""
    commands: dict[str, Any] = {}

    def in_process(
        given: dict[str, list[str]], at_once: int, folder: Path, log: Any, environment: dict[str, str]
    ) -> None:
        assert (at_once, folder.name) == (2, "logs")
        commands.update(given)
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["longspan", "train", "--recipe", "logs/one.toml"])
            for command in given.values():
                assert cli(*command[command.index("train") :]).code == 0

    monkeypatch.setattr(group, "run_side_by_side", in_process)
    one = recipe("one.toml", "lstm")
    line = ["compare", one, "--data", novel, "--each", "training.lr=0.03", "--targets", 0, "--no-report", "--json"]
    monkeypatch.setattr(sys, "argv", ["longspan", *map(str, line), "--out", "g"])
    alone, together = cli(*line, "--out", "g").json, cli(*line, "--out", "h", "--parallel", 2).json
    assert list(commands) == list(by_name(together)) == ["one", "one--training.lr=0.03"]
    for name, row in by_name(alone).items():
        assert by_name(together)[name]["bits"] == row["bits"]
        assert by_name(together)[name]["run"]["command"] == row["run"]["command"]
        assert row["run"]["command"].startswith("longspan compare one.toml --data ")
    assert alone["contexts"] == together["contexts"] == []
    assert alone["report"] is None
    assert not Path("g/report.html").exists()
    assert by_name(alone)["one"]["bits"] != by_name(alone)["one--training.lr=0.03"]["bits"]
    commands.clear()
    again = cli(*(word for word in line if word != "--json"), "--out", "h", "--parallel", 2)
    assert (again.code, "peak memory: " in again.out, commands) == (0, False, {})
