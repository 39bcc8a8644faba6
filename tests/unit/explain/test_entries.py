"""Every known failure is provoked from the real libraries, and recognised as what it is."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullshard.commands.schema import schema
from fullshard.explain.match import Match, explain, explain_exception
from fullshard.explain.record import KnownError, entries
from fullshard.recipe import Recipe
from tests.ranks import RankPool
from tests.slow import one_in
from tests.unit.explain import provoke_libraries, provoke_precision, provoke_ranks

PROVOCATIONS: dict[str, Callable[..., Any]] = {
    name: function
    for module in (provoke_precision, provoke_ranks, provoke_libraries)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
}
RECORDED = {
    "cuda_out_of_memory": "cuda-out-of-memory",
    "cuda_device_side_assert": "cuda-device-side-assert",
    "cuda_device_number": "cuda-device-number",
    "cuda_in_fork": "cuda-in-fork",
    "devices_differ": "devices-differ",
    "unscale_bf16": "unscale-bf16",
    "compile_without_compiler": "compile-without-compiler",
    "nccl_duplicate_gpu": "nccl-duplicate-gpu",
    "nccl_timeout": "collective-timeout",
    "nccl_over_sockets": "slow-network",
    "nccl_without_memory": "nccl-cuda-error",
}
"""What record_on_gpu.py provoked on a GPU, where CUDA and NCCL are, and the entry of each."""
QUOTED_PATTERNS = (
    "ncclSystemError",
    r"NCCL WARN socket\w+: Connect to",
    r"NCCL WARN Call to (?:bind|connect|recv|socket) (?:failed|returned)",
)
NOT_PROVOKED = {
    "Found no NVIDIA driver on your system": "needs a CUDA build of torch on a machine without a driver",
    "The NVIDIA driver on your system is too old": "needs an old driver",
    "remote process exited or there was a network error": "needs NCCL between two GPUs",
    r"FlashAttention only supports? fp16 and bf16 data type": "needs the package flash-attn and a GPU",
    r"Flash Attention \S+ only supports torch\.float16 and torch\.bfloat16 dtypes": "needs the package flash-attn",
    r"`rope_scaling` must be a dictionary with": "older Transformers",
    r"Signals\.SIGHUP death signal": "torch's launcher logs it while it ends the ranks",
    r"was ended by SIGHUP": "our launcher's words for a rank",
    "killed by the kernel": "our launcher's words for a rank on a host that ran out of memory",
    **dict.fromkeys(QUOTED_PATTERNS, "needs NCCL between two nodes"),
    r"writev \S+: Broken pipe": "gloo says it when it writes just after a peer has ended",
    r"\b_try_get_data\b.{0,6000}?\b(ConnectionResetError|ConnectionRefusedError|BrokenPipeError|EOFError)\b": (
        "a worker that is killed in the moment in which it hands over a batch"
    ),
    "Gloo connectFullMesh failed": "needs two nodes that cannot reach each other",
}
QUOTED = {
    "nccl-system-error": (
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, "
        "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        "node7:12251:12400 [5] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to fe80::1%ib1<17943> failed : "
        "Software caused connection abort",
        "node1:275975:275975 [0] misc/socket.cc:379 NCCL WARN Call to bind failed : Cannot assign requested address",
    ),
    "flash-attention-dtype": ("RuntimeError: FlashAttention only support fp16 and bf16 data type",),
    "rope-scaling": (
        "ValueError: `rope_scaling` must be a dictionary with two fields, `type` and `factor`, got {'factor': 8.0, "
        "'high_freq_factor': 4.0, 'rope_type': 'llama3'}",
    ),
    "hang-up": ("W0325 21:16:42.796000 578 api.py:741] Received Signals.SIGHUP death signal, shutting down workers",),
}
"""Messages of packages and networks that are not here, as they are reported in public issues."""
IN_SOURCE = {
    " only supports torch.float16 and torch.bfloat16 dtypes": "transformers.modeling_utils",
    "Received %s death signal, shutting down workers": "torch.distributed.elastic.agent.server.api",
}
"""Messages that cannot be provoked here, and the installed module that still has them."""
SEEDS = {
    "Found dtype Float but expected Half": "mixed-dtypes",
    "torch.cuda.OutOfMemoryError: CUDA out of memory.": "cuda-out-of-memory",
    "RuntimeError: NCCL Error 1: unhandled cuda error": "nccl-cuda-error",
    "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32": (
        "fsdp1-uniform-dtype"
    ),
    "ValueError: Attempting to unscale FP16 gradients.": "unscale-fp16",
    "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`...": (
        "cache-with-checkpointing"
    ),
    "UserWarning: None of the inputs have requires_grad=True. Gradients will be None": "nothing-requires-grad",
    "You are not running the flash-attention implementation, expect numerical differences.": "not-flash-attention",
    "NotImplementedError: \"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'": (
        "unscale-bf16"
    ),
}
"""The errors that this program was written to end, in the words of those who met them."""


def entry_of(provocation: str) -> str:
    return provocation.partition("__")[0].replace("_", "-")


@functools.cache
def recorded() -> dict[str, str]:
    path = Path(__file__).with_name("recorded_on_gpu.json")
    errors: dict[str, str] = json.loads(path.read_text())["errors"]
    return errors


def names(matches: list[Match]) -> list[str]:
    return [match.entry.name for match in matches]


@functools.cache
def _said(provocation: str, ranks: RankPool, folder: Path) -> tuple[str, list[str]]:
    """What a provocation said, and the entries that its exception is taken for; provoked once."""
    function = PROVOCATIONS[provocation]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given: dict[str, Any] = {"ranks": ranks, "folder": folder / provocation}
        wanted = {name: given[name] for name in inspect.signature(function).parameters}
        if "folder" in wanted:
            wanted["folder"].mkdir()
        try:
            text = str(function(**wanted))
            return text, names(explain(text))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return traceback.format_exc(), names(explain_exception(error))


@pytest.fixture(scope="module")
def provoked(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, list[str]]]:
    folder = tmp_path_factory.mktemp("provoked")
    return lambda provocation: _said(provocation, ranks, folder)


@pytest.mark.parametrize("provocation", one_in(4, PROVOCATIONS))
def test_the_real_error_is_recognised_first(provocation: str, provoked: Callable[[str], tuple[str, list[str]]]) -> None:
    text, by_exception = provoked(provocation)
    assert names(explain(text))[:1] == [entry_of(provocation)], text
    assert by_exception[:1] == [entry_of(provocation)]


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_gpu_said_is_recognised_first(name: str) -> None:
    """CUDA and NCCL are not here: these are real errors, recorded on a GPU by record_on_gpu.py."""
    assert names(explain(recorded()[name]))[:1] == [RECORDED[name]]


@pytest.mark.parametrize("line", SEEDS)
def test_the_errors_of_the_seeds_are_known(line: str) -> None:
    assert explain(line)[0].entry.name == SEEDS[line]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in QUOTED.items() for text in texts])
def test_what_others_have_met_is_recognised_first(name: str, text: str) -> None:
    assert names(explain(text))[:1] == [name]


@pytest.mark.parametrize("message", IN_SOURCE)
def test_the_installed_library_still_says_it(message: str) -> None:
    module = importlib.util.find_spec(IN_SOURCE[message])
    assert module
    assert module.origin
    assert message in Path(module.origin).read_text()


def test_every_entry_is_provoked() -> None:
    provoked = {entry_of(name) for name in PROVOCATIONS} | set(RECORDED.values()) | set(QUOTED)
    assert provoked == {entry.name for entry in entries()}
    assert set(recorded()) == set(RECORDED)
    assert len(entries()) >= 79


def test_every_pattern_is_needed(provoked: Callable[[str], tuple[str, list[str]]]) -> None:
    """Each pattern of each entry finds a real error; the few that cannot be had say why."""
    texts: dict[str, list[str]] = {}
    for name in PROVOCATIONS:
        texts.setdefault(entry_of(name), []).append(provoked(name)[0])
    for name, entry in RECORDED.items():
        texts.setdefault(entry, []).append(recorded()[name])
    texts.setdefault("nccl-system-error", [])
    idle = [
        pattern
        for entry in entries()
        for pattern in entry.patterns
        if not any(finds(pattern, text) for text in texts[entry.name])
    ]
    assert sorted(idle) == sorted(NOT_PROVOKED)


def finds(pattern: str, text: str) -> bool:
    return re.search(pattern, re.sub(r"\s+", " ", text)) is not None


def test_keys_are_keys_of_the_recipe() -> None:
    known = _keys(schema(Recipe), "", frozenset())
    for entry in entries():
        assert set(entry.keys) <= known, entry.name
        assert len(set(entry.keys)) == len(entry.keys), entry.name


def _keys(node: dict[str, Any], where: str, inside: frozenset[str], definitions: Any = None) -> set[str]:
    definitions = definitions or node.get("$defs", {})
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return set() if name in inside else _keys(definitions[name], where, inside | {name}, definitions)
    found: set[str] = set()
    for part in [*node.get("anyOf", []), *([node["items"]] if "items" in node else [])]:
        found |= _keys(part, where, inside, definitions)
    for key, part in node.get("properties", {}).items():
        path = f"{where}.{key}" if where else key
        found |= {path} | _keys(part, path, inside, definitions)
    return found


def test_words_that_name_a_key_set_it_as_the_recipe_takes_it() -> None:
    """A remedy that says `key=value` names a real key."""
    known = _keys(schema(Recipe), "", frozenset())
    for entry in entries():
        for text in (entry.cause, *entry.remedy, *entry.not_a_cure):
            for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", text):
                assert key in known, (entry.name, key)


def test_the_right_remedies() -> None:
    by_name = {entry.name: entry for entry in entries()}
    memory = by_name["cuda-out-of-memory"]
    assert any("sharding.strategy=full" in step for step in memory.remedy)
    assert not any("grad_op" in step for step in memory.remedy)
    assert any("grad_op" in advice and "more" in advice for advice in memory.not_a_cure)
    scaler = by_name["unscale-fp16"]
    assert "float32" in scaler.remedy[0]
    assert any("--fp16" in advice for advice in scaler.not_a_cure)
    assert any("learning rate" in advice for advice in by_name["not-finite"].not_a_cure)
    assert "not" in by_name["nothing-requires-grad"].cause.split("harmless")[1]


def test_a_healthy_log_is_no_failure(tmp_path: Path, ranks: RankPool) -> None:
    """The whole log of a real run, warnings and header included."""
    from tests.small import model_folder, recipe, token_file, train

    model_folder(tmp_path / "model")
    token_file(tmp_path / "train.jsonl", records=32)
    settings = recipe(tmp_path, duration={"steps": 2}, log={"every_steps": 1, "debug": True, "sinks": []})
    ranks.run(train, settings, world=2)
    log = (tmp_path / "runs" / "run" / "log.txt").read_text()
    assert "Training complete!" in log
    assert explain(log) == []


def test_the_order_is_cause_general_consequence_remark_then_place() -> None:
    text = (
        "None of the inputs have requires_grad=True\n Connection closed by peer\n"
        "Error(s) in loading state_dict for X\n"
        "CUDA out of memory\n optimizer got an empty parameter list"
    )
    assert names(explain(text)) == [
        "cuda-out-of-memory",
        "empty-parameter-list",
        "state-dict-keys",
        "peer-lost",
        "nothing-requires-grad",
    ]


def test_broken_lines_and_colours_do_not_matter() -> None:
    text = "\x1b[31mValueError: Attempting to\r\n   unscale\n FP16 gradients.\x1b[0m"
    assert names(explain(text)) == ["unscale-fp16"]


def test_an_invalid_entry_is_refused() -> None:
    whole = entries()[0].model_dump()
    for change in ({"patterns": ["("]}, {"patterns": []}, {"remedy": []}, {"role": "guess"}, {"caus": "x"}):
        with pytest.raises(ValueError, match=r"validation error"):
            KnownError.model_validate({**whole, **change})
