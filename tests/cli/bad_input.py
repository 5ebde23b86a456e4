"""Inputs that cannot be used, each with what its message must name: the list behind the test and docs/bad-input.md."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from models import character_tokenizer, model_folder, tiny_model

from tepo.config import load_recipe
from tepo.train.run_folder import to_yaml


@dataclass(frozen=True)
class Case:
    """A command and parts of its message. process: run in a process of its own, as a shell would."""

    what: str
    arguments: tuple[str, ...]
    named: tuple[str, ...]
    process: bool = False

    @property
    def needs(self) -> str | None:
        """The package of an extra without which the message is another one."""
        extras = {"gym:": "reasoning_gym", "lora.targets": "peft"}
        return next((package for mark, package in extras.items() if mark in " ".join(self.arguments)), None)

    @property
    def command(self) -> str:
        return " ".join(["tepo", *(f"'{part}'" if set(part) & set(' ()[]{}$*"') else part for part in self.arguments)])


@dataclass(frozen=True)
class Outcome:
    """What a command came to: its exit code, the message after `error:`, and everything it printed."""

    code: int
    message: str
    printed: str


def train(what: str, *arguments: str, named: str | tuple[str, ...], process: bool = False) -> Case:
    return Case(what, ("train", *arguments), (named,) if isinstance(named, str) else named, process)


def data(what: str, file: str, named: str, *arguments: str) -> Case:
    """A data file, which the message must name as well."""
    return train(what, f"data={file}", *arguments, named=(file, named))


def tepo(what: str, *arguments: str, named: str | tuple[str, ...], process: bool = False) -> Case:
    return Case(what, arguments, (named,) if isinstance(named, str) else named, process)


RECIPES = [
    train("unknown key", "trainer.learning_rat=1", named=("unknown key", "trainer.learning_rate")),
    train("key at the wrong place", "steps=4", named="trainer.steps"),
    train("key below a value", "trainer.steps.x=4", named="trainer.steps"),
    train("value for a section", "trainer=5", named="trainer"),
    train("word for a number", "trainer.steps=ten", named=("trainer.steps", "ten")),
    train("fraction for a count", "trainer.steps=1.5", named=("trainer.steps", "1.5")),
    train("nothing to do", "trainer.steps=0", named="trainer.steps"),
    train("no value for a count", "trainer.steps=", named="trainer.steps"),
    train("negative rate", "trainer.learning_rate=-1", named="trainer.learning_rate"),
    train("rate that is not a number", "trainer.learning_rate=.nan", named="trainer.learning_rate"),
    train("infinite rate", "trainer.learning_rate=.inf", named="trainer.learning_rate"),
    train("reward that is not a number", "reward.correct=.nan", named="reward.correct"),
    train("one beta", "trainer.betas=[0.9]", named="trainer.betas"),
    train("beta out of range", "trainer.betas=[0.9,1.5]", named=("trainer.betas", "1.5")),
    train("negative seed", "seed=-1", named="seed"),
    train("seed too large", "seed=4294967296", named="seed"),
    train("unknown precision", "model.dtype=fp8", named=("model.dtype", "bf16")),
    train("unknown objective", "objective=grop", named=("grop", "grpo")),
    train("unknown option of an objective", "objective.clip_lo=3", named=("clip_lo", "clip_low")),
    train(
        "option that an objective has no use for",
        "objective=grpo",
        "objective.length_normalizer=4",
        named="length_normalizer",
    ),
    train("option out of range", "objective.clip_low=1.5", named=("clip_low", "1.5")),
    train("unknown choice", "objective.kl_mask.target=future", named=("kl_mask.target", "future")),
    train("truth value for a coefficient", "objective.kl_mask=true", named="kl_mask.beta"),
    train("truncated sampling in training", "rollout.top_p=0.9", named="rollout.top_p"),
    train("greedy training", "rollout.temperature=0", named="rollout.temperature"),
    train(
        "prompts that cannot be shared out",
        "trainer.prompts_per_rollout=6",
        "trainer.updates_per_rollout=4",
        named=("prompts_per_rollout (6)", "updates_per_rollout (4)"),
    ),
    train("group of one", "trainer.responses_per_prompt=1", named="trainer.responses_per_prompt"),
    train(
        "two treatments of truncation",
        "trainer.overlong_filtering=true",
        "reward.overlong.cache=5",
        named=("overlong_filtering", "reward.overlong"),
    ),
    train(
        "truncation left out and punished",
        "trainer.overlong_filtering=true",
        "reward.missing_end=-1",
        named=("overlong_filtering", "reward.missing_end"),
    ),
    train("empty stop string", 'rollout.stop=[""]', named="rollout.stop"),
    train("word for a list", "rollout.stop=END", named="rollout.stop"),
    train("cache too small for one response", "rollout.cache_tokens=10", named="rollout.cache_tokens"),
    train("response longer than the context", "rollout.max_response_tokens=100000", named="max_response_tokens"),
    train("unknown engine", "rollout.engine=sglang", named=("rollout.engine", "vllm")),
    train("unknown tracker", "trackers=[mlfow]", named=("trackers", "wandb")),
    train("no judges", "reward.workers=0", named="reward.workers"),
    train("judges in words", "reward.workers=many", named="reward.workers"),
    train("no time to judge", "reward.timeout=0", named="reward.timeout"),
    train("pattern that is none", "reward.format.pattern=(", named="reward.format.pattern"),
    train(
        "punishment from below 0 tokens",
        "reward.overlong.cache=9",
        "reward.overlong.max_length=5",
        named="reward.overlong.cache",
    ),
    train("verifier without a module", "reward.verifier=nowhere:judge", named="nowhere"),
    train("verifier without a function", "reward.verifier=own:judge", named="judge"),
    train("verifier that is none", "reward.verifier=own:NUMBER", named="NUMBER"),
    train("unknown verifier", "reward.verifier=maths", named=("reward.verifier", "math")),
    train("verifier of another task", "reward.verifier=gym", named="reward.verifier"),
    train(
        "process rewards from nowhere",
        "objective=prpo",
        "reward.process=nowhere:score",
        named="nowhere",
    ),
    train("process rewards that nobody reads", "reward.process=own:score", named="reward.process"),
    train("module that is not there", "objective=onw:OBJECTIVE", named=("onw", "did you mean 'own'")),
    train("attribute that is not there", "objective=own:OBJECTIVE", named="OBJECTIVE"),
    train("attribute that is no objective", "objective=own:NUMBER", named="int"),
    train("module that fails", "objective=failing:OBJECTIVE", named="ZeroDivisionError"),
    train("two attributes of a module", "objective=own:a:b", named="module:attribute"),
    train("not key=value", "trainer.steps", named=("trainer.steps", "key=value")),
    train("key alone missing", "=3", named="key=value"),
    train("space in a key", "trainer. steps=3", named="trainer. steps"),
    train("broken YAML in a value", "trainer.betas=[0.9", named="trainer.betas"),
    train("reference to nothing", "trainer.steps=${nothing}", named="nothing"),
    train("recipe that is not there", "--config", "nothing.yaml", named="nothing.yaml"),
    train("recipe of no such name", "--config", "arithmetc", named="did you mean arithmetic"),
    train("recipe that is a folder", "--config", "folder", named="folder"),
    train("recipe that is a folder called .yaml", "--config", "folder.yaml", named="folder.yaml"),
    train("broken YAML", "--config", "broken.yaml", named="broken.yaml"),
    train("tabs in YAML", "--config", "tabs.yaml", named="tabs.yaml"),
    train("key twice", "--config", "twice.yaml", named=("twice.yaml", "seed")),
    train("recipe that is not UTF-8", "--config", "latin.yaml", named=("latin.yaml", "UTF-8")),
    train("recipe that is a list", "--config", "list.yaml", named="list.yaml"),
    train("recipe that is a word", "--config", "word.yaml", named="word.yaml"),
    train("recipe with a number for a key", "--config", "number.yaml", named="3"),
]

DATA = [
    train("task of no such name", "data=arithmetik", named="arithmetic"),
    train("file that is not there", "data=nothing.jsonl", named="nothing.jsonl"),
    train("folder in place of a file", "data=folder.jsonl", named=("folder.jsonl", "is a folder")),
    train("file of another kind", "data.name=gsm8k", "data.file=rows.csv", named=("rows.csv", ".jsonl")),
    train("pattern that matches nothing", "data=part-*.jsonl", named="part-*.jsonl"),
    data("empty file", "empty.jsonl", "no rows"),
    data("broken line", "broken.jsonl", "line 2"),
    data("line that is no object", "words.jsonl", "line 2"),
    data("JSON that is no list", "object.json", "dict"),
    data("broken JSON", "broken.json", "line 2"),
    data("JSON nested too deeply", "deep.json", "nested"),
    data("file that is not UTF-8", "latin.jsonl", "line 1"),
    data("file in UTF-16", "utf16.jsonl", "UTF-8"),
    data("control character within a line", "control.jsonl", "line 1"),
    data("half a character", "surrogate.jsonl", "line 2"),
    data("half a character in an answer", "surrogate_answer.jsonl", "line 1"),
    data("not Parquet", "broken.parquet", "broken.parquet"),
    data("no problem column", "columns.jsonl", "problem"),
    data("column of no such name", "good.jsonl", "questoin", "data.columns.problem=questoin"),
    data("no answer", "no_answer.jsonl", "line 2"),
    data("null for an answer", "null_answer.jsonl", "line 1"),
    data("empty answer", "empty_answer.jsonl", "line 1"),
    data("truth value for an answer", "true_answer.jsonl", "line 1"),
    data("object for an answer", "object_answer.jsonl", "line 1"),
    data("answer that is not a number", "nan_answer.jsonl", "line 1"),
    data("number for a problem", "number_problem.jsonl", "line 1"),
    data("empty problem", "empty_problem.jsonl", "line 1"),
    data("message without a role", "message.jsonl", "role"),
    data("no messages", "no_messages.jsonl", "line 1"),
    data("same id twice", "same_id.jsonl", "line 2", "data.columns.id=id"),
    data("object for an id", "object_id.jsonl", "line 1", "data.columns.id=id"),
    data("one problem", "one.jsonl", "held out"),
    data("no answer that can be read", "unreadable.jsonl", "reward.verifier", "reward.verifier=integer"),
    train(
        "only held-out problems",
        "data=good.jsonl",
        "data.test_file=good.jsonl",
        named="held-out",
    ),
    train("all prompts too long", "data.max_prompt_tokens=2", named="data.max_prompt_tokens"),
    train("template without a place", "data.template=Question", named=("data.template", "{problem}")),
    train("chat without a chat template", "data.template=chat", named="chat template"),
    train("system message without a chat template", "data.system=Think", named="data.system"),
    train("file for a task that is made", "data.file=good.jsonl", named="data.file"),
    train("file twice", "data=good.jsonl", "data.file=good.jsonl", named="data.file"),
    train("option of no task", "data.options.digit=3", named="data.options.digit"),
    train("option out of range", "data.options.digits=0", named="digits"),
    train("word for an option", "data.options.digits=three", named="digits"),
    train("options for a file", "data.name=good.jsonl", "data.options.digits=3", named="data.options"),
    train("more problems than there are", "data.max_problems=100000000", "data.options.digits=1", named="digits"),
    train("split of a preset", "data.name=gsm8k", "data.split=all", named="data.split"),
    train("benchmark to train on", "data=aime24", named="aime24"),
    train("task of reasoning-gym that is not there", "data=gym:chain_sums", named="chain_sum"),
    train("option of reasoning-gym that is not there", "data.name=gym:chain_sum", "data.options.x=1", named="x"),
    train("data set of the hub without a network", "data=nobody/nothing", named="nobody/nothing", process=True),
]

MODELS = [
    train("model that is not there", "model=./no/such/model", named="./no/such/model"),
    train("folder without a model", "model=./folder", named="config.json"),
    train("file for a model", "model=./good.jsonl", named="./good.jsonl"),
    train("model of the hub without a network", "model=nobody/nothing", named="nobody/nothing", process=True),
    train("broken configuration", "model=./broken_config", named="./broken_config"),
    train("weights cut off", "model=./cut_weights", named="./cut_weights"),
    train("weights that are missing", "model=./no_weights", named="./no_weights"),
    train("a layer's weights missing", "model=./few_weights", named="./few_weights"),
    train("no tokenizer", "model=./no_tokenizer", named="./no_tokenizer"),
    train("no end token", "model=./no_end", named="eos_token_id"),
    train("tokens that the model does not have", "model=./small_vocabulary", named="vocabulary"),
    train("not a causal language model", "model=./encoder", named="./encoder"),
    train("device of no such kind", "model.device=tpu9", named="tpu9"),
    train("layers that cannot be adapted", "model.lora.targets=[nothing]", named="model.lora.targets"),
    train("adapter of rank 0", "model.lora.rank=0", named="model.lora.rank"),
]

OUTPUT = [
    train("run folder that is a file", "output=file", named="file"),
    train("run folder below a file", "output=file/run", named="file/run"),
    train("folder that nobody can make", "output=/proc/run", named="/proc/run"),
    train("folder that holds a run", "output=run", named="--resume"),
    train("nothing to resume", "--resume", "output=folder", named=("folder", "holds no run")),
    train("resume from no run", "--resume", "output=nowhere", named="nowhere"),
    train("resume of a folder that is not there", "--resume", "nowhere", named="nowhere"),
    train("resume of a folder without a run", "--resume", "folder", named="holds no run"),
    train("resume of two folders", "--resume", "folder", "run", named="takes one folder"),
    train(
        "resume under another recipe", "--resume", "output=run", "seed=3", named=("differs in", "seed: 0 then, 3 now")
    ),
    train("changes without a run", "--allow-changes", named="--resume"),
    train("folder in use by another run", "output=busy", named=("busy", "in use", "process 1")),
    train("empty name", "output=", named="output"),
]

EVALUATIONS = [
    tepo("no model", "eval", named="MODEL"),
    tepo("model that is not there", "eval", "./no/such/model", named="./no/such/model"),
    tepo("data of no such name", "eval", "embedded", "--data", "aime42", named="aime42"),
    tepo("data twice", "eval", "embedded", "--data", "aime24,aime24", named="aime24"),
    tepo("data in no file", "eval", "embedded", "--data", "gsm8k=nothing.jsonl", named="nothing.jsonl"),
    tepo("no samples", "eval", "embedded", "-k", "0", named="samples"),
    tepo("samples in words", "eval", "embedded", "-k", "many", named="--samples"),
    tepo("negative temperature", "eval", "embedded", "-t", "-1", named="temperature"),
    tepo("several greedy samples", "eval", "embedded", "-k", "4", "-t", "0", named="greedy"),
    tepo("output that is a file", "eval", "embedded", "-o", "file", named="file"),
    tepo("output of something else", "eval", "embedded", "-o", "other", named="other"),
    tepo("output with broken settings", "eval", "embedded", "-o", "broken_eval", named="settings.json"),
    tepo("unknown key", "eval", "embedded", "rollout.max_tokens=4", named="rollout.max_tokens"),
    tepo("comparison of a model", "eval", "embedded", "--compare", "folder", "folder", named="--compare"),
    tepo("comparison with nothing", "eval", "--compare", "folder", "nowhere", named="folder"),
    tepo("comparison of broken files", "eval", "--compare", "broken_eval", "broken_eval", named="line 1"),
]

COMMANDS = [
    tepo("command of no such name", "trian", named="trian", process=True),
    tepo("option of no such name", "train", "--resum", named="--resum"),
    tepo("recipe of no such name", "recipes", "arithmetc", named="did you mean arithmetic"),
    tepo("objectives with an argument", "objectives", "tepo", named="tepo"),
    tepo("verl without a recipe", "verl", named="recipe"),
    tepo("verl with an unknown recipe", "verl", "tepo-9gpu", named="did you mean tepo-8gpu"),
    tepo("verl with the embedded model", "verl", "arithmetic", named="embedded"),
    tepo("verl with a key that is not there", "verl", "tepo-8gpu", "verl.gpu=8", named="verl.gpu"),
]

SECTIONS: dict[str, list[Case]] = {
    "Recipes and settings": RECIPES,
    "Data": DATA,
    "Models": MODELS,
    "The run folder": OUTPUT,
    "Evaluation": EVALUATIONS,
    "Other commands": COMMANDS,
}
CASES = [case for cases in SECTIONS.values() for case in cases]

ROWS = {
    "good": '{"problem": "1+1", "answer": "2"}\n{"problem": "2+2", "answer": "4"}\n',
    "empty": "",
    "broken": '{"problem": "1+1", "answer": "2"}\n{"problem": "2+\n',
    "words": '{"problem": "1+1", "answer": "2"}\n"a word"\n',
    "control": '{"problem": "1\x00+1", "answer": "2"}\n',
    "surrogate": '{"problem": "1+1", "answer": "2"}\n{"problem": "\\ud83d+2", "answer": "4"}\n',
    "surrogate_answer": '{"problem": "1+1", "answer": "\\ud83d"}\n',
    "columns": '{"question": "1+1", "answer": "2"}\n',
    "no_answer": '{"problem": "1+1", "answer": "2"}\n{"problem": "2+2"}\n',
    "null_answer": '{"problem": "1+1", "answer": null}\n',
    "empty_answer": '{"problem": "1+1", "answer": " "}\n',
    "true_answer": '{"problem": "1+1", "answer": true}\n',
    "object_answer": '{"problem": "1+1", "answer": {"value": 2}}\n',
    "nan_answer": '{"problem": "1+1", "answer": NaN}\n',
    "number_problem": '{"problem": 11, "answer": "2"}\n',
    "empty_problem": '{"problem": "", "answer": "2"}\n',
    "message": '{"problem": [{"content": "1+1"}], "answer": "2"}\n',
    "no_messages": '{"problem": [], "answer": "2"}\n',
    "same_id": '{"problem": "1+1", "answer": "2", "id": "a"}\n{"problem": "2+2", "answer": "4", "id": "a"}\n',
    "object_id": '{"problem": "1+1", "answer": "2", "id": {}}\n',
    "one": '{"problem": "1+1", "answer": "2"}\n',
    "unreadable": '{"problem": "1+1", "answer": "2 or so, who knows"}\n{"problem": "2+2", "answer": "no idea"}\n',
}
FILES = {
    "file": b"precious",
    "rows.csv": b"problem,answer\n1+1,2\n",
    "object.json": b'{"problem": "1+1"}\n',
    "broken.json": b'[{"problem": "1+1"},\n{"problem"}]\n',
    "deep.json": b"[" * 100_000,
    "latin.jsonl": '{"problem": "größer", "answer": "2"}\n'.encode("latin-1"),
    "utf16.jsonl": ROWS["good"].encode("utf-16"),
    "broken.parquet": b"PAR1 is not all that it takes",
    "broken.yaml": b"trainer: [1\n",
    "tabs.yaml": b"trainer:\n\tsteps: 4\n",
    "twice.yaml": b"seed: 1\nseed: 2\n",
    "latin.yaml": "output: größer\n".encode("latin-1"),
    "list.yaml": b"- 1\n- 2\n",
    "word.yaml": b"trainer\n",
    "number.yaml": b"3: 4\n",
    "own.py": b"NUMBER = 3\n\ndef score(responses):\n    return []\n",
    "failing.py": b"1 / 0\n",
    "folder/notes.txt": b"precious",
    "other/eval.json": b"{}",
    "broken_eval/settings.json": b"{",
    "broken_eval/eval.json": b"{}",
    "broken_eval/responses.jsonl": b"{\n",
    "folder.yaml/notes.txt": b"precious",
    "folder.jsonl/notes.txt": b"precious",
}


def make_folder(folder: Path) -> None:
    """Fill a folder with the files that the cases name."""
    for name, text in ROWS.items():
        (folder / f"{name}.jsonl").write_bytes(text.encode())
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    for name in ("broken_config", "cut_weights", "no_weights", "no_tokenizer"):
        model_folder(folder / name)
    (folder / "broken_config" / "config.json").write_text("{")
    weights = folder / "cut_weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (folder / "no_weights" / "model.safetensors").unlink()
    for file in (folder / "no_tokenizer").glob("token*"):
        file.unlink()
    _lock(folder / "busy")
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(to_yaml(load_recipe("arithmetic", ["output=run"])))
    _few_weights(folder / "few_weights")
    model_folder(folder / "no_end", eos_token_id=None)
    character_tokenizer(eos_token=None).save_pretrained(folder / "no_end")
    model_folder(folder / "small_vocabulary", vocabulary=12)
    _encoder(folder / "encoder")


def _lock(folder: Path) -> None:
    """As another run holds it."""
    folder.mkdir()
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    os.pwrite(descriptor, b"process 1 on another machine\n", 0)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # until this process ends


def _few_weights(folder: Path) -> None:
    model = tiny_model()
    state = {name: value for name, value in model.state_dict().items() if "layers.1" not in name}
    model.save_pretrained(folder, state_dict=state)
    character_tokenizer().save_pretrained(folder)


def _encoder(folder: Path) -> None:
    from transformers import ViTConfig, ViTModel

    ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)).save_pretrained(
        folder
    )
    character_tokenizer().save_pretrained(folder)


def run(case: Case, folder: Path) -> Outcome:
    """Run the command of a case in a folder: through the function behind `tepo`, or in a process of its own."""
    if case.process:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        command = [sys.executable, "-m", "tepo", *case.arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        code, out, err = _run_here(case, folder)
    return Outcome(code, _message(err, folder), out + err)


def _run_here(case: Case, folder: Path) -> tuple[int, str, str]:
    from tepo.cli import main

    out, err = io.StringIO(), io.StringIO()
    before, argv, columns = os.getcwd(), sys.argv, os.environ.get("COLUMNS")
    os.chdir(folder)
    os.environ["COLUMNS"] = "200"
    sys.argv = ["tepo", *case.arguments]
    code: int | str | None = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as end:
                code = end.code
    finally:
        os.chdir(before)
        sys.argv = argv
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return int(code or 0), out.getvalue(), err.getvalue()


def _message(err: str, folder: Path) -> str:
    """What stands after `error:`, or in the box that typer draws; without the names of folders of this machine."""
    if "─ Error ─" in err:
        inside = [line.strip("│ ") for line in err.splitlines() if line.startswith("│")]
        found = "\n".join(line for line in inside if line)
    else:
        found = err.partition("error: ")[2].strip()
    return found.replace(str(folder), "/work").replace(str(folder.resolve()), "/work")


def page(outcomes: dict[str, Outcome]) -> str:
    """docs/bad-input.md, from the outcome of each case by its command."""
    lines = [
        "# Bad input",
        "",
        "What cannot be used ends a command with exit code 2 and one message, before anything is written. This page is",
        "made from the cases of `tests/cli/test_bad_input.py` by `python scripts/write_bad_input.py`, in a folder",
        f"`/work` with files that are what their names say; {len(CASES)} cases.",
        "",
    ]
    for section, cases in SECTIONS.items():
        lines += [f"## {section}", ""]
        for case in cases:
            text = outcomes[case.command].message
            lines += [f"**{case.what}**: `{case.command}`", "```", *text.splitlines(), "```", ""]
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def headers(printed: str) -> int:
    """How many messages were printed."""
    return len(re.findall(r"(?m)^error: |─ Error ─", printed))
